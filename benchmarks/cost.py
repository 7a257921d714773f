"""The paper's cost columns: one epoch of every method with every backbone, time and memory, and cost against N.

    python benchmarks/cost.py [--methods sid,npid,...] [--backbones resnet18,...] [--jobs 8] [--out FILE.json]
    python benchmarks/cost.py --methods sid,sid:dim=256 --backbones resnet18       (settings behind a colon)
    python benchmarks/cost.py --against-n --methods sid,pid [--out FILE.json]

Noise stands in for images. Every method has its settings for small images and, for a fair cost, one optimiser (SGD) and
one batch size. A time is that of a whole epoch of compiled steps, the median of three; compilation is reported apart.
With --jobs so many are compiled side by side, in processes of their own, and then timed one after another.
"""

import argparse
import fcntl
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from measuring import result_file, save, synchronise

from onecrop.build import build_method
from onecrop.choices import resolve
from onecrop.compare import member
from onecrop.data.images import ImageSet, Loader
from onecrop.device import choose_device, tune
from onecrop.methods import METHODS
from onecrop.optim import OPTIMIZERS
from onecrop.recipe import Recipe
from onecrop.reproduce.numbers import CIFAR_RESULT
from onecrop.step import WARM_UP, TrainStep

ROWS = (10_000, 30_000, 100_000, 300_000, 1_000_000)  # N for --against-n


def noise(count: int) -> ImageSet:
    part = np.random.default_rng(0).integers(0, 255, (min(count, 1000), 3, 32, 32), np.uint8)
    return ImageSet("noise", np.tile(part, (-(-count // len(part)), 1, 1, 1))[:count])


@contextmanager
def alone(lock: Path | None, shared: bool = False) -> Iterator[None]:
    """With a lock file: compile beside others (shared), but be timed while nobody else runs."""
    if lock is None:
        yield
        return
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def measure(spec: str, backbone: str, count: int, args: argparse.Namespace) -> dict:
    method_name, _, settings = spec.partition(":")
    device = choose_device("auto")
    tune(device)
    row = {"method": spec, "backbone": backbone, "images": count}
    row |= {"crops": METHODS[method_name].crops, "networks": METHODS[method_name].networks}
    with alone(args.lock, shared=True):
        images = noise(count)
        changes = {"optimizer": "sgd", "backbone": backbone, "batch_size": args.batch_size}
        changes |= dict(change.split("=") for change in settings.split())
        recipe = resolve(member(Recipe(data="noise"), method_name).override(changes), images, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        method = build_method(recipe, count).to(device).to(memory_format=torch.channels_last)
        loader = Loader(images, args.batch_size, device, seed=0)
        method.prepare(loader)  # loads kernels; timed below
        optimizer = OPTIMIZERS["sgd"].build(
            method.parameters(), torch.tensor(recipe.lr, device=device), recipe.momentum, recipe.weight_decay
        )
        step = TrainStep(method, optimizer, loader, seed=0, fast=device.type == "cuda")

        def some(steps: int) -> None:
            for number in range(steps):
                step(number, 1e-4, 0.0)

        row["compilation_seconds"] = seconds(lambda: some(WARM_UP + 2))
    with alone(args.lock):
        some(10)
        steps = min(loader.batches_per_epoch, args.steps)
        times = [seconds(lambda: some(steps)) / steps for _ in range(3)]
        calibrates = getattr(recipe.settings, "calibrate", False)
        row["calibration_seconds"] = seconds(lambda: method.prepare(loader)) if calibrates else None
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


def paper_share(method: str, backbone: str) -> float | None:
    """sid's hours as a share of the method's in the paper's Table 1, where it prints both."""
    printed = CIFAR_RESULT.get(backbone, {})
    return printed["sid"][0] / printed[method][0] if method in printed and method != "sid" else None


def with_ratios(rows: list[dict]) -> list[dict]:
    """sid's time as a share of each method's, beside the paper's."""
    timed = [row for row in rows if "epoch_seconds" in row]
    ours = {(row["backbone"], row["images"]): row["epoch_seconds"] for row in timed if row["method"] == "sid"}
    for row in timed:
        base = ours.get((row["backbone"], row["images"]))
        if base:
            row["sid_time_share"] = base / row["epoch_seconds"]
            row["paper_time_share"] = paper_share(row["method"], row["backbone"])
    return rows


def in_waves(combinations: list[tuple[str, str, int]], args: argparse.Namespace) -> list[dict]:
    """--jobs processes at a time; none begins to compile while another is being timed."""
    rows = []
    with tempfile.NamedTemporaryFile() as lock:
        for start in range(0, len(combinations), args.jobs):
            wave = combinations[start : start + args.jobs]
            running = []
            for method, backbone, count in wave:
                command = [sys.executable, __file__, "--methods", method, "--backbones", backbone]
                command += ["--images", str(count), "--batch-size", str(args.batch_size), "--steps", str(args.steps)]
                command += ["--lock", lock.name]
                running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            for (method, backbone, count), process in zip(wave, running, strict=True):
                output, errors = process.communicate()
                lines = [line for line in output.splitlines() if line.startswith("{")]
                failure = {"method": method, "backbone": backbone, "images": count, "failure": errors[-200:]}
                rows.append(json.loads(lines[-1]) if lines else failure)
                print(json.dumps(rows[-1]), flush=True)
    return rows


def one_by_one(combinations: list[tuple[str, str, int]], args: argparse.Namespace) -> list[dict]:
    rows = []
    for method, backbone, count in combinations:
        try:
            rows.append(measure(method, backbone, count, args))
        except torch.OutOfMemoryError as error:
            rows.append({"method": method, "backbone": backbone, "images": count, "failure": str(error)[:100]})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--backbones", default="resnet18,mobilenet_v2,resnet50")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--against-n", action="store_true", help=f"the first backbone with N = {ROWS}")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1000, help="time at most so many steps of an epoch")
    parser.add_argument("--jobs", type=int, default=0, help="compile so many side by side")
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    methods, backbones = args.methods.split(","), args.backbones.split(",")
    combinations = [(m, b, args.images) for b in backbones for m in methods]
    if args.against_n:
        combinations = [(m, backbones[0], n) for m in methods for n in ROWS]
    rows = in_waves(combinations, args) if args.jobs else one_by_one(combinations, args)
    if args.out:
        title = "Cost against the number of images" if args.against_n else "Cost of an epoch"
        save(result_file(title, with_ratios(rows)), args.out)


if __name__ == "__main__":
    main()
