"""ImageSet (what is stored), Batch (what a method sees) and Loader (from one to the other)."""

import hashlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onecrop.data.reader import Reader, placed
from onecrop.distributed import ALONE, Group
from onecrop.draws import Draws, draws, fold, shuffled
from onecrop.errors import UserError

# Share of the free device memory that a data set may take for itself.
RESIDENT_SHARE = 0.5
PIECE = 4096  # images that go to the device at a time


class Batch(NamedTuple):
    """All a method may know, already on the device. Of several processes each has b of the B images."""

    images: Tensor  # uint8 [b, 3, R, R], not augmented
    index: Tensor  # type: ignore[assignment]  # int64 [B], row of each image of the whole batch in its data set
    aspect: Tensor  # float32 [b], true width / height (images are stored square)
    draws: Draws  # this step's random numbers, of the b images


@dataclass(frozen=True)
class Rows:
    """Some images of a memory map, in an order, without a copy: they may be more than the memory holds."""

    whole: NDArray[np.uint8]
    index: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, which: Any) -> NDArray[np.uint8]:
        """One image, or several: these are read now."""
        return self.whole[self.index[which]]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.whole.shape[1:])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ImageSet:
    """Decoded images, squashed to squares, in memory or in a memory map. Labels are for evaluation alone."""

    name: str
    images: NDArray[np.uint8] | Rows  # [N, 3, R, R]
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
        return self.key or hashlib.blake2b(np.ascontiguousarray(self.images[:]).data, digest_size=16).hexdigest()

    def take(self, index: NDArray[np.int64]) -> "ImageSet":
        """The images of `index`, in that order."""
        if isinstance(self.images, Rows):
            images: NDArray[np.uint8] | Rows = Rows(self.images.whole, self.images.index[index])
        else:
            images = Rows(self.images, index) if isinstance(self.images, np.memmap) else self.images[index]
        return replace(
            self,
            images=images,
            labels=None if self.labels is None else self.labels[index],
            aspect=None if self.aspect is None else self.aspect[index],
            files=tuple(self.files[i] for i in index) if self.files else (),
            key=None if self.key is None else hashlib.blake2b(self.key.encode() + index.tobytes()).hexdigest()[:32],
        )

    def need_same(self, group: Group) -> None:
        """Every process must see what the first one sees."""
        if group.size == 1:
            return
        here = [len(self), self.fingerprint]
        there = group.said_by(0, here)
        if here != there:
            raise UserError(
                f"{self.name} holds {here[0]:,} images here, and not the {there[0]:,} that rank 0 sees: "
                "give every machine the same ones"
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


def fits(num_bytes: int, device: torch.device) -> bool:
    """May a data set of so many bytes live on the device? A CPU reads it from where it is."""
    return device.type != "cuda" or num_bytes < RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]


def as_tensor(images: NDArray[np.uint8]) -> Tensor:
    """In the same memory. Packs are read-only, of which torch warns; nothing here writes to images."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(images)


def stored(images: NDArray[np.uint8] | Rows) -> tuple[Tensor, Tensor | None]:
    """-> all that is stored, and where in it each image stands; None: in order."""
    if isinstance(images, Rows):
        return as_tensor(images.whole), torch.from_numpy(images.index)
    return as_tensor(images), None


def uploaded(images: NDArray[np.uint8] | Rows, device: torch.device) -> Tensor:
    """On the device, piece by piece: the host's memory never holds all of a memory map."""
    out = torch.empty(images.shape, dtype=torch.uint8, device=device)
    for start in range(0, len(images), PIECE):
        out[start : start + PIECE].copy_(as_tensor(images[start : start + PIECE]))
    return out


class Loader:
    """Batches as a function of the step. The set lives on the device when it fits, else a reader fetches ahead.

    Of several processes each reads its part of every batch; the order is that of one process.
    """

    def __init__(
        self, images: ImageSet, batch_size: int, device: torch.device, seed: int, group: Group = ALONE
    ) -> None:
        if len(images) < 2:
            raise UserError(f"{images.name} has one image, and a batch needs two to tell apart: give it more")
        if batch_size > len(images):
            raise UserError(f"the batch of {batch_size} is larger than the {len(images)} images: lower --batch-size")
        if batch_size < group.size:
            raise UserError(
                f"a batch of {batch_size} leaves some of {group.size} processes without an image: raise --batch-size"
            )
        self.batch_size, self.device, self.seed = batch_size, device, seed
        self.part = group.part(batch_size)  # of each batch, for this process
        self.part_size = self.part.stop - self.part.start
        self.num_images = len(images)
        self.batches_per_epoch = len(images) // batch_size  # the last incomplete batch is dropped
        self.aspect = torch.from_numpy(images.true_aspect).to(device)
        self.resident = fits(images.images.nbytes, device)
        self.images, self.places = stored(images.images)
        if device.type == "cuda" and self.resident:
            self.images, self.places = uploaded(images.images, device), None
        self._reader = None
        if not self.resident:
            self._reader = Reader(self.images, self.places, batch_size, self._index, device, self.part)
        self._epoch, self._order = -1, torch.empty(0)

    @property
    def seconds_waited(self) -> float:
        """For data that were not there in time, since the loader was made."""
        return self._reader.seconds_waited if self._reader else 0.0

    def empty(self) -> Batch:
        """Room for a batch, to be refilled step by step."""
        images = torch.empty(self.part_size, *self.images.shape[1:], dtype=self.images.dtype, device=self.device)
        index = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)
        aspect = torch.empty(self.part_size, dtype=torch.float32, device=self.device)
        return Batch(images, index, aspect, draws(0, self.part_size, self.device, self.part.start, self.batch_size))

    def batch(self, step: int) -> Batch:
        """The batch of a training step, a function of seed and step alone."""
        return self.refill(self.empty(), step)

    def refill(self, batch: Batch, step: int) -> Batch:
        """Write the batch of `step` into `batch`, without a synchronisation where the data are on the device."""
        if self._reader is None:
            batch.index.copy_(self._index(step))
            torch.index_select(self.images, 0, placed(batch.index[self.part], self.places), out=batch.images)
        else:
            self._reader.fetch(step, batch.images, batch.index)
        return self._complete(batch, fold(self.seed, "step", step))

    def in_order(self) -> Iterator[tuple[Batch, int]]:
        """Every image once. The last batch is filled up from the start; the number says how many of it count."""
        for number, start in enumerate(range(0, self.num_images, self.batch_size)):
            index = torch.arange(start, start + self.batch_size, device=self.images.device) % self.num_images
            batch = self.empty()
            batch.index.copy_(index)
            batch.images.copy_(self.images.index_select(0, placed(index[self.part], self.places)))
            yield (
                self._complete(batch, fold(self.seed, "in order", number)),
                min(self.batch_size, self.num_images - start),
            )

    def _complete(self, batch: Batch, key: int) -> Batch:
        torch.index_select(self.aspect, 0, batch.index[self.part], out=batch.aspect)
        batch.draws.key.fill_(key)
        return batch

    def _index(self, step: int) -> Tensor:
        """Which images a step sees, where they are stored; the order of an epoch is a function of seed and epoch."""
        epoch, place = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            key = fold(self.seed, "order", epoch)
            self._epoch, self._order = epoch, shuffled(self.num_images, key, self.images.device)
        return self._order[place * self.batch_size : (place + 1) * self.batch_size]
