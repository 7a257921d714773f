"""Batch norm in groups: the statistics that several devices would see, on one."""

import torch
from torch import Tensor, nn


class GroupedNorm(nn.BatchNorm2d):
    """In training each of `groups` parts of the batch is normalised by itself; running statistics are left alone."""

    groups: int

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        count = next(g for g in range(max(1, min(self.groups, len(x) // 2)), 0, -1) if len(x) % g == 0)  # equal parts
        parts = x.unflatten(0, (count, -1)).float()  # [groups, B/groups, C, H, W]
        variance, mean = torch.var_mean(parts, dim=(1, 3, 4), keepdim=True, correction=0)
        scale = self.weight[:, None, None] * (variance + self.eps).rsqrt()
        return ((parts - mean) * scale + self.bias[:, None, None]).flatten(0, 1).to(x.dtype)


def norm_in_groups(net: nn.Module, groups: int) -> nn.Module:
    """Turn every BatchNorm2d of `net` into a GroupedNorm, its weights and keys kept."""
    for name, child in net.named_children():
        if type(child) is nn.BatchNorm2d:
            grouped = GroupedNorm(child.num_features, child.eps)
            grouped.load_state_dict(child.state_dict())
            grouped.groups = groups
            setattr(net, name, grouped)
        else:
            norm_in_groups(child, groups)
    return net
