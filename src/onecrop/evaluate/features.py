"""Frozen features of a data set."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from onecrop.augment import CROP_TRIES, central_crop, crop_boxes, normalise, resample
from onecrop.data import ImageSet
from onecrop.data.images import as_tensor
from onecrop.device import Captured, multiplies_bfloat16
from onecrop.distributed import world
from onecrop.draws import Draws, draws, fold
from onecrop.errors import UserError
from onecrop.progress import watched

BATCH = 1024  # in eval mode no image sees another: the number changes the speed alone
# Of a forward pass on a CPU: larger activations leave its caches and, where memory is mapped anew for every layer, cost
# more page faults than work (benchmarks/cpu.py).
CPU_PIXELS = 2**16
GPU_PIXELS = 2**23  # 1,024 images of 90 px, or 167 of 224 px: by its tensors ResNet-50 then takes a sixth of 11 GB
Item = TypeVar("Item")
RESIDENT = 2**30  # bytes of images that stay on the device from view to view


class Probe(NamedTuple):
    """How to look at a backbone."""

    image_size: int
    device: torch.device
    seed: int = 0
    k: int = 200  # neighbours of the kNN vote


def assert_frozen(backbone: nn.Module) -> None:
    """Features in train mode would depend on the batch they are computed in."""
    assert not any(module.training for module in backbone.modules()), "evaluation needs the backbone in eval mode"


def batches(images: ImageSet, device: torch.device) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(number, uint8 images, aspect) of every batch, in order, the last incomplete one included.

    Of several processes each gets its part of the batches: whole ones, so that the bits do not depend on their number.
    """
    whole = images.true_aspect
    for number in _numbers(images):
        part = slice(number * BATCH, (number + 1) * BATCH)
        pixels = as_tensor(np.ascontiguousarray(images.images[part])).to(device)
        yield number, pixels, torch.from_numpy(whole[part]).to(device)


def _numbers(images: ImageSet) -> range:
    """Of the batches that are this process' part."""
    total = -(-len(images) // BATCH)
    return range(total)[world().part(total)]


def _shown(found: Iterable[Item], images: ImageSet) -> Iterable[Item]:
    """With a progress line, by the process that speaks."""
    return watched(found, len(_numbers(images)), f"features of {images.name}") if world().first else found


def random_view(pixels: Tensor, aspect: Tensor, size: int, draw: Draws, crop_scale: float) -> Tensor:
    """RandomResizedCrop and flip: what a linear probe trains on."""
    uniform = draw.uniform("probe crop", 2 * CROP_TRIES + 2)
    boxes = crop_boxes(uniform, aspect, pixels.shape[-1], (crop_scale, 1.0), (3 / 4, 4 / 3))
    return normalise(resample(pixels, boxes, size, flip=draw.uniform("probe flip", 1)[:, 0] < 0.5))


@torch.no_grad()
def extract(backbone: nn.Module, images: ImageSet, probe: Probe) -> Tensor:
    """[N, dim] float32 features of the central crops; on every process all."""
    assert_frozen(backbone)
    parts = [
        embed(backbone, central_crop(pixels, aspect, probe.image_size))
        for _, pixels, aspect in _shown(batches(images, probe.device), images)
    ]
    return _of_all(images, parts, probe)


class RandomViews:
    """Features of random crops, of as many views as are asked for: [N, dim] float32, on every process all."""

    def __init__(
        self, backbone: nn.Module, images: ImageSet, probe: Probe, crop_scale: float, shown: bool = True
    ) -> None:
        """shown: with a progress line of its own."""
        assert_frozen(backbone)
        self.images, self.probe, self.shown = images, probe, shown
        size = math.prod(images.images.shape)
        self.kept = list(batches(images, probe.device)) if size <= RESIDENT else None

        def look(pixels: Tensor, aspect: Tensor, key: Tensor) -> Tensor:
            draw = Draws(key, 0, len(pixels), len(pixels))
            return embed(backbone, random_view(pixels, aspect, probe.image_size, draw, crop_scale))

        self.look = Captured(look)

    @torch.no_grad()
    def __call__(self, view: int) -> Tensor:
        parts = []
        found = batches(self.images, self.probe.device) if self.kept is None else self.kept
        for number, pixels, aspect in _shown(found, self.images) if self.shown else found:
            key = draws(fold(self.probe.seed, "view", view, number), len(pixels), pixels.device).key
            parts.append(self.look(pixels, aspect, key).clone())
        return _of_all(self.images, parts, self.probe)


def _of_all(images: ImageSet, parts: list[Tensor], probe: Probe) -> Tensor:
    """The parts of all processes in order, which must be finite numbers."""
    features = world().concatenate(torch.cat(parts) if parts else torch.empty(0, 0, device=probe.device))
    if not features.isfinite().all():
        raise UserError(f"the backbone gives features of {images.name} that are not finite numbers: pretrain it again")
    return features


def at_once(image_size: int, gpu: bool) -> int:
    """Images of a forward pass."""
    return max(16, (GPU_PIXELS if gpu else CPU_PIXELS) // image_size**2)


def short_on_a_gpu(x: Tensor) -> torch.autocast:
    """Products in bfloat16 where x lies on a GPU that has it; a CPU's features are exact."""
    return torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda and multiplies_bfloat16(x.device))


def embed(backbone: nn.Module, x: Tensor) -> Tensor:
    parts = x.contiguous(memory_format=torch.channels_last).split(at_once(x.shape[-1], x.is_cuda))
    with short_on_a_gpu(x):
        return torch.cat([backbone(part) for part in parts]).float()


def labels_on(images: ImageSet, device: torch.device) -> Tensor:
    return torch.from_numpy(images.need_labels()).to(device)
