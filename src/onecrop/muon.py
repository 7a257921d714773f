"""Muon: every matrix' update orthogonalised by Newton–Schulz steps (Jordan et al. 2024)."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecrop.bank import Table
from onecrop.device import multiplies_bfloat16

# Odd quintics a·x + b·x³ + c·x⁵ that, one after another, bring every singular value in [.02, 1] into [.89, 1.1]. Each
# is the best one for the interval that its predecessor leaves (Remez exchange; the idea: Amsel et al. 2025), divided by
# 1.01 for the rounding of bfloat16. Muon's published quintic needs five steps for [.68, 1.13] (Jordan et al. 2024).
QUINTICS = (
    (7.6346, -21.4634, 15.4601),
    (3.1929, -2.3508, 0.4794),
    (2.2124, -1.5678, 0.3964),
)
SMALLEST_BATCH = 128  # on a GPU matrices with fewer rows go with those of this many


def orthogonalise(matrices: Tensor) -> Tensor:
    """[K, m, n], m ≤ n -> matrices with the same singular vectors and singular values near 1 (Newton–Schulz).

    The quintics want singular values σ ≤ 1: X is divided by (Σσ⁸)^⅛ = ‖(X·Xᵀ)²‖^¼, which the first step yields anyway.
    Of 2048 equal ones that makes .39 each; the Frobenius norm would make .02 and take a step more.
    Rows and columns of zeros stay zeros, so matrices of several shapes can share a batch.
    """
    x = matrices
    one = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    for step, (a, b, c) in enumerate(QUINTICS):
        gram = torch.bmm(x, x.mT)
        square = torch.bmm(gram, gram)
        scale = _inverse_bound(gram, square) if step == 0 else 1.0
        x = torch.bmm((scale * (a * one + b * scale**2 * gram + c * scale**4 * square)).to(x.dtype), x)
    return x


def _inverse_bound(gram: Tensor, square: Tensor) -> Tensor:
    """1 / ‖square‖^¼ -> [K, 1, 1], by way of the trace: σ⁸ of a small gradient is no number of 32 bits.

    Nor is the fourth power of what this would be without its limit: a gradient of zeros would turn into nan.
    """
    wide = torch.promote_types(gram.dtype, torch.float32)
    trace = gram.diagonal(dim1=1, dim2=2).sum(1, dtype=wide)[:, None, None] + 1e-15
    bound = trace.sqrt() * (square / trace**2).norm(dim=(1, 2), keepdim=True) ** 0.25
    return 1 / bound.clamp(min=1e-9)


class Muon(torch.optim.Optimizer):
    """Momentum (Nesterov form), then each matrix' update orthogonalised; kernels are matrices [out, in·k·k].

    Matrices: W ← (1 − lr·wd)·W − lr·√max(1, rows/columns)·orthogonalise(g + μ·v).
    Vectors: w ← (1 − lr·wd)·w − lr·(g + μ·v); tables of one row an image: the same without decay. The decay of gains
    keeps features at a length that suits a probe with a fixed learning rate; without it they were eight times as long.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: Tensor, momentum: float, weight_decay: float) -> None:
        params = list(params)
        kinds = ["table" if isinstance(p, Table) else "matrix" if p.ndim >= 2 else "vector" for p in params]
        groups = [
            {
                "params": [p for p, its_kind in zip(params, kinds, strict=True) if its_kind == kind],
                "matrices": kind == "matrix",
                "weight_decay": 0.0 if kind == "table" else weight_decay,
            }
            for kind in ("matrix", "vector", "table")
        ]
        super().__init__([g for g in groups if g["params"]], {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for p in params:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            if group["matrices"]:
                batches = _batches(params, padded=params[0].is_cuda)
                how = (group["momentum"], _short_format(params[0]))
                stacks = _fused(_stack_updates, params[0])(batches, params, grads, buffers, *how)
                stacks = _orthogonalise_in_parallel(stacks)
                _fused(_subtract, params[0])(batches, params, stacks, group["lr"], group["weight_decay"])
            else:
                torch._foreach_mul_(buffers, group["momentum"])
                torch._foreach_add_(buffers, grads)
                updates = torch._foreach_add(grads, buffers, alpha=group["momentum"])
                if group["weight_decay"]:
                    torch._foreach_add_(updates, params, alpha=group["weight_decay"])
                torch._foreach_mul_(updates, group["lr"])
                torch._foreach_sub_(params, updates)


def _as_matrix(tensor: Tensor, like: Tensor) -> Tensor:
    """[out, …] -> [out, rest], lying (rows ≤ columns). Columns stand as in the memory of `like`; any order would do."""
    if like.ndim == 4 and not like.is_contiguous():  # channels last
        tensor = tensor.permute(0, 2, 3, 1)
    matrix = tensor.reshape(len(tensor), -1)
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def _from_matrix(matrix: Tensor, like: Tensor) -> Tensor:
    """The way back: a lying matrix -> the shape and memory order of `like`."""
    matrix = matrix.mT if len(like) > like[0].numel() else matrix
    if like.ndim == 4 and not like.is_contiguous():
        out, channels, height, width = like.shape
        return matrix.reshape(out, height, width, channels).permute(0, 3, 1, 2)
    return matrix.reshape(like.shape)


def _batches(params: list[Tensor], padded: bool) -> list[list[int]]:
    """Which matrices go through Newton–Schulz together, tallest first: those of one shape or, padded to it, those of
    like height. On a GPU every batch is a launch more; on a CPU zeros cost as much as numbers."""
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, p in enumerate(params):
        rows, columns = sorted((len(p), p[0].numel()))
        height = max(SMALLEST_BATCH, 1 << (rows - 1).bit_length())
        batches[(height, 0) if padded else (rows, columns)].append(i)
    return [batches[shape] for shape in sorted(batches, reverse=True)]


def _short_format(weight: Tensor) -> torch.dtype:
    """Of Newton–Schulz: bfloat16, which is exact enough for it, where it is the faster one."""
    return torch.bfloat16 if weight.dtype == torch.float32 and multiplies_bfloat16(weight.device) else weight.dtype


def _stack_updates(
    batches: list[list[int]],
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    momentum: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    """v ← μ·v + g; the updates g + μ·v, padded and stacked batch by batch."""
    stacks = []
    for members in batches:
        lying = []
        for i in members:
            buffers[i].mul_(momentum).add_(grads[i])
            lying.append(_as_matrix(torch.add(grads[i], buffers[i], alpha=momentum), params[i]))
        rows, columns = max(m.shape[0] for m in lying), max(m.shape[1] for m in lying)
        pads = [(0, columns - m.shape[1], 0, rows - m.shape[0]) for m in lying]
        stacks.append(torch.stack([F.pad(m.to(dtype), pad) for m, pad in zip(lying, pads, strict=True)]))
    return stacks


def _subtract(batches: list[list[int]], params: list[Tensor], stacks: list[Tensor], lr: Tensor, decay: float) -> None:
    """W ← (1 − lr·wd)·W − lr·√max(1, rows/columns)·O."""
    for members, stack in zip(batches, stacks, strict=True):
        for i, matrix in zip(members, stack, strict=True):
            p = params[i]
            rows, columns = len(p), p[0].numel()
            update = _from_matrix(matrix[: min(rows, columns), : max(rows, columns)], p).to(p.dtype)
            p.copy_(p * (1 - lr * decay) - lr * max(1, rows / columns) ** 0.5 * update)


def _orthogonalise_in_parallel(stacks: list[Tensor]) -> list[Tensor]:
    """On a GPU each stack on a stream of its own: the small ones fit beside the large one."""
    if not stacks[0].is_cuda:
        return [orthogonalise(stack) for stack in stacks]
    fused = _compiled(orthogonalise)
    current = torch.cuda.current_stream()
    streams = [current, *(_side_stream(current.device, number) for number in range(1, len(stacks)))]
    done = []
    for stream, stack in zip(streams, stacks, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            done.append(fused(stack))
    for stream in streams[1:]:
        current.wait_stream(stream)
    return done


@cache
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The same ones in every step and run: cuBLAS keeps 32 MiB for each stream that it has ever worked on."""
    return torch.cuda.Stream(device)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _fused(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    """On a GPU one kernel a parameter, not five; elsewhere the function as it is."""
    return _compiled(function) if like.is_cuda else function
