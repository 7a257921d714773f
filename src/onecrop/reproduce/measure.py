"""The measurements behind a cell: read from what a run has left behind, or made where they are not there yet."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from onecrop.data.sources import Request, load_labelled
from onecrop.detect import detect
from onecrop.detect.run import DetectRun
from onecrop.device import choose_device
from onecrop.errors import UserError
from onecrop.evaluate import Probe, evaluate, fewer_labels, run_probe
from onecrop.files import append_json_line, read_json_lines
from onecrop.map import POINTS, make_map
from onecrop.nets import build_backbone
from onecrop.report.reading import read_run
from onecrop.reproduce.plan import Options, Step, detection_recipe
from onecrop.reproduce.tables import Measure

UNTRAINED_SIZE = 224  # what ImageNet's networks are fed with

Found = dict[str, Any]  # "value", and what it was measured under


def measure(step: Step, what: Measure, options: Options) -> Found:
    if what.kind == "linear":
        return _probed(step, options.use.get(what.what, what.what), options)
    if what.kind == "hours":
        return {"value": sum(row["seconds"] for row in _metrics(step)) / 3600, **_began(step)}
    if what.kind == "memory":
        most = max((row["peak_memory"] or 0 for row in _metrics(step)), default=0)
        return {"value": most / 1e6 if most else None, **_began(step)}
    if what.kind == "map":
        return _neighbours(step, options)
    return _detected(step, what, options)


def _run(step: Step) -> Path:
    assert step.recipe is not None, "an untrained network has no run"
    return Path(step.recipe.out)


def _metrics(step: Step) -> list[dict[str, Any]]:
    return read_json_lines(_run(step) / "metrics.jsonl")


def _began(step: Step) -> Found:
    """Under which circumstances a run was made."""
    begun = json.loads((_run(step) / "provenance.json").read_text())
    recipe = json.loads((_run(step) / "recipe.json").read_text())
    facts = {name: recipe[name] for name in ("epochs", "batch_size", "optimizer", "lr", "seed")}
    return {"run": str(_run(step)), "images": begun["num_images"], "device": begun["device"], **facts}


def _probed(step: Step, data: str, options: Options) -> Found:
    folder = Path(options.out) / "runs" / step.name
    row = _probe_row(folder, data, options)
    if row is None:
        if step.recipe is None:
            _probe_untrained(step, folder, data, options)
        else:
            limits: dict[str, Any] = {"subset": options.images, "seed": options.seed, "device": options.device}
            evaluate(folder, data, (options.probe,), data_dir=options.data_dir, **limits)
        row = _probe_row(folder, data, options)
    if row is None:
        raise UserError(f"{folder / 'results.jsonl'} cannot be written: the score is lost")
    told = {name: row[name] for name in ("protocol", "image_size", "resize", "num_train", "num_test", "date")}
    return {"value": row["accuracy"], **(_began(step) if step.recipe else {}), **told, "evaluation": row["evaluation"]}


def _probe_row(folder: Path, data: str, options: Options) -> dict[str, Any] | None:
    wanted = {"evaluation": options.probe, "data": data, "seed": options.seed, "subset": options.images}
    rows = [row for row in read_json_lines(folder / "results.jsonl") if "step" not in row and "image_size" in row]
    rows = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    return rows[-1] if rows else None


def _probe_untrained(step: Step, folder: Path, data: str, options: Options) -> None:
    """The network as it was initialised, with the layers it has for ImageNet's pictures."""
    import torch

    torch.manual_seed(options.seed)
    name = options.use.get(step.training.backbone, step.training.backbone)
    probe = Probe(UNTRAINED_SIZE, choose_device(options.device), options.seed)
    sets = fewer_labels(load_labelled(data, Request(options.data_dir, UNTRAINED_SIZE)), options.images, options.seed)
    row = run_probe(options.probe, build_backbone(name, "standard", UNTRAINED_SIZE).eval(), sets, probe)
    folder.mkdir(parents=True, exist_ok=True)
    append_json_line(folder / "results.jsonl", {"of": "untrained", "epoch": 0, **row, "subset": options.images})


def _neighbours(step: Step, options: Options) -> Found:
    """Of every picture on the map, the share of its nearest that are of its class."""
    points = POINTS if options.images is None else min(POINTS, options.images)
    make_map(_run(step), data_dir=options.data_dir, points=points, seed=options.seed, device=options.device)
    found = read_run(_run(step)).map
    assert found is not None, "it has just been made"
    same = found.labels[found.neighbours] == found.labels[:, None]
    told = {"protocol": f"{found.facts['method']}; {found.neighbours.shape[1]} neighbours", "points": len(found)}
    return {"value": float(100 * np.mean(same)), **_began(step), **told}


def _detected(step: Step, what: Measure, options: Options) -> Found:
    recipe = detection_recipe(step, what.kind, options)
    run = DetectRun(recipe.out)
    if not run.finished:
        detect(recipe, resume=run.recipe_file.exists())
    part, _, score = what.what.partition(" ")
    rows = [row for row in read_json_lines(run.results_file) if row.get("evaluation") == f"detection {part}"]
    if not rows:
        raise UserError(f"{run.results_file} holds no score of {part}: `onecrop detect --out {run.folder} --resume`")
    facts = ("iterations", "scale", "size_scale", "batch_size", "num_train", "num_test", "train_part", "test_part")
    told = {name: rows[-1][name] for name in (*facts, "metric", "date")}
    return {"value": rows[-1][score], "run": str(run.folder), **told}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
