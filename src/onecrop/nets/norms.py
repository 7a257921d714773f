"""Batch norm over several processes as over one, and in groups: the statistics of several devices, on one."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from onecrop.distributed import ALONE, Group
from onecrop.errors import UserError


class GroupedNorm(nn.BatchNorm2d):
    """In training each of `groups` parts of the batch is normalised by itself; running statistics are left alone.

    Of several processes each has a part of the batch, and a group that reaches over two of them is still one group;
    without gradient then, which the network of the keys does not need.
    """

    groups: int
    processes: Group = ALONE
    batch_size: int | None = None  # of all processes, where there are several

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        total = self.batch_size or len(x)
        count = _parts(total, self.groups)
        size = total // count
        if any(self.processes.part(total, rank).start % size for rank in range(self.processes.size)):
            return self._across(x, count, size)
        parts = _wide(x.unflatten(0, (-1, size)))  # [groups, B/groups, C, H, W]
        variance, mean = torch.var_mean(parts, dim=(1, 3, 4), keepdim=True, correction=0)
        scale = self.weight[:, None, None] * (variance + self.eps).rsqrt()
        return ((parts - mean) * scale + self.bias[:, None, None]).flatten(0, 1).to(x.dtype)

    def _across(self, x: Tensor, count: int, size: int) -> Tensor:
        assert self.batch_size is not None
        held = self.processes.part(self.batch_size)
        number = torch.arange(held.start, held.stop, device=x.device) // size  # [b] each image's group
        pixels = size * x[0, 0].numel()

        def means(values: Tensor) -> Tensor:
            """[b, C, H, W] -> mean of each image's group and channel [b, C, 1, 1]."""
            sums = values.new_zeros(count, x.shape[1]).index_add_(0, number, values.sum((2, 3)))
            return (self.processes.sum(sums) / pixels)[number][:, :, None, None]

        wide = _wide(x)
        below = wide - means(wide)
        scale = self.weight[:, None, None] * (means(below.square()) + self.eps).rsqrt()
        return (below * scale + self.bias[:, None, None]).to(x.dtype)


class NormByParts(nn.Module):
    """The same for a batch norm that does more, such as timm's with its activation: one part after another."""

    def __init__(self, norm: _BatchNorm, groups: int) -> None:
        super().__init__()
        self.norm, self.groups = norm, groups

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.norm(x)  # type: ignore[no-any-return]
        return torch.cat([self.norm(part) for part in x.chunk(_parts(len(x), self.groups))])


def _parts(total: int, groups: int) -> int:
    """Into how many equal parts of two images or more a batch falls: as many as wanted, or the most below that."""
    return next(count for count in range(max(1, min(groups, total // 2)), 0, -1) if total % count == 0)


class SharedNorm(_BatchNorm):
    """Batch norm by the statistics of all processes' images, as torch's SyncBatchNorm, which is for GPUs alone."""

    processes: Group = ALONE

    def _check_input_dim(self, input: Tensor) -> None:
        """Images and vectors alike."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        out, mean, variance, count = _Standardise.apply(_wide(x), self.eps, self.processes)
        self._track(mean, variance * count / (count - 1))
        if self.affine:
            shape = [1, -1, *[1] * (x.ndim - 2)]
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(x.dtype)

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.num_batches_tracked is None or self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _Standardise(torch.autograd.Function):
    """x̂ = (x − mean)/√(variance + ε) by the statistics of all processes; one collective forward, one backward.

    ∂L/∂x = (∂L/∂x̂ − Σ∂L/∂x̂/n − x̂·Σ(∂L/∂x̂·x̂)/n) / √(variance + ε), sums over all n pixels of a channel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, processes: Group) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        variance, mean = torch.var_mean(x, dim=dims, correction=0)
        count = torch.full_like(mean, x.numel() // len(mean))  # parts may differ by an image
        counts, means, variances = processes.stack(torch.stack([count, mean, variance])).unbind(1)  # [size, C] each
        count = counts.sum(0)
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean).square())).sum(0) / count
        scale = (variance + eps).rsqrt().view(shape)
        out = (x - mean.view(shape)) * scale
        ctx.save_for_backward(out, scale, count.view(shape))
        ctx.dims, ctx.processes = dims, processes
        ctx.mark_non_differentiable(mean, variance, count)
        return out, mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        out, scale, count = ctx.saved_tensors
        sums = torch.stack([grad.sum(ctx.dims, keepdim=True), (grad * out).sum(ctx.dims, keepdim=True)])
        plain, along = ctx.processes.sum(sums) / count
        return (grad - plain - out * along) * scale, None, None


def norm_in_groups(net: nn.Module, groups: int) -> nn.Module:
    """Let every batch norm of `net` see the batch in groups, its weights kept."""
    for name, child in net.named_children():
        if type(child) is nn.BatchNorm2d:
            grouped = GroupedNorm(child.num_features, child.eps)
            grouped.load_state_dict(child.state_dict())
            grouped.groups = groups
            setattr(net, name, grouped)
        elif isinstance(child, _BatchNorm):
            setattr(net, name, NormByParts(child, groups))
        else:
            norm_in_groups(child, groups)
    return net


def share_norms(net: nn.Module, processes: Group, batch_size: int, device: torch.device) -> None:
    """Let every batch norm of `net` see the images of all processes, its weights and keys kept."""
    for name, child in net.named_children():
        if isinstance(child, GroupedNorm):
            child.processes, child.batch_size = processes, batch_size
        elif type(child) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            if isinstance(net, NormByParts) and net.groups > 1 and batch_size % processes.size:
                # parts of other lengths may fall into another number of groups, and the processes would not meet
                raise UserError(
                    f"{type(child).__name__} in groups needs as many images on each of {processes.size} processes: "
                    f"take a multiple of {processes.size} for --batch-size {batch_size}, or pass --norm-groups 1"
                )
            setattr(net, name, _shared(child, processes, device))
        elif isinstance(child, _BatchNorm):
            raise UserError(
                f"{type(child).__name__} cannot be shared between processes: pass --sync-batch-norm false, "
                "and each of them normalises by its own images"
            )
        else:
            share_norms(child, processes, batch_size, device)


def _shared(norm: nn.Module, processes: Group, device: torch.device) -> _BatchNorm:
    assert isinstance(norm, _BatchNorm)
    build = nn.SyncBatchNorm if device.type == "cuda" else SharedNorm
    shared = build(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    shared.weight, shared.bias = norm.weight, norm.bias  # the parameters themselves
    shared.running_mean, shared.running_var = norm.running_mean, norm.running_var
    shared.num_batches_tracked = norm.num_batches_tracked
    if isinstance(shared, SharedNorm):
        shared.processes = processes
    return shared.train(norm.training)


def _wide(x: Tensor) -> Tensor:
    """Statistics are worked out in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
