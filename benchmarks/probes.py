"""What a probe's figure depends on beside the backbone: the scale of the features, and the images of the norms.

    python benchmarks/probes.py RUN [RUN ...] [--out docs/results/probes.json]
    python benchmarks/probes.py demo/run --data shapes --subset 500 --epochs 3     # on a CPU

A head that begins with a linear layer and batch norm does not see the scale of the features it is given, so the decay
of gains alone makes it, while a linear probe with a fixed learning rate does see it. And the running statistics of
batch norm are those of training crops, mixed and recoloured, while a probe looks at plain ones.
"""

import argparse
import copy
import time
from pathlib import Path

import torch
from measuring import result_file, save
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from onecrop.data import ImageSet
from onecrop.data.sources import Labelled, Request, load_labelled
from onecrop.device import choose_device, tune
from onecrop.draws import draws, fold
from onecrop.evaluate import EVALUATIONS, fewer_labels
from onecrop.evaluate.features import Probe, batches, embed, random_view
from onecrop.evaluate.linear import linear
from onecrop.nets import load_backbone, read_backbone

SCALES = (1.0, 0.3, 0.1, 0.03)


class Scaled(nn.Module):
    def __init__(self, backbone: nn.Module, scale: float) -> None:
        super().__init__()
        self.backbone, self.scale = backbone, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x) * self.scale


@torch.no_grad()
def with_plain_norms(backbone: nn.Module, images: ImageSet, probe: Probe) -> nn.Module:
    """The same weights, with running statistics of plain crops: those that a probe trains on."""
    network = copy.deepcopy(backbone).to(probe.device)
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    for number, pixels, aspect in batches(images, probe.device):
        draw = draws(fold(probe.seed, "norms", number), len(pixels), probe.device)
        embed(network, random_view(pixels, aspect, probe.image_size, draw, crop_scale=0.2))
    return network.eval()


def measure(run: str, sets: Labelled, probe: Probe, epochs: int) -> list[dict]:
    trained = load_backbone(run)
    rows = []
    for norms, backbone in (
        ("as trained", trained.to(probe.device)),
        ("of plain crops", with_plain_norms(trained, sets.train, probe)),
    ):
        plain = {name: EVALUATIONS[name](backbone, sets.train, sets.test, probe) for name in ("knn", "linear-fast")}
        row = {"run": Path(run).name, "norms": norms} | {name: found["accuracy"] for name, found in plain.items()}
        for scale in SCALES:
            found = linear(Scaled(backbone, scale).eval(), sets.train, sets.test, probe, epochs)
            row[f"linear × {scale:g}"] = found["accuracy"]
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--holdout", type=int, default=0, help="as in pretraining: score on these images")
    parser.add_argument("--subset", type=int, help="labelled training images")
    parser.add_argument("--epochs", type=int, default=100, help="of the authors' probe")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begun, rows = time.monotonic(), []
    for run in args.runs:
        probe = Probe(int(read_backbone(run)[1]["image_size"]), choose_device("auto"))
        tune(probe.device)
        request = Request(args.data_dir, probe.image_size, holdout=args.holdout)
        sets = fewer_labels(load_labelled(args.data, request), args.subset, probe.seed)
        rows += measure(run, sets, probe, args.epochs)
        note = (
            f"Scored on {len(sets.test):,} images of {args.data} ({sets.split}). linear × s: the authors' protocol, "
            f"{args.epochs} epochs, on features multiplied by s. {time.monotonic() - begun:.0f} s."
        )
        save(result_file("Three probes, the scale of features, and norms", rows, [note]), args.out)


if __name__ == "__main__":
    main()
