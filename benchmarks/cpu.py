"""What the memory of activations costs on a CPU: page faults, where every layer's is mapped anew.

    python benchmarks/cpu.py [--threads 2] [--out FILE.json]

Features of images against the number that goes through the network at once, and training, each with memory that is
given back and with memory that is kept (onecrop.device). The best of three passes, and its user and system time.
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
from onecrop.evaluate.features import on_a_cpu_at_once
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
    ("resnet18", "standard", 224, 32),
    ("mobilenet_v2", "standard", 224, 32),
)
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
    images, ours = made(size, count), on_a_cpu_at_once(size)

    def forward(few: int) -> None:
        for part in images.split(few):
            net(part)

    return [
        {"work": "features", "backbone": name, "pixels": size, "at_once": f"{few} (ours)" if few == ours else str(few)}
        | best(functools.partial(forward, few), count)
        for few in sorted({count, 16, 4, ours}, reverse=True)
    ]


def training(name: str, stem: str, size: int, batch: int) -> list[dict]:
    net = build_backbone(name, stem, size).to(memory_format=torch.channels_last)
    images = made(size, batch)

    def step() -> None:
        net(images).square().mean().backward()
        net.zero_grad()

    return [{"work": "training", "backbone": name, "pixels": size, "at_once": str(batch)} | best(step, batch)]


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
    return sorted(rows, key=lambda row: (row["work"], row["backbone"], row["pixels"], row["at_once"], row["memory"]))


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
        save(result_file("Memory of activations on a CPU", found), args.out)
