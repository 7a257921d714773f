"""Optimisers and the learning rate as a function of the step.

The learning rate lives in a tensor on the device: it changes every step without a synchronisation.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecrop.bank import Table

# Odd quintics a·x + b·x³ + c·x⁵ that, one after another, bring every singular value in [.02, 1] into [.89, 1.1]. Each
# is the best one for the interval that its predecessor leaves (Remez exchange; the idea: Amsel et al. 2025), divided by
# 1.01 for the rounding of bfloat16. Muon's published quintic needs five steps for [.68, 1.13] (Jordan et al. 2024).
QUINTICS = (
    (7.6346, -21.4634, 15.4601),
    (3.1929, -2.3508, 0.4794),
    (2.2124, -1.5678, 0.3964),
)
SMALLEST_BATCH = 128  # matrices with fewer rows are padded to this many


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
    Vectors, and tables of one row an image: SGD without weight decay.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: Tensor, momentum: float, weight_decay: float) -> None:
        params = list(params)
        maps = [p.ndim >= 2 and not isinstance(p, Table) for p in params]
        groups = [
            {
                "params": [p for p, is_map in zip(params, maps, strict=True) if is_map == matrices],
                "matrices": matrices,
                "weight_decay": weight_decay if matrices else 0.0,
            }
            for matrices in (True, False)
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
                batches = _batches(params)
                stacks = _fused(_stack_updates, params[0])(batches, params, grads, buffers, group["momentum"])
                stacks = _orthogonalise_in_parallel(stacks)
                _fused(_subtract, params[0])(batches, params, stacks, group["lr"], group["weight_decay"])
            else:
                torch._foreach_mul_(buffers, group["momentum"])
                torch._foreach_add_(buffers, grads)
                updates = torch._foreach_add(grads, buffers, alpha=group["momentum"])
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


def _batches(params: list[Tensor]) -> list[list[int]]:
    """Which matrices go through Newton–Schulz together: those of like height, padded to one shape; tallest first."""
    batches: dict[int, list[int]] = defaultdict(list)
    for i, p in enumerate(params):
        height = min(len(p), p[0].numel())
        batches[max(SMALLEST_BATCH, 1 << (height - 1).bit_length())].append(i)
    return [batches[height] for height in sorted(batches, reverse=True)]


def _stack_updates(
    batches: list[list[int]], params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], momentum: float
) -> list[Tensor]:
    """v ← μ·v + g; the updates g + μ·v, padded and stacked batch by batch."""
    stacks = []
    for members in batches:
        lying = []
        for i in members:
            buffers[i].mul_(momentum).add_(grads[i])
            lying.append(_as_matrix(torch.add(grads[i], buffers[i], alpha=momentum), params[i]))
        rows, columns = max(m.shape[0] for m in lying), max(m.shape[1] for m in lying)
        dtype = torch.bfloat16 if lying[0].is_cuda else lying[0].dtype
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
    streams = [current, *(torch.cuda.Stream() for _ in stacks[1:])]
    done = []
    for stream, stack in zip(streams, stacks, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            done.append(fused(stack))
    for stream in streams[1:]:
        current.wait_stream(stream)
    return done


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _fused(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    """On a GPU one kernel a parameter, not five; elsewhere the function as it is."""
    return _compiled(function) if like.is_cuda else function


class Lars(torch.optim.Optimizer):
    """SGD whose step is scaled layer by layer (You et al. 2017): v ← μ·v + r·(g + wd·W), W ← W − lr·v.

    r = η·‖W‖ / (‖g‖ + wd·‖W‖) for matrices and kernels; vectors have r = 1 and no weight decay.
    """

    TRUST = 1e-3  # η

    def __init__(self, params: Iterable[nn.Parameter], lr: Tensor, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if p.ndim >= 2:
                    size, slope, decay = _norm(p, p), _norm(p.grad, p), group["weight_decay"]
                    ratio = self.TRUST * size / (slope + decay * size)
                    ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)  # a weight or gradient of zeros
                    update = ratio * (p.grad + decay * p)
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buffer = self.state[p]["momentum_buffer"]
                buffer.mul_(group["momentum"]).add_(update)
                p.sub_(group["lr"] * buffer)


def _norm(tensor: Tensor, of: Tensor) -> Tensor:
    """‖tensor‖; of a table in parts that of the whole."""
    if isinstance(of, Table) and of.group.size > 1:
        return of.group.sum(tensor.square().sum()).sqrt()
    return tensor.norm()


class Choice(NamedTuple):
    """An optimiser with the learning rate and weight decay that suit sid."""

    build: Callable[[Iterable[nn.Parameter], Tensor, float, float], torch.optim.Optimizer]
    lr: float
    weight_decay: float


def _sgd(params: Iterable[nn.Parameter], lr: Tensor, momentum: float, weight_decay: float) -> torch.optim.Optimizer:
    # fused: the only form that reads a learning rate from the device
    return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)


def _adamw(params: Iterable[nn.Parameter], lr: Tensor, momentum: float, weight_decay: float) -> torch.optim.Optimizer:
    # capturable: the step is part of a CUDA graph
    betas = (momentum, 0.999)
    return torch.optim.AdamW(params, lr=lr, betas=betas, weight_decay=weight_decay, fused=True, capturable=lr.is_cuda)


OPTIMIZERS: dict[str, Choice] = {
    "muon": Choice(Muon, lr=0.02, weight_decay=0.05),
    "sgd": Choice(_sgd, lr=1.0, weight_decay=1e-4),  # the released code's; the paper prints lr .1
    "adamw": Choice(_adamw, lr=1e-3, weight_decay=0.05),  # usual values, not tuned here
    "lars": Choice(Lars, lr=0.6, weight_decay=1e-6),  # SimCLR's at batch 512, not tuned here
}


def cosine(step: int, total: int, warmup: int = 0) -> float:
    """Share of the peak learning rate at `step`: linear from 1/warmup to 1, then a half cosine to 0 after the last."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if not group.get("held"):
            group["lr"].fill_(lr)


def hold_learning_rate(optimizer: torch.optim.Optimizer, held: Iterable[nn.Parameter]) -> None:
    """Let these parameters keep the learning rate that they have now, whatever is set for the others."""
    kept = {id(p) for p in held}
    groups = [
        {**group, "params": params, "held": hold, "lr": group["lr"].clone() if hold else group["lr"]}
        for group in optimizer.param_groups
        for hold in (False, True)
        if (params := [p for p in group["params"] if (id(p) in kept) == hold])
    ]
    optimizer.param_groups[:] = groups


def optimizer_tensors(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """Everything an optimiser remembers, by parameter name: what a checkpoint has to hold."""
    return {
        f"{name}/{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Strict: no state of other parameters. One may have none: SGD without momentum, or a weight that is not used."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    others = {name.rpartition("/")[0] for name in tensors} - parameters.keys()
    if others:
        raise KeyError(f"the optimiser's state is that of other parameters: {min(others)}")
    state: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
    for name, value in tensors.items():
        parameter = parameters[name.rpartition("/")[0]]
        restored = value.to(parameter.device)
        if value.ndim:
            if value.shape != parameter.shape:
                raise KeyError(f"{name} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
            # in the parameter's own memory layout, or the next step would round otherwise
            restored = torch.empty_like(parameter, dtype=value.dtype).copy_(restored)
        state[parameter][name.rpartition("/")[2]] = restored
    optimizer.state = state  # type: ignore[assignment]
