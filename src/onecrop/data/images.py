"""ImageSet (what is stored), Batch (what a method sees) and Loader (from one to the other)."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onecrop.draws import Draws, draws, fold
from onecrop.errors import UserError

# Share of the free device memory that a data set may take for itself.
RESIDENT_SHARE = 0.5


class Batch(NamedTuple):
    """All a method may know, already on the device."""

    images: Tensor  # uint8 [B, 3, R, R], not augmented
    index: Tensor  # type: ignore[assignment]  # int64 [B], row of each image in its data set
    aspect: Tensor  # float32 [B], true width / height (images are stored square)
    draws: Draws  # this step's random numbers


@dataclass(frozen=True)
class ImageSet:
    """Decoded images, squashed to squares, in memory or in a memory map. Labels are for evaluation alone."""

    name: str
    images: NDArray[np.uint8]  # [N, 3, R, R]
    labels: NDArray[np.int64] | None = None  # [N]
    classes: tuple[str, ...] = ()
    aspect: NDArray[np.float32] | None = None  # [N]; None: all 1
    image_size: int = 32  # what a network should be fed with, unless a recipe says otherwise
    files: tuple[str, ...] = ()  # where each image came from, where it came from a file
    key: str | None = None  # fingerprint, where it is already known

    def __len__(self) -> int:
        return len(self.images)

    @property
    def true_aspect(self) -> NDArray[np.float32]:
        return np.ones(len(self), np.float32) if self.aspect is None else self.aspect

    @cached_property
    def fingerprint(self) -> str:
        """Changes when any pixel does."""
        return self.key or hashlib.blake2b(np.ascontiguousarray(self.images).data, digest_size=16).hexdigest()

    def take(self, index: NDArray[np.int64]) -> "ImageSet":
        """The images of `index`, in that order."""
        return replace(
            self,
            images=self.images[index],
            labels=None if self.labels is None else self.labels[index],
            aspect=None if self.aspect is None else self.aspect[index],
            files=tuple(self.files[i] for i in index) if self.files else (),
            key=None if self.key is None else hashlib.blake2b(self.key.encode() + index.tobytes()).hexdigest()[:32],
        )

    def need_labels(self) -> NDArray[np.int64]:
        if self.labels is None:
            raise UserError(f"{self.name} has no labels, and this evaluation needs them: sort it into class folders")
        return self.labels


def subset_index(total: int, count: int, seed: int) -> NDArray[np.int64]:
    """`count` of `total` at random, without labels, in stored order."""
    if not 0 < count <= total:
        raise UserError(f"--subset {count} is not between 1 and the {total} images of the data set")
    return np.sort(np.random.default_rng(fold("subset", seed)).permutation(total)[:count])


class Loader:
    """Batches as a function of the step. The whole set lives on the device when it fits, else each batch is sent."""

    def __init__(self, images: ImageSet, batch_size: int, device: torch.device, seed: int) -> None:
        if batch_size > len(images):
            raise UserError(f"the batch of {batch_size} is larger than the {len(images)} images: lower --batch-size")
        self.batch_size, self.device, self.seed = batch_size, device, seed
        self.num_images = len(images)
        self.batches_per_epoch = len(images) // batch_size  # the last incomplete batch is dropped
        self.aspect = torch.from_numpy(images.true_aspect).to(device)
        self.images = torch.from_numpy(images.images)
        self.resident = device.type != "cuda" or images.images.nbytes < RESIDENT_SHARE * torch.cuda.mem_get_info()[0]
        if self.resident:
            self.images = self.images.to(device)
        self._epoch, self._order = -1, torch.empty(0)

    def batch(self, step: int) -> Batch:
        """The batch of a training step; the order of an epoch is a function of seed and epoch alone."""
        epoch, place = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(fold(self.seed, "order", epoch))
            order = torch.randperm(self.num_images, generator=generator)
            self._epoch, self._order = epoch, order.to(self.device) if self.resident else order
        index = self._order[place * self.batch_size : (place + 1) * self.batch_size]
        return self._gather(index, fold(self.seed, "step", step))

    def in_order(self) -> Iterator[tuple[Batch, int]]:
        """Every image once. The last batch is filled up from the start; the number says how many of it count."""
        for number, start in enumerate(range(0, self.num_images, self.batch_size)):
            index = torch.arange(start, start + self.batch_size) % self.num_images
            batch = self._gather(index.to(self.images.device), fold(self.seed, "in order", number))
            yield batch, min(self.batch_size, self.num_images - start)

    def _gather(self, index: Tensor, key: int) -> Batch:
        images = self.images.index_select(0, index)
        if not self.resident:
            images = images.pin_memory().to(self.device, non_blocking=True)
            index = index.pin_memory().to(self.device, non_blocking=True)
        return Batch(images, index, self.aspect[index], draws(key, len(index), self.device))
