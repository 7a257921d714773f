"""Features of images on a CPU, against the number of images that go through the network at once.

    python benchmarks/features.py [--threads 2] [--out FILE.json]

Of every network the best of three passes; user and system time are those of the same pass.
"""

import argparse
import math
import resource
import time
from pathlib import Path

import torch
from measuring import result_file, save

from onecrop.evaluate.features import CPU_PIXELS
from onecrop.nets import build_backbone

NETWORKS = (  # backbone, stem, pixels, images
    ("tiny", "small", 32, 2048),
    ("resnet18", "small", 32, 256),
    ("resnet18", "standard", 224, 64),
    ("mobilenet_v2", "standard", 224, 64),
)


def one_pass(net: torch.nn.Module, images: torch.Tensor, few: int) -> tuple[float, float, float]:
    """Seconds on the wall, of the program, of the system."""
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    for part in images.split(few):
        net(part)
    whole, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    return whole, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime


@torch.no_grad()
def measure(name: str, stem: str, size: int, count: int) -> list[dict]:
    net = build_backbone(name, stem, size).eval().to(memory_format=torch.channels_last)
    images = torch.rand(count, 3, size, size).contiguous(memory_format=torch.channels_last)
    ours = max(4, CPU_PIXELS // size**2)
    rows = []
    for few in sorted({count, *(4**power for power in range(1, 1 + int(math.log(count, 4)))), ours}, reverse=True):
        wall, user, system = min(one_pass(net, images, few) for _ in range(3))
        row = {"backbone": name, "pixels": size, "at_once": few, "chosen": "yes" if few == ours else ""}
        row |= {"images_per_second": count / wall, "user_seconds": user, "system_seconds": system}
        print(row, flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="of torch [its own choice]")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    found = [row for network in NETWORKS for row in measure(*network)]
    save(result_file("Features on a CPU", found), args.out)
