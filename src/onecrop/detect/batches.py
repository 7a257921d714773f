"""Batches of pictures with boxes: which, how large and which way round are functions of (seed, step); read ahead.

Resizing and mirroring are those of detectron2: every picture draws its short side from a list, the long side has a
limit, and half of the pictures are mirrored. Wide pictures are batched with wide ones, so that little is padding.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from onecrop.detect.coco import draw_outlines
from onecrop.detect.sets import DetectionSet, Picture
from onecrop.draws import draws, fold, shuffled
from onecrop.errors import UserError

AHEAD = 3  # batches read before they are asked for
READERS = min(16, os.cpu_count() or 1)  # decoding and resizing leave Python's lock


class Sizes(NamedTuple):
    """Short sides that training draws from, the one of testing, and the most that a long side may have."""

    train: tuple[int, ...]
    test: int
    longest: int


class Sample(NamedTuple):
    """A picture as the network sees it, and where things are in it."""

    image: Tensor  # uint8 [3, h, w]
    boxes: Tensor  # float32 [n, 4], in pixels of `image`
    labels: Tensor  # int64 [n]
    masks: Tensor | None  # uint8 [n, H, W], in the size of the file, mirrored like `image`
    ratio: Tensor  # float32 [4]: pixels of `image` for one of the file, for left, top, right, bottom

    def to(self, device: torch.device) -> "Sample":
        return Sample._make(None if part is None else part.to(device, non_blocking=True) for part in self)


def resized(width: int, height: int, short: int, longest: int) -> tuple[int, int]:
    """The size with that short side, or with a long side of `longest` where it would be longer."""
    factor = min(short / min(width, height), longest / max(width, height))
    return max(1, int(width * factor + 0.5)), max(1, int(height * factor + 0.5))


def read_sample(picture: Picture, short: int, longest: int, mirror: bool, masks: bool) -> Sample:
    width, height = resized(picture.width, picture.height, short, longest)
    try:
        with Image.open(picture.file) as file:
            image = file.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{picture.file} cannot be decoded ({error}): put a whole one in its place and go on, "
            "or begin again with --skip-broken true"
        ) from None
    pixels = np.asarray(image).transpose(2, 0, 1)
    ratio = np.array([width / picture.width, height / picture.height] * 2, np.float32)
    boxes = picture.boxes * ratio
    drawn = draw_outlines(picture.outlines, picture.height, picture.width) if masks else None
    if mirror:
        pixels = pixels[:, :, ::-1]
        boxes = np.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], axis=1)
        drawn = None if drawn is None else drawn[:, :, ::-1]
    return Sample(
        torch.from_numpy(np.ascontiguousarray(pixels)),
        torch.from_numpy(np.ascontiguousarray(boxes)),
        torch.from_numpy(picture.labels),
        None if drawn is None else torch.from_numpy(np.ascontiguousarray(drawn)),
        torch.from_numpy(ratio),
    )


class Batches:
    """`at(step)`: the samples of a training step, read in the background while the steps before it are computed."""

    def __init__(self, pictures: DetectionSet, batch_size: int, sizes: Sizes, masks: bool, seed: int) -> None:
        self.pictures, self.batch_size, self.sizes = pictures.pictures, batch_size, sizes
        self.masks, self.seed = masks, seed
        self.wide = np.array([picture.width >= picture.height for picture in self.pictures])
        self.per_epoch = -(-len(self.pictures) // batch_size)
        self.orders: dict[int, NDArray[np.int64]] = {}
        self.pool = ThreadPoolExecutor(READERS, thread_name_prefix="onecrop-pictures")
        self.pending: dict[int, list[Future[Sample]]] = {}

    def at(self, step: int) -> list[Sample]:
        for ahead in range(step, step + AHEAD):
            if ahead not in self.pending:
                self.pending[ahead] = [self.pool.submit(read_sample, *what) for what in self._plan(ahead)]
        return [future.result() for future in self.pending.pop(step)]

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)

    def _plan(self, step: int) -> list[tuple[Picture, int, int, bool, bool]]:
        """What to read for a step: pictures, short sides, whether mirrored."""
        index = self._order(step // self.per_epoch)[step % self.per_epoch]
        chance = draws(fold(self.seed, "pictures", step), self.batch_size, "cpu")
        sides = (chance.uniform("short side", 1)[:, 0] * len(self.sizes.train)).long().tolist()
        mirrors = (chance.uniform("mirror", 1)[:, 0] < 0.5).tolist()
        return [
            (self.pictures[i], self.sizes.train[side], self.sizes.longest, mirror, self.masks)
            for i, side, mirror in zip(index.tolist(), sides, mirrors, strict=True)
        ]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """[per_epoch, batch_size]: every picture once, wide ones together; what the last batch lacks comes twice."""
        if epoch not in self.orders:
            self.orders = {e: order for e, order in self.orders.items() if e >= epoch - 1}
            order = shuffled(len(self.pictures), fold(self.seed, "order", epoch), "cpu").numpy()
            sorted_by_shape = np.concatenate([order[self.wide[order]], order[~self.wide[order]]])
            rows = np.resize(sorted_by_shape, (self.per_epoch, self.batch_size))
            self.orders[epoch] = rows[shuffled(self.per_epoch, fold(self.seed, "rows", epoch), "cpu").numpy()]
        return self.orders[epoch]
