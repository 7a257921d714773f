import pytest
import torch
from torch import nn

from onecrop.nets.norms import GroupedNorm, norm_in_groups


def net():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4)))
    for module in layers.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
    return layers.double()


@pytest.mark.parametrize(("size", "groups", "parts"), [(12, 3, 3), (12, 5, 4), (4, 8, 2), (7, 2, 1), (1, 2, 1)])
def test_each_group_is_normalised_by_itself(size, groups, parts):
    """As if each part went through the network alone; where the parts would be unequal or of one image, fewer."""
    plain, x = net(), torch.randn(size, 3, 6, 6, dtype=torch.float64)
    expected = torch.cat([plain(part) for part in x.chunk(parts)])
    grouped = norm_in_groups(net(), groups).double()
    assert sum(isinstance(m, GroupedNorm) for m in grouped.modules()) == 2
    torch.testing.assert_close(grouped(x), expected, rtol=1e-5, atol=1e-5)  # statistics are worked out in float32


class WithActivation(nn.BatchNorm2d):
    """As timm's: a batch norm that is more than one."""

    def forward(self, x):
        return super().forward(x).relu()


def test_norms_of_other_makes_see_groups_too():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), WithActivation(4)).double(), torch.randn(12, 3, 6, 6).double()
    parameters = list(net.parameters())
    expected = torch.cat([net(part) for part in x.chunk(4)])
    assert not torch.allclose(net(x), expected)
    grouped = norm_in_groups(net, 4)
    torch.testing.assert_close(grouped(x), expected, rtol=0, atol=0)
    assert all(a is b for a, b in zip(grouped.parameters(), parameters, strict=True))  # in order: averages follow them
    torch.testing.assert_close(grouped.eval()(x), torch.cat([grouped(part) for part in x.chunk(4)]))


def test_keys_and_evaluation_stay_those_of_batch_norm():
    plain, grouped = net(), norm_in_groups(net(), 2).double()
    assert plain.state_dict().keys() == grouped.state_dict().keys()
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(grouped.eval()(x), plain.eval()(x))
