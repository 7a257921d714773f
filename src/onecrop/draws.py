"""Randomness as a function: of seed and step, of the place in the global batch, and of what it is drawn for.

A counter-based hash replaces generator state: nothing has to be saved for an exact resume, every device and any number
of processes draw the same numbers, and the step may be captured as one graph with only the key changing.
"""

import zlib
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
Bits = TypeVar("Bits", int, Tensor)


def _mix(x: Bits) -> Bits:
    """A 32-bit integer hash (two rounds of multiply and xor-shift); products stay below 2^63."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def fold(*values: int | str) -> int:
    """One 32-bit key from several values, in order."""
    key = 0
    for value in values:
        number = zlib.crc32(value.encode()) if isinstance(value, str) else value
        key = _mix((key * 5 + (number & MASK) + GOLDEN) & MASK)
    return key


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a compiler need not look inside
def _stream(name: str) -> tuple[int, int]:
    # 30 bits of the second: compilers add place numbers to it in 32 bits, with a sign
    return fold(name), fold(name, "column") & 0x3FFFFFFF


class Draws(NamedTuple):
    """The random numbers of one step for the images first … first + size − 1 of the global batch."""

    key: Tensor  # int64 [], fold(seed, step)
    first: int
    size: int
    total: int  # images of the global batch

    def whole(self) -> "Draws":
        """Those of every image of the global batch."""
        return Draws(self.key, 0, self.total, self.total)

    def uniform(self, name: str, count: int) -> Tensor:
        """[size, count] numbers in [0, 1), each image its own."""
        slots = torch.arange(self.first, self.first + self.size, device=self.key.device)
        return self._hash(name, _mix(slots + 1)[:, None], count)

    def once(self, name: str, count: int) -> Tensor:
        """[count] numbers in [0, 1), the same for the whole global batch."""
        return self._hash(name, torch.zeros((), dtype=torch.int64, device=self.key.device), count)

    def _hash(self, name: str, slots: Tensor, count: int) -> Tensor:
        first, second = _stream(name)
        columns = torch.arange(count, device=self.key.device) + second
        stream = _mix((self.key + first) & MASK)
        bits = _mix((_mix(stream ^ slots) + _mix(columns & MASK)) & MASK)
        return (bits >> 8).to(torch.float32) * 2.0**-24


def shuffled(count: int, key: int, device: torch.device | str) -> Tensor:
    """A random order of `count` things, the same on every device -> int64 [count]."""
    numbers = torch.arange(count, device=device)
    return _mix((_mix(numbers & MASK) + key) & MASK).argsort(stable=True)


def draws(key: int, size: int, device: torch.device | str, first: int = 0, total: int | None = None) -> Draws:
    """`full`, not `tensor`: filling on the device needs no synchronisation."""
    return Draws(torch.full((), key, dtype=torch.int64, device=device), first, size, size if total is None else total)
