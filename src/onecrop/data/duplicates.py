"""Pictures that repeat an earlier one: saved again, resized, made brighter or grey, cut a little at the edges.

To instance discrimination two copies are two classes: it is told to push apart what is the same. A picture is looked at
as a 32 × 32 grey square. The signs of its 63 lowest cosine coefficients about their median propose a pair; the
correlation of the thumbnails and the mean colours confirm it. What that finds, and what not, is measured on photographs
in tests/unit/test_duplicates.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE, LOW = 32, 8
SIGNS_DIFFERING = 10  # of 63
CORRELATION = 0.85
COLOUR_DIFFERENCE = 32  # of 255, of the mean of any channel
FLAT = SIDE**2 / 4 * 2.0**2  # energy of a thumbnail with a spread of two grey levels: below it, all look alike
BLOCK = 2**16  # originals compared at a time

_COSINES = np.cos(np.pi * np.outer(np.arange(LOW), 2 * np.arange(SIDE) + 1) / (2 * SIDE)).astype(np.float32)


class Look(NamedTuple):
    """What of a picture is compared."""

    signs: NDArray[np.float32]  # [64] of ±1, and a 0 in the place of the mean
    thumbnail: NDArray[np.float32]  # [256] grey, about its mean
    colour: NDArray[np.float32]  # [3]


def look_at(square: Image.Image) -> Look:
    small = square.resize((SIDE, SIDE), Image.Resampling.BOX)
    colours = np.asarray(small, np.float32)  # [32, 32, 3]
    grey = colours @ np.array([0.299, 0.587, 0.114], np.float32)
    waves = (_COSINES @ grey @ _COSINES.T).ravel()
    signs = np.where(waves > np.median(waves[1:]), np.float32(1), np.float32(-1))
    signs[0] = 0
    half = SIDE // 2
    thumbnail = grey.reshape(half, 2, half, 2).mean((1, 3)).ravel()
    return Look(signs, thumbnail - thumbnail.mean(), colours.mean((0, 1)))


class Originals:
    """The pictures kept so far. In the order they come, a picture is kept unless it is like one that was."""

    def __init__(self) -> None:
        self.count = 0
        self._signs = np.empty((0, LOW**2), np.float32)
        self._thumbnails = np.empty((0, SIDE**2 // 4), np.float16)  # half the memory, and a correlation needs no more
        self._colours = np.empty((0, 3), np.float32)

    def add(self, looks: Sequence[Look]) -> list[int | None]:
        """-> for each picture, the number of the original it repeats; None where it is a new original."""
        if not looks:
            return []
        first = self.count
        signs, thumbnails, colours = (np.stack(part) for part in zip(*looks, strict=True))
        self._append(signs, thumbnails, colours)  # behind the originals while they are compared
        pairs = self._pairs(first)
        answers: list[int | None] = []
        kept: list[int] = []
        number_of = dict[int, int]()  # row of a new original -> its number
        for new in range(len(looks)):
            earlier = (row if row < first else number_of.get(row) for row in pairs.get(first + new, ()))
            answer = next((number for number in earlier if number is not None), None)
            answers.append(answer)
            if answer is None:
                number_of[first + new] = first + len(kept)
                kept.append(new)
        self.count = first
        self._append(signs[kept], thumbnails[kept], colours[kept])
        return answers

    def add_all(self, looks: Sequence[Look]) -> None:
        """Pictures known to be originals."""
        self._append(*(np.stack(part) for part in zip(*looks, strict=True)))

    def _pairs(self, first: int) -> dict[int, list[int]]:
        """Row from `first` on -> the rows before it that it is like, in order."""
        pairs = dict[int, list[int]]()
        for start in range(0, self.count, BLOCK):
            products = self._signs[first : self.count] @ self._signs[start : min(start + BLOCK, self.count)].T
            new, earlier = np.nonzero(products >= LOW**2 - 1 - 2 * SIGNS_DIFFERING)
            new, earlier = new + first, earlier + start
            new, earlier = new[earlier < new], earlier[earlier < new]
            sure = self._confirmed(new, earlier)
            for row, other in zip(new[sure].tolist(), earlier[sure].tolist(), strict=True):
                pairs.setdefault(row, []).append(other)
        return pairs

    def _confirmed(self, a: NDArray[np.intp], b: NDArray[np.intp]) -> NDArray[np.bool_]:
        one, other = self._thumbnails[a].astype(np.float32), self._thumbnails[b].astype(np.float32)
        energies = ((one**2).sum(1) + FLAT) * ((other**2).sum(1) + FLAT)
        correlation = ((one * other).sum(1) + FLAT) / np.sqrt(energies)
        colour = np.abs(self._colours[a] - self._colours[b]).max(1, initial=0)
        return (correlation >= CORRELATION) & (colour <= COLOUR_DIFFERENCE)

    def _append(self, *rows: NDArray[np.float32]) -> None:
        end = self.count + len(rows[0])
        for name, new in zip(("_signs", "_thumbnails", "_colours"), rows, strict=True):
            array = getattr(self, name)
            if end > len(array):
                grown = np.empty((max(end, 2 * len(array)), array.shape[1]), array.dtype)
                grown[: self.count] = array[: self.count]
                setattr(self, name, array := grown)
            array[self.count : end] = new
        self.count = end
