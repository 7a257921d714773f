"""The measurements behind a cell: read from the record, or from what a run has left behind, or made.

The record is one file beside the tables, found.jsonl, a line a measurement. Tables are made from it alone, so that it
can be kept, and carried on elsewhere, without the runs.
"""

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
from onecrop.evaluate import EVALUATIONS, Probe, evaluate, fewer_labels, run_probe
from onecrop.files import append_json_line, read_json_lines
from onecrop.map import make_map
from onecrop.nets import build_backbone
from onecrop.report.reading import read_run
from onecrop.reproduce.options import Options
from onecrop.reproduce.plan import DETECTION, Step, detection_recipe
from onecrop.reproduce.tables import Measure
from onecrop.runs import circumstances

UNTRAINED_SIZE = 224  # what ImageNet's networks are fed with

Found = dict[str, Any]  # "value", and what it was measured under


class Record:
    """What has been measured so far under one --out."""

    def __init__(self, options: Options) -> None:
        self.file, self.device = Path(options.out) / "found.jsonl", options.device
        self.refresh()

    def refresh(self) -> None:
        """With what other processes have measured under the same --out."""
        self.found: dict[str, Found] = {row.pop("of"): row for row in read_json_lines(self.file)}

    def get(self, step: Step, what: Measure) -> Found | None:
        """None where it is not there yet. What a run has left behind is taken, and recorded, not made again."""
        key = _key(step, what)
        if key not in self.found:
            found = _read(step, what)
            if found is None:
                return None
            self._keep(key, found)
        return self.found[key]

    def measure(self, step: Step, what: Measure) -> None:
        """Make it, where it is not there yet."""
        if self.get(step, what) is None:
            _make(step, what)
            if self.get(step, what) is None:
                raise UserError(f"{_key(step, what)} was measured and cannot be read: is the disk full?")

    def left(self, step: Step) -> Step:
        """The step with what is still to be measured."""
        return step._replace(measures=tuple(what for what in step.measures if self.get(step, what) is None))

    def _keep(self, key: str, found: Found) -> None:
        now = circumstances(choose_device(self.device))
        here = {"device": now["device"], "torch": now["versions"]["torch"], "date": now["date"]}
        self.found[key] = {**here, **found}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        append_json_line(self.file, {"of": key, **self.found[key]})


def probe_of(what: Measure, options: Options) -> str | None:
    """Which evaluation a measurement is; None where it is none. --with says what stands for the paper's own."""
    return options.probe if what.kind == "linear" else what.kind if what.kind in EVALUATIONS else None


def _key(step: Step, what: Measure) -> str:
    """All that a measurement depends on."""
    options, probe = step.options, probe_of(what, step.options)
    if what.kind in DETECTION:
        return f"{Path(detection_recipe(step, what.kind).out).name}: {what.what}"
    if probe is None:
        return f"{step.name}: {what.kind}"
    labels = "" if options.images is None else f", at most {options.images} labels"
    return f"{step.name}: {probe} on {Path(options.stand_in(what.what)).name}{labels}"


def _read(step: Step, what: Measure) -> Found | None:
    """What the run's files say."""
    if what.kind in DETECTION:
        return _detected(step, what)
    if step.recipe is not None and not step.is_finished:
        return None
    probe = probe_of(what, step.options)
    if probe is not None:
        return _probed(step, probe, step.options.stand_in(what.what))
    if what.kind == "map":
        return _neighbours(step)
    metrics = read_json_lines(_folder(step) / "metrics.jsonl")
    if what.kind == "hours":
        return {"value": sum(row["seconds"] for row in metrics) / 3600, **_began(step)}
    if what.kind == "instances":  # in the last epoch, of all of its images
        began = _began(step)
        return {"value": 100 * metrics[-1]["accuracy"], **began, "num_test": began["images"]}
    most = max((row["peak_memory"] or 0 for row in metrics), default=0)  # 0: on a CPU it is not known
    return {"value": most / 1e6 if most else None, **_began(step)}


