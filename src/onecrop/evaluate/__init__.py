"""Evaluation of frozen features. A new evaluation is one function and one line in EVALUATIONS."""

import copy
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onecrop.augment import describe_central_crop
from onecrop.data import ImageSet
from onecrop.data.images import subset_index
from onecrop.data.sources import Labelled, Request, load_labelled, pretrained_on
from onecrop.device import choose_device, tune
from onecrop.distributed import joined, world
from onecrop.errors import UserError, not_fatal, unknown
from onecrop.evaluate.features import Probe
from onecrop.evaluate.knn import knn
from onecrop.evaluate.linear import linear, linear_fast
from onecrop.files import append_json_line, read_json
from onecrop.nets import Pixels, load_backbone, read_backbone
from onecrop.nets.backbones import backbone_file, untrained_like
from onecrop.report.card import write_card

# (backbone, train, test, probe) -> accuracy in percent and the protocol it was measured by
EVALUATIONS: dict[str, Callable[[nn.Module, ImageSet, ImageSet, Probe], dict[str, Any]]] = {
    "knn": knn,
    "linear": linear,
    "linear-fast": linear_fast,
}


@joined("evaluate")
def evaluate(
    run: Path | str,
    data: str | None = None,
    evaluations: tuple[str, ...] = ("knn", "linear"),
    *,
    baselines: bool = False,
    data_dir: str | None = None,
    image_size: int | None = None,
    subset: int | None = None,
    device: str = "auto",
    seed: int = 0,
    k: int = 200,
    backbone: nn.Module | None = None,
) -> list[dict[str, Any]]:
    """Score a run's backbone and, as baselines, raw pixels and the same net untrained; results.jsonl gets the rows.

    data: another set than it was pretrained on makes a transfer. image_size: what the network is fed with there, in
    pixels a side; as in pretraining where it is not given. Rows say both, and how pictures were brought to that size.
    subset: labelled training images that probes may see, drawn at random; the test part is always whole.
    backbone: the module that the run was given, where it came from Python; it stays as it is.
    Under torchrun the processes share the work, and the first one writes.
    """
    for name in evaluations:
        if name not in EVALUATIONS:
            raise unknown("evaluation", name, EVALUATIONS)
    if k < 1:
        raise UserError(f"--k {k} is too small: a vote needs at least one neighbour")
    _, facts = read_backbone(run)
    trained = load_backbone(run, into=copy.deepcopy(backbone))
    folder = backbone_file(run).parent
    begun = read_json(folder / "recipe.json") or {}  # where the run found its data, if the folder is a run
    size = _input_size(trained, int(facts["image_size"]), image_size)
    request = Request(
        begun.get("data_dir", "data") if data_dir is None else data_dir,
        size,
        holdout=begun.get("holdout", 0) if data is None else 0,
        drop_duplicates=data is None and bool(begun.get("drop_duplicates")),  # another set is scored on as it is
    )
    probe = Probe(size, choose_device(device), seed, k)
    tune(probe.device)
    with world().by_turns():
        sets = fewer_labels(load_labelled(data or pretrained_on(facts), request), subset, seed)
    candidates: dict[str, nn.Module] = {}
    if baselines:
        candidates["pixels"] = Pixels(size).eval()
        candidates["untrained"] = untrained_like(run, facts.get("seed", 0), backbone)
    candidates["pretrained"] = trained
    rows = []
    for of, network in candidates.items():
        for name in evaluations:
            row = run_probe(name, network, sets, probe)
            row = {"of": of, "epoch": facts["epoch"] if of == "pretrained" else 0, **row, "pretraining": facts}
            row |= {} if subset is None else {"subset": subset}  # not a score on all labels
            rows.append(row)
            if world().first:
                with not_fatal():
                    append_json_line(folder / "results.jsonl", row)
    if begun and world().first:
        with not_fatal():
            write_card(folder)
    return rows


def run_probe(name: str, backbone: nn.Module, sets: Labelled, probe: Probe) -> dict[str, Any]:
    """One evaluation -> one result row, with all that is needed to compare it with another."""
    result = EVALUATIONS[name](backbone.to(probe.device), sets.train, sets.test, probe)
    return {
        "evaluation": name,
        "data": sets.train.name,
        "split": sets.split,
        "num_train": len(sets.train),
        "num_test": len(sets.test),
        "num_classes": len(sets.train.classes),
        "image_size": probe.image_size,
        "resize": describe_central_crop(sets.test.images.shape[-1], probe.image_size),
        "seed": probe.seed,
        **result,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def fewer_labels(sets: Labelled, count: int | None, seed: int) -> Labelled:
    """With at most so many labelled training images."""
    if count is None or count >= len(sets.train):
        return sets
    return sets._replace(train=sets.train.take(subset_index(len(sets.train), count, seed)))


def _input_size(backbone: nn.Module, pretrained_at: int, wanted: int | None) -> int:
    """What the network is fed with; a size that it cannot take is refused before any data is read."""
    size = pretrained_at if wanted is None else wanted
    if not 8 <= size <= 4096:
        raise UserError(f"--image-size {size} is out of range: it must be between 8 and 4096")
    if size != pretrained_at:
        try:
            with torch.no_grad():
                backbone(torch.zeros(1, 3, size, size))
        except (RuntimeError, AssertionError, ValueError) as error:
            reason = " ".join(str(error).split())[:150]
            raise UserError(
                f"the backbone was pretrained at {pretrained_at} px and does not take {size} ({reason}): "
                "leave --image-size out"
            ) from None
    return size


__all__ = ["EVALUATIONS", "Probe", "evaluate", "fewer_labels", "run_probe"]
