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
_GREY = np.array([0.299, 0.587, 0.114], np.float32)


class Looks(NamedTuple):
    """What of some pictures is compared."""

    signs: NDArray[np.uint64]  # [n], a bit each; the first one, in the place of the mean, is 0
    thumbnails: NDArray[np.float32]  # [n, 256] grey, about their means
    colours: NDArray[np.float32]  # [n, 3]


def look_at(squares: Sequence[Image.Image]) -> Looks:
    small = [np.asarray(one.resize((SIDE, SIDE), Image.Resampling.BOX, reducing_gap=1.0)) for one in squares]
    pixels = np.array(small, np.float32).reshape(-1, SIDE, SIDE, 3)
    grey = pixels @ _GREY  # [n, 32, 32]
    waves = (_COSINES @ grey @ _COSINES.T).reshape(-1, LOW**2)
    signs = waves > np.median(waves[:, 1:], axis=1, keepdims=True)
    signs[:, 0] = False
    thumbnails = grey.reshape(-1, SIDE // 2, 2, SIDE // 2, 2).mean((2, 4)).reshape(-1, SIDE**2 // 4)
    thumbnails -= thumbnails.mean(1, keepdims=True)
    return Looks(np.packbits(signs, axis=1).view(np.uint64)[:, 0], thumbnails, pixels.mean((1, 2)))


class Originals:
    """The pictures kept so far. In the order they come, a picture is kept unless it is like one that was."""

    def __init__(self) -> None:
        self.count = 0
        self._signs = np.empty(0, np.uint64)
        self._thumbnails = np.empty((0, SIDE**2 // 4), np.float16)  # half the memory, and a correlation needs no more
        self._colours = np.empty((0, 3), np.float32)

    def add(self, looks: Looks) -> list[int | None]:
        """-> for each picture, the number of the original it repeats; None where it is a new original."""
        first = self.count
        self.add_all(looks)  # behind the originals while they are compared
        pairs = self._pairs(first)
        answers: list[int | None] = []
        kept: list[int] = []
        number_of = dict[int, int]()  # row of a new original -> its number
        for new in range(len(looks.signs)):
            earlier = (row if row < first else number_of.get(row) for row in pairs.get(first + new, ()))
            answer = next((number for number in earlier if number is not None), None)
            answers.append(answer)
            if answer is None:
                number_of[first + new] = first + len(kept)
                kept.append(new)
        self.count = first
        self.add_all(Looks(looks.signs[kept], looks.thumbnails[kept], looks.colours[kept]))
        return answers

    def _pairs(self, first: int) -> dict[int, list[int]]:
        """Row from `first` on -> the rows before it that it is like, in order."""
        pairs = dict[int, list[int]]()
        for start in range(0, self.count, BLOCK):
            earlier_signs = self._signs[start : min(start + BLOCK, self.count)]
            differing = np.bitwise_count(self._signs[first : self.count, None] ^ earlier_signs)
            new, earlier = np.nonzero(differing <= SIGNS_DIFFERING)
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

    def add_all(self, looks: Looks) -> None:
        """Pictures known to be originals."""
        end = self.count + len(looks.signs)
        for name, new in zip(("_signs", "_thumbnails", "_colours"), looks, strict=True):
            array = getattr(self, name)
            if end > len(array):
                grown = np.empty((max(end, 2 * len(array)), *array.shape[1:]), array.dtype)
                grown[: self.count] = array[: self.count]
                setattr(self, name, array := grown)
            array[self.count : end] = new
        self.count = end
