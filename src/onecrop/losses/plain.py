"""The two passes over a block of cosines, in plain torch; on a GPU kernels.py does the same in one kernel each.

Symbols as in instance.py.
"""

import math

import torch
from torch import Tensor

# The cosine of a row that is left out: its exponential is 0, and no difference of two turns into nan as with −inf.
LEFT_OUT = -1e30
MOST_PRODUCTS = 16  # the highest power that is taken by products


def add_statistics(c: Tensor, first: int, best: Tensor, nearest: Tensor, sums: Tensor, t: float, t_kl: float) -> None:
    """Add a block of cosines [B, n], which begins at row `first` of the bank, to what was read before it.

    best: the highest cosine h so far [B]; nearest: its row [B]; sums [4, B]: Σe^s, Σe^q, Σe^(q/2), Σ(c − h)·e^q, all
    relative to h.
    """
    highest = c.amax(-1)
    if c.is_cuda:  # which must not be waited for
        nearest.copy_(torch.where(highest > best, c.argmax(-1) + first, nearest))
    else:
        higher = (highest > best).nonzero()[:, 0]
        nearest[higher] = c[higher].argmax(-1) + first
    new = torch.maximum(best, highest)
    shift, below = best - new, c - new[:, None]
    sums *= torch.stack([(shift / t).exp(), (shift / t_kl).exp(), (shift / (2 * t_kl)).exp(), (shift / t_kl).exp()])
    sums[3] += sums[1] * shift
    e = (below / (2 * t_kl)).exp_()
    sums[2] += e.sum(-1)
    e.square_()  # e^q
    sums[1] += e.sum(-1)
    sums[0] += _sharpened(e, below, t, t_kl).sum(-1)
    sums[3] += below.mul_(e).sum(-1)
    best.copy_(new)


def _sharpened(e_q: Tensor, c: Tensor, t: float, t_kl: float) -> Tensor:
    """e^(c/t), given e^(c/t_kl): where t_kl/t is a whole number, 5 by default, a power of it, cheaper than an exp."""
    power = round(t_kl / t)
    if not (1 < power <= MOST_PRODUCTS and math.isclose(power * t, t_kl)):
        return (c / t).exp_()
    out = e_q.square()
    for digit in f"{power:b}"[1:-1]:
        if digit == "1":
            out.mul_(e_q)
        out.square_()
    return out.mul_(e_q) if power % 2 else out


def normalisers(best: Tensor, sums: Tensor, t: float, t_kl: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> lse(s), lse(q), lse(q/2), E, each [B]."""
    mean_q = (best + sums[3] / sums[1]) / t_kl
    return sums[0].log() + best / t, sums[1].log() + best / t_kl, sums[2].log() + best / (2 * t_kl), mean_q


def slopes(
    c: Tensor,
    normalisers: tuple[Tensor, Tensor, Tensor, Tensor],
    t: float,
    t_kl: float,
    slope: float | None,
    kl_weight: float | None,
    dtype: torch.dtype,
) -> list[Tensor]:
    """∂/∂c of Σp-part of the cross-entropy and of the KL term, as one where kl_weight is known -> [B, n] each."""
    lse_s, lse_q, _, mean_q = (x[:, None] for x in normalisers)
    if slope is None:
        return [(c / t).sub_(lse_s + math.log(t)).exp_().to(dtype)]
    below = c - 1  # so that nothing overflows, nor vanishes
    e = (below / t_kl).exp_()
    ce = _sharpened(e, below, t, t_kl).mul_((1 / t - lse_s).exp() / t)
    kl = below.add_(1 - t_kl * mean_q).mul_(e)  # t_kl·(q − E)·e^(q − 1/t_kl)
    factor = slope / t_kl**2 * (1 / t_kl - lse_q).exp()
    if kl_weight is None:
        return [ce.to(dtype), kl.mul_(factor).to(dtype)]
    return [ce.addcmul_(kl, kl_weight * factor).to(dtype)]
