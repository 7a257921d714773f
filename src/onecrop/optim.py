"""Optimisers and the learning rate as a function of the step.

The learning rate lives in a tensor on the device: it changes every step without a synchronisation.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Odd quintics a·x + b·x³ + c·x⁵ that, one after another, bring every singular value in [.005, 1] into [.91, 1.09]. Each
# is the best one for the interval that its predecessor leaves (Remez exchange; the idea: Amsel et al. 2025), divided by
# 1.01 for the rounding of bfloat16. Muon's published quintic needs five steps for [.68, 1.13] (Jordan et al. 2024).
QUINTICS = (
    (8.2165, -23.7120, 17.2123),
    (3.8803, -2.8391, 0.5329),
    (3.1598, -2.3265, 0.4767),
    (2.1883, -1.5461, 0.3942),
)
SMALLEST_BATCH = 128  # matrices with fewer rows are padded to this many


def orthogonalise(matrices: Tensor) -> Tensor:
    """[K, m, n], m ≤ n -> matrices with the same singular vectors and singular values near 1 (Newton–Schulz).

    Rows and columns of zeros stay zeros, so matrices of several shapes can share a batch.
    """
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for a, b, c in QUINTICS:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Momentum (Nesterov form), then each matrix' update orthogonalised; kernels are matrices [out, in·k·k].

    Matrices: W ← (1 − lr·wd)·W − lr·√max(1, rows/columns)·orthogonalise(g + μ·v). Vectors: SGD, no weight decay.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: Tensor, momentum: float, weight_decay: float) -> None:
        params = list(params)
        groups = [
            {"params": [p for p in params if p.ndim >= 2], "matrices": True, "weight_decay": weight_decay},
            {"params": [p for p in params if p.ndim < 2], "matrices": False, "weight_decay": 0.0},
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
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, grads)
            updates = list(torch._foreach_add(grads, buffers, alpha=group["momentum"]))
            if group["matrices"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                _in_parallel([partial(_step_batch, *batch, group["lr"]) for batch in _batches(params, updates)])
            else:
                torch._foreach_mul_(updates, group["lr"])
                torch._foreach_sub_(params, updates)


def _as_matrices(weight: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    """[out, …] -> [out, rest], the weight without a copy. Columns stand as in memory: their order is free."""
    if weight.ndim == 4 and not weight.is_contiguous():  # channels last
        weight, update = weight.permute(0, 2, 3, 1), update.permute(0, 2, 3, 1)
    return weight.view(len(weight), -1), update.reshape(len(weight), -1)


def _batches(params: list[Tensor], updates: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """(weights, updates), matrices of like height together, all lying (m ≤ n), tallest first."""
    batches: dict[int, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for weight, update in map(_as_matrices, params, updates):
        height = min(weight.shape)
        batch = batches[max(SMALLEST_BATCH, 1 << (height - 1).bit_length())]
        batch[0].append(weight)
        batch[1].append(update)
    return [batches[height] for height in sorted(batches, reverse=True)]


def _step_batch(weights: list[Tensor], updates: list[Tensor], lr: Tensor) -> None:
    """W ← W − lr·√max(1, rows/columns)·orthogonalise(U), for matrices padded to one shape."""
    lying = [u.mT if u.shape[0] > u.shape[1] else u for u in updates]
    shape = (len(lying), max(u.shape[0] for u in lying), max(u.shape[1] for u in lying))
    padded = updates[0].new_zeros(shape, dtype=torch.bfloat16 if updates[0].is_cuda else updates[0].dtype)
    for place, update in zip(padded, lying, strict=True):
        place[: update.shape[0], : update.shape[1]].copy_(update)
    for weight, update, matrix in zip(weights, lying, orthogonalise(padded), strict=True):
        matrix = matrix[: update.shape[0], : update.shape[1]]
        rows, columns = weight.shape
        scale = -(max(1, rows / columns) ** 0.5)
        weight.addcmul_(matrix.mT if rows > columns else matrix, lr, value=scale)


def _in_parallel(jobs: list[Callable[[], None]]) -> None:
    """On a GPU each job on a stream of its own: the small ones fit beside the large one."""
    if not torch.cuda.is_available() or len(jobs) == 1:
        for job in jobs:
            job()
        return
    current = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in jobs[1:]]
    for stream, job in zip(streams, jobs[1:], strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            job()
    jobs[0]()
    for stream in streams:
        current.wait_stream(stream)


class Choice(NamedTuple):
    """An optimiser with the learning rate and weight decay that suit sid."""

    build: Callable[[Iterable[nn.Parameter], Tensor, float, float], torch.optim.Optimizer]
    lr: float
    weight_decay: float


def _sgd(params: Iterable[nn.Parameter], lr: Tensor, momentum: float, weight_decay: float) -> torch.optim.Optimizer:
    # fused: the only form that reads a learning rate from the device
    return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)


OPTIMIZERS: dict[str, Choice] = {
    "muon": Choice(Muon, lr=0.02, weight_decay=0.05),
    "sgd": Choice(_sgd, lr=1.0, weight_decay=1e-4),  # the released code's; the paper prints lr .1
}


def cosine(step: int, total: int, warmup: int = 0) -> float:
    """Share of the peak learning rate at `step`: linear from 1/warmup to 1, then a half cosine to 0 after the last."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"].fill_(lr)


def optimizer_tensors(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """Everything an optimiser remembers, by parameter name: what a checkpoint has to hold."""
    return {
        f"{name}/{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Strict: the state must be that of exactly these parameters."""
    parameters = dict(module.named_parameters())
    held = {name.rpartition("/")[0] for name in tensors}
    if held != parameters.keys():
        raise KeyError(f"the optimiser's state is that of other parameters: {min(held ^ parameters.keys())}")
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
