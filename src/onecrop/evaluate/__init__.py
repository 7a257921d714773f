"""Evaluation of frozen features. A new evaluation is one function and one line in EVALUATIONS."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from onecrop.data import ImageSet
from onecrop.data.sources import Request, load_labelled
from onecrop.device import choose_device
from onecrop.errors import UserError, unknown
from onecrop.evaluate.features import Probe
from onecrop.evaluate.knn import knn
from onecrop.evaluate.linear import linear, linear_fast
from onecrop.files import append_json_line
from onecrop.nets import Pixels, load_backbone, read_backbone
from onecrop.nets.backbones import untrained_like

# (backbone, train, test, probe) -> accuracy in percent and the protocol it was measured by
EVALUATIONS: dict[str, Callable[[nn.Module, ImageSet, ImageSet, Probe], dict[str, Any]]] = {
    "knn": knn,
    "linear": linear,
    "linear-fast": linear_fast,
}


def evaluate(
    run: Path | str,
    data: str | None = None,
    evaluations: tuple[str, ...] = ("knn", "linear"),
    *,
    baselines: bool = False,
    data_dir: str = "data",
    device: str = "auto",
    seed: int = 0,
    k: int = 200,
) -> list[dict[str, Any]]:
    """Score a run's backbone and, as baselines, raw pixels and the same net untrained; results.jsonl gets the rows."""
    for name in evaluations:
        if name not in EVALUATIONS:
            raise unknown("evaluation", name, EVALUATIONS)
    _, facts = read_backbone(run)
    size, data = facts["image_size"], data or facts["data"]
    probe = Probe(size, choose_device(device), seed, k)
    candidates: dict[str, Callable[[], nn.Module]] = {}
    if baselines:
        candidates |= {"pixels": partial(Pixels, size), "untrained": partial(untrained_like, run, facts.get("seed", 0))}
    candidates["pretrained"] = partial(load_backbone, run)
    rows = []
    for of, build in candidates.items():
        backbone = build().eval()
        for name in evaluations:
            row = run_probe(name, backbone, data, Request(data_dir, size), probe)
            row = {"of": of, "epoch": facts["epoch"] if of == "pretrained" else 0, **row, "pretraining": facts}
            rows.append(row)
            folder = Path(run) if Path(run).is_dir() else Path(run).parent
            append_json_line(folder / "results.jsonl", row)
    return rows


def run_probe(name: str, backbone: nn.Module, data: str, request: Request, probe: Probe) -> dict[str, Any]:
    """One evaluation -> one result row, with all that is needed to compare it with another."""
    train, test, split = load_labelled(data, request)
    result = EVALUATIONS[name](backbone.to(probe.device), train, test, probe)
    return {
        "evaluation": name,
        "data": data,
        "split": split,
        "num_train": len(train),
        "num_test": len(test),
        "seed": probe.seed,
        **result,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def check_labels(data: str, request: Request) -> None:
    """Say before training, not after the first epoch, that a probe will have no labels."""
    try:
        load_labelled(data, request)
    except UserError as error:
        raise UserError(f"--probe-every cannot work: {error}") from None


__all__ = ["EVALUATIONS", "Probe", "check_labels", "evaluate", "run_probe"]
