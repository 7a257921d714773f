"""Optimisers and the learning rate as a function of the step.

The learning rate lives in a tensor on the device: it changes every step without a synchronisation.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# The published quintic of Muon and its number of iterations (Jordan et al. 2024).
QUINTIC = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
SMALLEST_BATCH = 128  # matrices with fewer rows are padded to this many


def orthogonalise(matrices: Tensor) -> Tensor:
    """[K, m, n], m ≤ n -> matrices with the same singular vectors and singular values near 1 (Newton–Schulz).

    Rows and columns of zeros stay zeros, so matrices of several shapes can share a batch.
    """
    a, b, c = QUINTIC
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
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
                updates = _orthogonalise_all(updates)
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_mul_(updates, group["lr"])
            torch._foreach_sub_(params, updates)


def _orthogonalise_all(updates: list[Tensor]) -> list[Tensor]:
    """Every update orthogonalised, in a few batches: matrices of like size are padded to one shape."""
    wide = [update.reshape(len(update), -1) for update in updates]
    tall = [matrix.shape[0] > matrix.shape[1] for matrix in wide]
    wide = [matrix.mT if flip else matrix for matrix, flip in zip(wide, tall, strict=True)]  # m ≤ n
    batches: dict[int, list[int]] = defaultdict(list)
    for i, matrix in enumerate(wide):
        batches[max(SMALLEST_BATCH, 1 << (matrix.shape[0] - 1).bit_length())].append(i)
    out = list(updates)
    for rows, members in batches.items():
        columns = max(wide[i].shape[1] for i in members)
        first = wide[members[0]]
        dtype = torch.bfloat16 if first.is_cuda else first.dtype
        padded = torch.zeros(len(members), rows, columns, dtype=dtype, device=first.device)
        places = [padded[k, : wide[i].shape[0], : wide[i].shape[1]] for k, i in enumerate(members)]
        torch._foreach_copy_(places, [wide[i] for i in members])
        for k, (i, matrix) in enumerate(zip(members, orthogonalise(padded), strict=True)):
            matrix = matrix[: places[k].shape[0], : places[k].shape[1]]
            matrix = matrix.mT if tall[i] else matrix
            scale = max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
            out[i] = (matrix * scale).to(updates[i].dtype).reshape(updates[i].shape)
    return out


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
