"""Projection heads."""

from torch import nn


def mlp(dim_in: int, hidden: int, dim_out: int) -> nn.Sequential:
    """Linear-BN-ReLU-Linear-BN-ReLU-Linear, as in the code released with the paper."""
    return nn.Sequential(
        nn.Linear(dim_in, hidden, bias=False),  # a bias before batch norm would have no effect
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, dim_out),
    )


def two_layers(dim_in: int, hidden: int, dim_out: int, norm: bool = False) -> nn.Sequential:
    """Linear-ReLU-Linear, with batch norm before the ReLU where `norm`."""
    between = [nn.BatchNorm1d(hidden)] if norm else []
    first = nn.Linear(dim_in, hidden, bias=not norm)
    return nn.Sequential(first, *between, nn.ReLU(inplace=True), nn.Linear(hidden, dim_out))
