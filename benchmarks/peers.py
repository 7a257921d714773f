"""An epoch as users run it today against ours, in one run: image files, transforms in worker processes, an eager loop.

    python benchmarks/peers.py [--images 20000] [--out docs/benchmarks/peers.json]

Two peers, written here in the shape in which such code is usually found: SimCLR with two views, and instance
discrimination with one view and a bank, of which 10,000 rows are sampled. Same network, batch, image size, number
format and data; ours is `onecrop.step` as it trains. Start-up (workers, compilation) is excluded from all.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from measuring import PLAIN, save, synchronise
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from onecrop.augment import MEAN, STD
from onecrop.build import build_method
from onecrop.choices import resolve
from onecrop.data.images import ImageSet, Loader
from onecrop.data.shapes import shapes
from onecrop.device import choose_device, describe, tune
from onecrop.nets import build_backbone, mlp
from onecrop.optim import OPTIMIZERS
from onecrop.recipe import Recipe
from onecrop.step import WARM_UP, TrainStep


class Files(Dataset):
    def __init__(self, files: list[str], views: int) -> None:
        self.files, self.views = files, views
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(32, scale=(0.2, 1.0)),
                v2.RandomHorizontalFlip(),
                v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
                v2.RandomGrayscale(0.2),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int):
        torch.set_num_threads(1)
        with Image.open(self.files[i]) as image:
            image = image.convert("RGB")
        return [self.transform(image) for _ in range(self.views)], i


class Peer(nn.Module):
    def __init__(self, dim: int, backbone: str) -> None:
        super().__init__()
        self.backbone = build_backbone(backbone, "small")
        self.head = mlp(self.backbone.dim, 2048, dim)

    def forward(self, x):
        return F.normalize(self.head(self.backbone(x)).float(), dim=1)


def simclr_loss(net, views, index):
    z = net(torch.cat(views))
    similarity = (z @ z.T / 0.5).fill_diagonal_(-torch.inf)
    return F.cross_entropy(similarity, torch.arange(len(z), device=z.device).roll(len(z) // 2))


def bank_loss(bank):
    def loss(net, views, index):
        z = net(views[0])
        sampled = torch.randperm(len(bank), device=z.device)[:10_000]
        logits = z @ torch.cat([bank[index], bank[sampled]]).T / 0.2
        p = logits.mul(0.2).softmax(1)
        u = p.sqrt().detach()
        u = u / u.sum(1, keepdim=True)
        kl = (p * (p / u).log()).sum(1).mean()
        value = F.cross_entropy(logits, torch.arange(len(z), device=z.device)) + 20 * kl
        with torch.no_grad():
            bank[index] = F.normalize(0.5 * bank[index] + 0.5 * z, dim=1)
        return value

    return loss


def peer_rate(files, views, loss, device, batch, workers, backbone, dim) -> float:
    """Images a second over the second epoch."""
    net = Peer(dim, backbone).to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(
        Files(files, views),
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=True,
        persistent_workers=True,
    )
    for _ in range(2):
        started, seen = time.perf_counter(), 0
        for pictures, index in loader:
            moved = [p.to(device, non_blocking=True, memory_format=torch.channels_last) for p in pictures]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                value = loss(net, moved, index.to(device))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            value.item()  # the progress bar's
            seen += batch
        rate = seen / (time.perf_counter() - started)
    return rate


def our_rate(images: ImageSet, device, batch, backbone, changes) -> float:
    """Median over three epochs; what `changes` leave open is chosen as for `onecrop pretrain`."""
    recipe = Recipe(data="shapes", backbone=backbone, batch_size=batch).override(changes)
    recipe = resolve(recipe, images, device)
    method = build_method(recipe, len(images)).to(device).to(memory_format=torch.channels_last)
    lr = torch.tensor(recipe.lr, device=device)
    build = OPTIMIZERS[recipe.optimizer].build
    optimizer = build(method.parameters(), lr, recipe.momentum, recipe.weight_decay)
    step = TrainStep(method, optimizer, Loader(images, batch, device, 0), 0, fast=device.type == "cuda")
    steps = len(images) // batch
    for number in range(WARM_UP + 2 + steps):
        step(number, 0.01, 0.0)
    rates = []
    for _ in range(3):
        synchronise()
        started = time.perf_counter()
        for number in range(steps):
            step(number, 0.01, 0.0)
        synchronise()
        rates.append(steps * batch / (time.perf_counter() - started))
    return sorted(rates)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = choose_device("auto")
    tune(device)
    workers = os.cpu_count() or 1
    pictures = shapes(2000, 32)
    images = pictures.take(np.arange(args.images) % 2000)
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{i:06d}.png" for i in range(args.images)]
        for file, pixels in zip(files, images.images, strict=True):
            Image.fromarray(pixels.transpose(1, 2, 0)).save(file)
        bank = F.normalize(torch.randn(args.images, args.dim, device=device), dim=1)
        common = (device, args.batch_size, workers, args.backbone)
        rates = {
            "SimCLR, two views, eager": peer_rate(files, 2, simclr_loss, *common, 256),
            "bank, one view, eager": peer_rate(files, 1, bank_loss(bank), *common, args.dim),
        }
    same = {"optimizer": "sgd", "dim": args.dim, **PLAIN}
    ours = {
        "onecrop, one view": same,
        "onecrop, one view of the chosen size": {**same, "crop_resolution": None},
        "onecrop, all as chosen": {},
    }
    for name, changes in ours.items():
        rates[name] = our_rate(images, device, args.batch_size, args.backbone, changes)
    result = {
        "device": describe(device),
        "workers": workers,
        "torch": torch.__version__,
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "images_per_second": rates,
        "ratio": {
            name: {peer: rates[name] / rate for peer, rate in rates.items() if peer not in ours} for name in ours
        },
    }
    print(json.dumps(result, indent=2))
    save(result, args.out)


if __name__ == "__main__":
    main()