def _make(step: Step, what: Measure) -> None:
    options, probe = step.options, probe_of(what, step.options)
    if what.kind in DETECTION:
        recipe = detection_recipe(step, what.kind)
        detect(recipe, resume=DetectRun(recipe.out).recipe_file.exists())
    elif what.kind == "map":
        make_map(_folder(step), data_dir=options.data_dir, seed=options.seed, device=options.device)
    elif probe is not None and step.recipe is None:
        _probe_untrained(step, probe, options.stand_in(what.what))
    elif probe is not None:
        limits: dict[str, Any] = {"subset": options.images, "seed": options.seed, "device": options.device}
        evaluate(_folder(step), options.stand_in(what.what), (probe,), data_dir=options.data_dir, **limits)


def _folder(step: Step) -> Path:
    return Path(step.options.out) / "runs" / step.name


def _began(step: Step) -> Found:
    """Under which circumstances a run was made."""
    if step.recipe is None:
        return {}
    folder = Path(step.recipe.out)
    begun = json.loads((folder / "provenance.json").read_text())
    recipe = json.loads((folder / "recipe.json").read_text())
    facts = {name: recipe[name] for name in ("epochs", "batch_size", "optimizer", "lr", "seed")}
    made_on = {"device": begun["device"], "torch": begun["versions"]["torch"]}
    return {"run": step.name, "images": begun["num_images"], **made_on, "date": begun["date"], **facts}


def _probed(step: Step, probe: str, data: str) -> Found | None:
    wanted = {"evaluation": probe, "data": data, "seed": step.options.seed, "subset": step.options.images}
    if step.recipe is not None:  # what somebody tried by hand, at another size or of another network, is not meant
        begun = json.loads((Path(step.recipe.out) / "recipe.json").read_text())
        wanted |= {"of": "pretrained", "image_size": begun["image_size"]}
    rows = read_json_lines(_folder(step) / "results.jsonl")
    rows = [row for row in rows if "step" not in row and "image_size" in row]
    rows = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    if not rows:
        return None
    told = ("evaluation", "protocol", "image_size", "resize", "num_train", "num_test", "date")
    return {"value": rows[-1]["accuracy"], **_began(step), **{name: rows[-1][name] for name in told}}


def _probe_untrained(step: Step, probe: str, data: str) -> None:
    """The network as it was initialised, with the layers it has for ImageNet's pictures."""
    options = step.options
    torch.manual_seed(options.seed)
    view = Probe(UNTRAINED_SIZE, choose_device(options.device), options.seed)
    sets = fewer_labels(load_labelled(data, Request(options.data_dir, UNTRAINED_SIZE)), options.images, options.seed)
    network = build_backbone(options.stand_in(step.training.backbone), "standard", UNTRAINED_SIZE).eval()
    row = run_probe(probe, network, sets, view)
    _folder(step).mkdir(parents=True, exist_ok=True)
    append_json_line(_folder(step) / "results.jsonl", {"of": "untrained", "epoch": 0, **row, "subset": options.images})


def _neighbours(step: Step) -> Found | None:
    """Of every picture on the map, the share of its nearest that are of its class."""
    found = None if step.recipe is None else read_run(Path(step.recipe.out)).map
    if found is None:
        return None
    same = found.labels[found.neighbours] == found.labels[:, None]
    told = {"protocol": f"{found.facts['method']}; {found.neighbours.shape[1]} neighbours", "points": len(found)}
    return {"value": float(100 * np.mean(same)), **_began(step), **told}


def _detected(step: Step, what: Measure) -> Found | None:
    run = DetectRun(detection_recipe(step, what.kind).out)
    part, _, score = what.what.partition(" ")
    rows = [row for row in read_json_lines(run.results_file) if row.get("evaluation") == f"detection {part}"]
    if not run.finished or not rows:
        return None
    facts = ("iterations", "scale", "size_scale", "batch_size", "num_train", "num_test", "train_part", "test_part")
    told = {name: rows[-1][name] for name in (*facts, "metric", "date")}
    return {"value": rows[-1][score], "run": run.folder.name, **told}
