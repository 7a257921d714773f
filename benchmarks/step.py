"""How fast is a training step, where does the time go, and how near is it to what the device can do?

    python benchmarks/step.py [--optimizer sgd|muon] [--backbone resnet18] [--images 50000] [--out FILE.json]
    python benchmarks/step.py --picture docs/benchmarks/step.png docs/benchmarks/step-*.json

Noise stands in for images: the time does not depend on them. Stages are measured apart, each captured as a graph, so
their sum may differ from the whole. The ceiling is a large matrix product in the same run.
"""

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from measuring import PLAIN, save, synchronise
from torch.utils.flop_counter import FlopCounterMode

from onecrop.build import build_method
from onecrop.choices import resolve
from onecrop.data import images as data_images
from onecrop.data.images import ImageSet, Loader
from onecrop.device import choose_device, describe, tune
from onecrop.losses import instance_loss
from onecrop.methods import Method
from onecrop.optim import OPTIMIZERS
from onecrop.recipe import Recipe
from onecrop.step import WARM_UP, TrainStep


def milliseconds(work, repeats: int = 20, capture: bool = True) -> float:
    """Median time of `work`, on a GPU as a captured graph."""
    for _ in range(3):
        work()
    synchronise()
    if torch.cuda.is_available() and capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        work = graph.replay
    times = []
    for _ in range(repeats):
        synchronise()
        started = time.perf_counter()
        work()
        synchronise()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def noise(args: argparse.Namespace, folder: Path) -> np.ndarray:
    """Images stored at their own size, or, streamed, at 8/7 of it in a file, as a folder of photographs is packed."""
    rng = np.random.default_rng(0)
    if not args.streamed:
        return rng.integers(0, 255, (args.images, 3, args.size, args.size), np.uint8)
    stored = -(-args.size * 8 // 7)
    part = rng.integers(0, 255, (min(512, args.images), 3, stored, stored), np.uint8)
    shape = (args.images, 3, stored, stored)
    images = np.memmap(folder / "images.bin", np.uint8, mode="w+", shape=shape)
    for start in range(0, args.images, len(part)):
        images[start : start + len(part)] = part[: min(len(part), args.images - start)]
    return images


def ceiling(device: torch.device) -> float:
    """TFLOP/s of a large matrix product in the format the network computes in."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / milliseconds(lambda: a @ b) / 1e9


def network_flops(method: Method, size: int) -> int:
    """Of the forward and backward pass of one image; the backward pass costs twice as much."""
    copied = copy.deepcopy(method).cpu().eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        copied.features(torch.zeros(1, 3, size, size))
    return 3 * counter.get_total_flops()


def picture(files: list[Path], path: Path) -> None:
    """One bar a result file: its stages end to end, and a mark where the whole step ends."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = [json.loads(file.read_text()) for file in files]
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.6 * len(files)), layout="constrained")
    names = [f"{r['settings']['backbone']}, {r['settings']['size']} px, {r['settings']['optimizer']}" for r in results]
    left = [0.0] * len(results)
    for stage in results[0]["stages"]:
        widths = [result["stages"][stage] for result in results]
        axis.barh(names, widths, left=left, label=stage, height=0.6)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for number, result in enumerate(results):
        axis.plot([result["milliseconds"]] * 2, [number - 0.4, number + 0.4], color="black", linewidth=2)
        axis.annotate(
            f"  {result['images_per_second']:,.0f} images/s", (max(left[number], result["milliseconds"]), number)
        )
    axis.set(xlabel="ms: stages measured apart; black: the whole step", xlim=(0, 1.3 * max(left)))
    axis.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", default="sgd", choices=sorted(OPTIMIZERS))
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--streamed", action="store_true", help="keep the images in a memory map, not on the device")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path, help="draw result files instead of measuring")
    parser.add_argument("files", type=Path, nargs="*")
    args = parser.parse_args()
    if args.picture:
        picture(args.files, args.picture)
        return

    device = choose_device("auto")
    tune(device)
    folder = tempfile.TemporaryDirectory()
    images = ImageSet("noise", noise(args, Path(folder.name)), image_size=args.size)
    if args.streamed:
        data_images.RESIDENT_SHARE = 0.0
    recipe = Recipe(data="noise", backbone=args.backbone, batch_size=args.batch_size, optimizer=args.optimizer)
    recipe = resolve(recipe.override({"dim": args.dim, **PLAIN}), images, device)
    started = time.perf_counter()
    method = build_method(recipe, len(images)).to(device).to(memory_format=torch.channels_last)
    loader = Loader(images, args.batch_size, device, seed=0)
    method.prepare(loader)
    synchronise()
    calibration = time.perf_counter() - started
    optimizer = OPTIMIZERS[args.optimizer].build(
        method.parameters(), torch.tensor(recipe.lr, device=device), recipe.momentum, recipe.weight_decay
    )
    step = TrainStep(method, optimizer, loader, seed=0, fast=device.type == "cuda")
    started = time.perf_counter()
    for number in range(WARM_UP + 2):
        step(number, 0.01, 0.0)
    synchronise()
    compilation = time.perf_counter() - started
    times, waited = [], loader.seconds_waited
    for repeat in range(args.repeats):
        synchronise()
        started = time.perf_counter()
        for number in range(args.steps):
            step(repeat * args.steps + number, 0.01, 0.0)
        synchronise()
        times.append((time.perf_counter() - started) / args.steps * 1e3)
    whole = statistics.median(times)
    waited = (loader.seconds_waited - waited) / (sum(times) * args.steps / 1e3)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None

    batch, settings = loader.batch(0), recipe.settings
    fast = device.type == "cuda"
    augment = torch.compile(method.augment, dynamic=False) if fast else method.augment
    features = torch.compile(method.features, dynamic=False) if fast else method.features
    x = method.augment(batch.images, batch.aspect, batch.draws)
    z = method.features(x).detach().requires_grad_()

    def network() -> None:
        features(x).square().mean().backward()

    def loss() -> None:
        out = instance_loss(
            z,
            method.bank.weight,
            batch.index,
            temperature=settings.temperature,
            kl_temperature=settings.kl_temperature,
            kl_weight=settings.kl_weight,
        )
        (out.cross_entropy + settings.kl_weight * out.sqrt_kl).backward()

    stages = {
        "augment": milliseconds(lambda: augment(batch.images, batch.aspect, batch.draws)),
        "network forward and backward": milliseconds(network),
        "loss and its gradient": milliseconds(loss),
        "optimiser": milliseconds(optimizer.step),
        "bank update": milliseconds(lambda: method.bank.update(batch.index, z.detach())),
    }
    top = ceiling(device)
    flops = network_flops(method, args.size) * args.batch_size
    flops += 2 * 2 * args.batch_size * args.images * args.dim
    result = {
        "device": describe(device),
        "torch": torch.__version__,
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "picture", "files")},
        "milliseconds": whole,
        "spread": [min(times), max(times)],
        "images_per_second": args.batch_size / whole * 1e3,
        "stages": stages,
        "ceiling_tflops": top,
        "share_of_ceiling": flops / whole / 1e9 / top,
        "peak_memory": peak,
        "share_waiting_for_data": waited,
        "seconds_calibration": calibration,
        "seconds_compilation": compilation,
    }
    print(json.dumps(result, indent=2))
    save(result, args.out)


if __name__ == "__main__":
    main()
