"""The processes of a run, what each of them holds, and how their parts are put together.

Batches and tables of one row an image are cut into contiguous parts, one a process. Features of all processes are
gathered before the loss, and every process works out the same loss L of the whole batch. Its gradient needs care:

    gather        forward: all parts        backward: the own part of ∂L, times the number of processes, because
                                            DistributedDataParallel divides by it when it adds the gradients up
    fan_out       forward: as it is         backward: the sum over processes: each has seen a part of the rows
    total         forward: the sum          backward: as it is: L is the same everywhere

A group of one process adds no operation to any of these.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

CHUNK_BYTES = 2**28  # of a table that travel to the first process, or from it, at a time


class Group(NamedTuple):
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """The process that writes files and speaks."""
        return self.rank == 0

    def part(self, count: int, rank: int | None = None) -> slice:
        """Which of `count` things a process holds; parts differ by at most one, the longer ones first."""
        rank = self.rank if rank is None else rank
        share, rest = divmod(count, self.size)
        start = rank * share + min(rank, rest)
        return slice(start, start + share + (rank < rest))

    def place(self, index: Tensor, count: int) -> Tensor:
        """Places in a table of `count` rows -> places in the own part of it; −1 where another process holds the row."""
        if self.size == 1:
            return index
        part = self.part(count)
        return torch.where((index >= part.start) & (index < part.stop), index - part.start, -1)

    def fetch(self, part: Tensor, place: Tensor) -> Tensor:
        """Rows of a table in parts, from whoever holds them (place ≥ 0) -> [B, D] everywhere."""
        if self.size == 1:
            return part[place]
        held = (place >= 0)[:, None]
        rows = part[place.clamp(min=0)] if len(part) else part.new_zeros(len(place), *part.shape[1:])
        return self.sum(torch.where(held, rows, 0))  # one process adds the row, the others zeros: exact

    def gather(self, x: Tensor, count: int) -> Tensor:
        """The parts of all processes, in order -> [count, …], differentiable."""
        return x if self.size == 1 else _Gather.apply(x, self, count)

    def fan_out(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else _FanOut.apply(x, self)

    def total(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else _Total.apply(x, self)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes, without gradient."""
        if self.size == 1:
            return x
        out = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out)
        return out

    def stack(self, x: Tensor) -> Tensor:
        """The tensors of all processes, which have one shape -> [size, …], without gradient."""
        if self.size == 1:
            return x[None]
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.detach().contiguous())
        return out.unflatten(0, (self.size, len(x)))

    def concatenate(self, x: Tensor) -> Tensor:
        """Rows of all processes, as many as each has, in order; without gradient."""
        if self.size == 1:
            return x
        shapes = self.stack(torch.tensor([[len(x), x[:1].numel()]]))[:, 0]  # of no rows the length is not known
        longest, width = shapes.amax(0).tolist()
        padded = x.new_zeros(longest, width) if x.ndim > 1 else x.new_zeros(longest)
        if len(x):
            padded[: len(x)] = x
        return torch.cat([part[:count] for part, count in zip(self.stack(padded), shapes[:, 0].tolist(), strict=True)])

    def take(self, x: Tensor, order: Tensor, unit: int = 1) -> Tensor:
        """The whole batch put into `order`: its rows, wherever they lie, that are in the own part then. No gradient.

        unit: rows that belong together, and lie on one process.
        """
        if self.size == 1:
            return x[order]
        parts = [self.part(len(order) // unit, rank) for rank in range(self.size)]
        places = order.cpu()
        theirs = [places[unit * part.start : unit * part.stop] for part in parts]
        mine = parts[self.rank]
        held = [(wanted >= unit * mine.start) & (wanted < unit * mine.stop) for wanted in theirs]
        sent = torch.cat([wanted[here] for wanted, here in zip(theirs, held, strict=True)]) - unit * mine.start
        wanted = theirs[self.rank]
        owner = torch.bucketize(wanted, torch.tensor([unit * part.stop for part in parts]), right=True)
        received = [int((owner == rank).sum()) for rank in range(self.size)]
        out = x.new_empty(len(wanted), *x.shape[1:])
        dist.all_to_all_single(out, x[sent.to(x.device)].contiguous(), received, [int(here.sum()) for here in held])
        out = out[owner.argsort(stable=True).argsort().to(x.device)]  # it came by owner, in the order asked for
        return out.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else out

    def following(self, x: Tensor) -> Tensor:
        """x[i + 1] for each row of the part; after the last row of the last part comes the first of the first."""
        if self.size == 1:
            return x.roll(-1, 0)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        row = torch.empty_like(x[:1], memory_format=torch.contiguous_format)
        received, sent = ([int(rank == other) for rank in range(self.size)] for other in (after, before))
        dist.all_to_all_single(row, x[:1].contiguous(), received, sent)
        return torch.cat([x[1:], row])

    def any(self, *flags: bool) -> list[bool]:
        """Of each flag: does any process say so? On the host: no device waits for it."""
        if self.size == 1:
            return list(flags)
        said = torch.tensor(flags, dtype=torch.int64)
        dist.all_reduce(said, dist.ReduceOp.MAX)
        return [bool(flag) for flag in said]

    def wait(self) -> None:
        """Until every process is here."""
        self.any(True)

    @contextmanager
    def by_turns(self) -> Iterator[None]:
        """The first process of each machine before the others, who then find what it has downloaded or packed."""
        leads = os.environ.get("LOCAL_RANK", "0") == "0"
        if not leads:
            self.wait()
        yield
        if leads:
            self.wait()

    def said_by(self, rank: int, value: Any) -> Any:
        """What one process says, in JSON's types; the others' values are not looked at."""
        if self.size == 1:
            return value
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([len(text)])
        dist.broadcast(length, rank)
        text = text if self.rank == rank else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, rank)
        return json.loads(bytes(text.tolist()))

    def collect(self, rows: Tensor, count: int) -> Tensor | None:
        """The whole table in the host memory of the first process, which gets it piece by piece; None elsewhere."""
        if self.size == 1:
            return rows
        if not self.first:
            for piece in rows.split(_rows_at_a_time(rows)):
                dist.send(piece.detach().cpu().contiguous(), 0)
            return None
        out = torch.empty(count, *rows.shape[1:], dtype=rows.dtype)
        out[self.part(count)] = rows.detach().cpu()
        for rank in range(1, self.size):
            for piece in out[self.part(count, rank)].split(_rows_at_a_time(rows)):
                dist.recv(piece, rank)
        return out

    def hand_out(self, table: Tensor | None, shape: list[int], dtype: torch.dtype) -> Tensor:
        """The way back from `collect`: each process gets its rows of the table that the first one has."""
        part = self.part(shape[0])
        if self.first:
            assert table is not None
            for rank in range(1, self.size):
                for piece in table[self.part(shape[0], rank)].split(_rows_at_a_time(table)):
                    dist.send(piece.contiguous(), rank)
            return table[part]
        out = torch.empty(part.stop - part.start, *shape[1:], dtype=dtype)
        for piece in out.split(_rows_at_a_time(out)):
            dist.recv(piece, 0)
        return out

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """In place: as the first process has them."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def copy_of_first(self, tensor: Tensor | None, shape: list[int], dtype: torch.dtype) -> Tensor:
        """The first process' tensor, in host memory."""
        if self.size == 1:
            assert tensor is not None
            return tensor
        out = tensor.contiguous() if tensor is not None and self.first else torch.empty(shape, dtype=dtype)
        dist.broadcast(out, 0)
        return out


ALONE = Group()


def world() -> Group:
    """The processes that were started together; a process by itself is a group of one."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    return Group(dist.get_rank(), dist.get_world_size())


def _rows_at_a_time(table: Tensor) -> int:
    return max(1, CHUNK_BYTES // max(1, table[:1].numel() * table.element_size()))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, count: int) -> Tensor:
        ctx.group, ctx.count = group, count
        longest = -(-count // group.size)  # parts of unequal length are filled up: collectives want one shape
        padded = x if len(x) == longest else torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])])
        parts = group.stack(padded)
        if count % group.size == 0:
            return parts.flatten(0, 1)
        lengths = [group.part(count, rank) for rank in range(group.size)]
        return torch.cat([p[: length.stop - length.start] for p, length in zip(parts, lengths, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad[ctx.group.part(ctx.count)] * ctx.group.size, None, None


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.group.sum(grad), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Group) -> Tensor:
        return group.sum(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
