"""Optimisers and the learning rate as a function of the step.

The learning rate lives in a tensor on the device: it changes every step without a synchronisation.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onecrop.bank import Table
from onecrop.muon import Muon


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
        restored = value.to(parameter.device, copy=True)  # not in the file's own memory: it is to be replaced
        if value.ndim:
            if value.shape != parameter.shape:
                raise KeyError(f"{name} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
            # in the parameter's own memory layout, or the next step would round otherwise
            restored = torch.empty_like(parameter, dtype=value.dtype).copy_(restored)
        state[parameter][name.rpartition("/")[2]] = restored
    optimizer.state = state  # type: ignore[assignment]
