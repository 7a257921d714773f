"""The measurements behind a cell: read from what a run has left behind, or made where they are not there yet."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
from onecrop.reproduce.plan import DETECTION, Options, Step, detection_recipe
from onecrop.reproduce.tables import Measure

UNTRAINED_SIZE = 224  # what ImageNet's networks are fed with

Found = dict[str, Any]  # "value", and what it was measured under


def measure(step: Step, what: Measure, options: Options) -> Found:
    """Read it from the run's files, or make it and then read it."""
    found = look_up(step, what, options)
    if found is None:
        _make(step, what, options)
        found = look_up(step, what, options)
    if found is None:
        raise UserError(f"{what.kind} {what.what} of {step.name} was measured and cannot be read: is the disk full?")
    return found


def look_up(step: Step, what: Measure, options: Options) -> Found | None:
    """What the files say; None where it is not there yet."""
    if what.kind in DETECTION:
        return _detected(step, what, options)
    if step.recipe is not None and not step.is_finished:
        return None
    if what.kind == "linear":
        return _probed(step, options.use.get(what.what, what.what), options)
    if what.kind == "map":
        return _neighbours(step)
    metrics = read_json_lines(_folder(step, options) / "metrics.jsonl")
    if what.kind == "hours":
        return {"value": sum(row["seconds"] for row in metrics) / 3600, **_began(step)}
    most = max((row["peak_memory"] or 0 for row in metrics), default=0)  # 0: on a CPU it is not known
    return {"value": most / 1e6 if most else None, **_began(step)}


def _make(step: Step, what: Measure, options: Options) -> None:
    if what.kind in DETECTION:
        recipe = detection_recipe(step, what.kind, options)
        detect(recipe, resume=DetectRun(recipe.out).recipe_file.exists())
    elif what.kind == "map":
        points = POINTS if options.images is None else min(POINTS, options.images)
        folder = _folder(step, options)
        make_map(folder, data_dir=options.data_dir, points=points, seed=options.seed, device=options.device)
    elif step.recipe is None:
        _probe_untrained(step, options.use.get(what.what, what.what), options)
    else:
        limits: dict[str, Any] = {"subset": options.images, "seed": options.seed, "device": options.device}
        data = options.use.get(what.what, what.what)
        evaluate(_folder(step, options), data, (options.probe,), data_dir=options.data_dir, **limits)


def _folder(step: Step, options: Options) -> Path:
    return Path(options.out) / "runs" / step.name


def _began(step: Step) -> Found:
    """Under which circumstances a run was made."""
    if step.recipe is None:
        return {}
    folder = Path(step.recipe.out)
    begun = json.loads((folder / "provenance.json").read_text())
    recipe = json.loads((folder / "recipe.json").read_text())
    facts = {name: recipe[name] for name in ("epochs", "batch_size", "optimizer", "lr", "seed")}
    return {"run": str(folder), "images": begun["num_images"], "device": begun["device"], **facts}


def _probed(step: Step, data: str, options: Options) -> Found | None:
    wanted = {"evaluation": options.probe, "data": data, "seed": options.seed, "subset": options.images}
    file = _folder(step, options) / "results.jsonl"
    rows = [row for row in read_json_lines(file) if "step" not in row and "image_size" in row]
    rows = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    if not rows:
        return None
    told = ("evaluation", "protocol", "image_size", "resize", "num_train", "num_test", "date")
    return {"value": rows[-1]["accuracy"], **_began(step), **{name: rows[-1][name] for name in told}}


def _probe_untrained(step: Step, data: str, options: Options) -> None:
    """The network as it was initialised, with the layers it has for ImageNet's pictures."""
    torch.manual_seed(options.seed)
    name = options.use.get(step.training.backbone, step.training.backbone)
    probe = Probe(UNTRAINED_SIZE, choose_device(options.device), options.seed)
    sets = fewer_labels(load_labelled(data, Request(options.data_dir, UNTRAINED_SIZE)), options.images, options.seed)
    row = run_probe(options.probe, build_backbone(name, "standard", UNTRAINED_SIZE).eval(), sets, probe)
    folder = _folder(step, options)
    folder.mkdir(parents=True, exist_ok=True)
    append_json_line(folder / "results.jsonl", {"of": "untrained", "epoch": 0, **row, "subset": options.images})


def _neighbours(step: Step) -> Found | None:
    """Of every picture on the map, the share of its nearest that are of its class."""
    found = None if step.recipe is None else read_run(Path(step.recipe.out)).map
    if found is None:
        return None
    same = found.labels[found.neighbours] == found.labels[:, None]
    told = {"protocol": f"{found.facts['method']}; {found.neighbours.shape[1]} neighbours", "points": len(found)}
    return {"value": float(100 * np.mean(same)), **_began(step), **told}


def _detected(step: Step, what: Measure, options: Options) -> Found | None:
    run = DetectRun(detection_recipe(step, what.kind, options).out)
    part, _, score = what.what.partition(" ")
    rows = [row for row in read_json_lines(run.results_file) if row.get("evaluation") == f"detection {part}"]
    if not run.finished or not rows:
        return None
    facts = ("iterations", "scale", "size_scale", "batch_size", "num_train", "num_test", "train_part", "test_part")
    told = {name: rows[-1][name] for name in (*facts, "metric", "date")}
    return {"value": rows[-1][score], "run": str(run.folder), **told}
