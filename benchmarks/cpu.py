"""What memory and number format cost on a CPU: page faults, where every layer's activations are mapped anew; and
bfloat16, where it has instructions for it.

    python benchmarks/cpu.py [--threads 2] [--out FILE.json]

Features of images against the number that goes through the network at once, and training in both formats, each with
memory that is given back and with memory that is kept (onecrop.device). The best of three passes, and its user and
system time.
"""

import argparse
import functools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import result_file, save

from onecrop.device import choose_device
from onecrop.evaluate.features import at_once
from onecrop.nets import build_backbone

FEATURES = (  # backbone, stem, pixels, images
    ("tiny", "small", 32, 1024),
    ("resnet18", "small", 32, 256),
    ("resnet18", "standard", 224, 64),
    ("mobilenet_v2", "standard", 224, 64),
)
TRAINING = (  # backbone, stem, pixels, batch
    ("tiny", "small", 32, 128),
    ("tiny", "small", 32, 512),
    ("resnet18", "small", 32, 64),
    ("resnet50", "small", 32, 16),
    ("mobilenet_v2", "small", 32, 32),
    ("mobilenet_v3_small", "small", 32, 64),
    ("mobilenet_v3_large", "small", 32, 32),
    ("efficientnet_b0", "small", 32, 16),
    ("tiny", "standard", 64, 32),
    ("resnet18", "standard", 224, 32),
    ("resnet50", "standard", 224, 8),
    ("mobilenet_v2", "standard", 224, 32),
)
FORMATS = (torch.float32, torch.bfloat16)
PASSES = 3


def used(work: Callable[[], None]) -> tuple[float, float, float]:
    """Seconds on the wall, of the program, of the system."""
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    work()
    whole, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    return whole, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime


def best(work: Callable[[], None], images: int) -> dict:
    work()
    wall, user, system = min(used(work) for _ in range(PASSES))
    return {"images_per_second": images / wall, "user_seconds": user, "system_seconds": system}


def made(size: int, count: int) -> torch.Tensor:
    return torch.rand(count, 3, size, size).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def features(name: str, stem: str, size: int, count: int) -> list[dict]:
    net = build_backbone(name, stem, size).eval().to(memory_format=torch.channels_last)
    images, ours = made(size, count), at_once(size, gpu=False)

    def forward(few: int) -> None:
        for part in images.split(few):
            net(part)

    return [
        {"work": "features", "backbone": name, "pixels": size, "format": "float32"}
        | {"at_once": f"{few} (ours)" if few == ours else str(few)}
        | best(functools.partial(forward, few), count)
        for few in sorted({count, 16, 4, ours}, reverse=True)
    ]


def training(name: str, stem: str, size: int, batch: int) -> list[dict]:
    net = build_backbone(name, stem, size).to(memory_format=torch.channels_last)
    images = made(size, batch)

    def step(dtype: torch.dtype) -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            features = net(images)
        features.float().square().mean().backward()
        net.zero_grad()

    told = {"work": "training", "backbone": name, "pixels": size, "at_once": str(batch)}
    return [
        {**told, "format": str(dtype).removeprefix("torch.")} | best(functools.partial(step, dtype), batch)
        for dtype in FORMATS
    ]


def alone(args: argparse.Namespace) -> list[dict]:
    """Of this process: memory settings cannot be taken back."""
    if args.memory == "kept":
        choose_device("cpu")
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = [row for one in TRAINING for row in training(*one)] + [row for one in FEATURES for row in features(*one)]
    return [{**row, "memory": args.memory} for row in rows]


def in_processes(threads: int | None) -> list[dict]:
    rows = []
    for memory in ("given back", "kept"):
        order = [sys.executable, __file__, "--memory", memory, *(["--threads", str(threads)] if threads else [])]
        said = subprocess.run(order, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows += json.loads(said)
    keys = ("work", "backbone", "pixels", "at_once", "format", "memory")
    return sorted(rows, key=lambda row: [row[key] for key in keys])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="of torch [its own choice]")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", choices=("given back", "kept"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        print(json.dumps(alone(args)))
    else:
        found = in_processes(args.threads)
        for row in found:
            print(row)
        save(result_file("Memory of activations, and number formats, on a CPU", found), args.out)
