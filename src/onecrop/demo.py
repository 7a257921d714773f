"""The demo: unlabelled procedural pictures in, a measurably better backbone out, with the evidence beside it."""

import shutil
import time
from pathlib import Path

import numpy as np
import torch.nn.functional as F

from onecrop.data import load
from onecrop.device import choose_device
from onecrop.errors import not_fatal
from onecrop.evaluate import Probe, evaluate
from onecrop.evaluate.features import extract
from onecrop.files import write_atomically
from onecrop.map import nearest
from onecrop.nets import load_backbone
from onecrop.recipes import named
from onecrop.report.plots import plot_curves, plot_gallery
from onecrop.report.tables import result_table
from onecrop.train import pretrain

NEIGHBOURS_OF_VOTE = 20  # of 4,000 images; the usual 200 is meant for sets ten times as large


def run_demo(folder: Path) -> None:
    started = time.monotonic()
    recipe = named("demo").override({"out": str(folder / "run")})
    mark = folder / ".onecrop-demo"  # says that the run in this folder is the demo's own, and may start afresh
    if mark.exists():
        shutil.rmtree(recipe.out, ignore_errors=True)
    elif not folder.exists() or not any(folder.iterdir()):
        write_atomically(mark, b"")
    print("Pretraining on unlabelled shapes: every picture is its own class.")
    run = pretrain(recipe)
    print("\nAccuracy on frozen features (labels are used only here), in percent:")
    print(result_table(evaluate(run, evaluations=("knn", "linear-fast"), baselines=True, k=NEIGHBOURS_OF_VOTE)))
    with not_fatal():  # without matplotlib the backbone and its scores are still there
        pictures = [plot_curves(run, folder / "curves.png"), gallery(run, folder / "neighbours.png")]
        print(f"\npictures: {', '.join(map(str, pictures))}")
    print(f"backbone: {run / 'backbone.safetensors'}")
    print(f"{time.monotonic() - started:.0f} s in all")


def gallery(run: Path, path: Path, count: int = 8) -> Path:
    """One test picture of each class and its nearest neighbours among the others."""
    test = load("shapes", "test")
    labels = test.need_labels()
    queries = np.array([np.flatnonzero(labels == c)[0] for c in range(len(test.classes))])
    probe = Probe(test.image_size, choose_device("auto"))
    unit = F.normalize(extract(load_backbone(run).to(probe.device), test, probe)).cpu().numpy()
    found = nearest(unit, count)[0][queries]
    same = labels[found] == labels[queries][:, None]
    return plot_gallery(test.images[queries], test.images[found], same, path, test.classes)
