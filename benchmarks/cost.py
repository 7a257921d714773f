"""The paper's cost columns: one epoch of every method with every backbone, time and memory, and cost against N.

    python benchmarks/cost.py [--methods sid,npid,...] [--backbones resnet18,...] [--jobs 8] [--out FILE.json]
    python benchmarks/cost.py --against-n --methods sid,pid [--out FILE.json]

Noise stands in for images. Every method has its settings for small images and, for a fair cost, one optimiser (SGD) and
one batch size. A time is that of a whole epoch of compiled steps, the median of three; compilation is reported apart.
With --jobs the steps are compiled side by side first, in processes of their own, and timed one after another.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from onecrop.compare import member
from onecrop.data.images import ImageSet, Loader
from onecrop.device import choose_device, describe, tune
from onecrop.methods import METHODS
from onecrop.optim import OPTIMIZERS
from onecrop.recipe import Recipe
from onecrop.step import WARM_UP, TrainStep
from onecrop.train import build_method, resolve

ROWS = (10_000, 30_000, 100_000, 300_000, 1_000_000)  # N for --against-n
PAPER = {"byol": 0.28, "simsiam": 0.47, "moco": 0.51, "npid": 0.81}  # sid's time as a share of theirs, CIFAR, 4 K80


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def noise(count: int) -> ImageSet:
    part = np.random.default_rng(0).integers(0, 255, (min(count, 1000), 3, 32, 32), np.uint8)
    return ImageSet("noise", np.tile(part, (-(-count // len(part)), 1, 1, 1))[:count])


def measure(method_name: str, backbone: str, count: int, args: argparse.Namespace) -> dict:
    device = choose_device("auto")
    tune(device)
    images = noise(count)
    changes = {"optimizer": "sgd", "backbone": backbone, "batch_size": args.batch_size}
    recipe = resolve(member(Recipe(data="noise"), method_name, changes), images, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    method = build_method(recipe, count).to(device).to(memory_format=torch.channels_last)
    loader = Loader(images, args.batch_size, device, seed=0)
    row = {"method": method_name, "backbone": backbone, "images": count}
    row |= {"crops": METHODS[method_name].crops, "networks": METHODS[method_name].networks}
    method.prepare(loader)  # once to load kernels, once to time it
    row["calibration_seconds"] = seconds(lambda: method.prepare(loader)) if method_name == "sid" else None
    optimizer = OPTIMIZERS["sgd"].build(
        method.parameters(), torch.tensor(recipe.lr, device=device), recipe.momentum, recipe.weight_decay
    )
    step = TrainStep(method, optimizer, loader, seed=0, fast=device.type == "cuda")

    def some(steps: int) -> None:
        for number in range(steps):
            step(number, 1e-4, 0.0)

    row["compilation_seconds"] = seconds(lambda: some(WARM_UP + 2))
    if not args.compile_only:
        steps = min(loader.batches_per_epoch, args.steps)
        times = [seconds(lambda: some(steps)) / steps for _ in range(3)]
        row["epoch_seconds"] = statistics.median(times) * loader.batches_per_epoch
        row["step_ms"] = statistics.median(times) * 1e3
        row["images_per_second"] = args.batch_size / statistics.median(times)
        row["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
    return row


def seconds(work) -> float:
    synchronise()
    started = time.perf_counter()
    work()
    synchronise()
    return time.perf_counter() - started


def with_ratios(rows: list[dict]) -> list[dict]:
    """sid's time as a share of each method's, beside the paper's."""
    timed = [row for row in rows if "epoch_seconds" in row]
    ours = {(row["backbone"], row["images"]): row["epoch_seconds"] for row in timed if row["method"] == "sid"}
    for row in timed:
        base = ours.get((row["backbone"], row["images"]))
        if base:
            row["sid_time_share"] = base / row["epoch_seconds"]
            row["paper_time_share"] = PAPER.get(row["method"])
    return rows


def compile_first(combinations: list[tuple[str, str, int]], args: argparse.Namespace) -> None:
    def one(combination: tuple[str, str, int]) -> None:
        method, backbone, count = combination
        command = [sys.executable, __file__, "--methods", method, "--backbones", backbone, "--images", str(count)]
        command += ["--batch-size", str(args.batch_size), "--compile-only"]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, combinations))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--backbones", default="resnet18,mobilenet_v2,resnet50")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--against-n", action="store_true", help=f"the first backbone with N = {ROWS}")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1000, help="time at most so many steps of an epoch")
    parser.add_argument("--jobs", type=int, default=0, help="compile so many side by side first")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    methods, backbones = args.methods.split(","), args.backbones.split(",")
    combinations = [(m, b, args.images) for b in backbones for m in methods]
    if args.against_n:
        combinations = [(m, backbones[0], n) for m in methods for n in ROWS]
    if args.jobs:
        compile_first(combinations, args)
    rows: list[dict] = []
    for method, backbone, count in combinations:
        try:
            rows.append(measure(method, backbone, count, args))
        except torch.OutOfMemoryError as error:
            rows.append({"method": method, "backbone": backbone, "images": count, "failure": str(error)[:100]})
        print(json.dumps(rows[-1]), flush=True)
        if args.out:  # after every row: the last one may be one too many
            result = {
                "title": "Cost against the number of images" if args.against_n else "Cost of an epoch",
                "command": "python benchmarks/cost.py " + " ".join(sys.argv[1:]),
                "date": datetime.date.today().isoformat(),
                "device": describe(choose_device("auto")),
                "torch": torch.__version__,
                "rows": with_ratios(rows),
            }
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
