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
    ratio = _whole_ratio(t, t_kl)
    sums[0] += (_power(e, ratio) if ratio else (below / t).exp_()).sum(-1)
    sums[3] += below.mul_(e).sum(-1)
    best.copy_(new)


def _whole_ratio(t: float, t_kl: float) -> int:
    """n = t_kl/t where that is a whole number, 5 by default: e^s is e^q to the n, cheaper than another exp; else 0."""
    ratio = round(t_kl / t)
    return ratio if 1 < ratio <= MOST_PRODUCTS and math.isclose(ratio * t, t_kl) else 0


def _power(e: Tensor, exponent: int) -> Tensor:
    """e^exponent for 2 and more, by squares and products."""
    out = e.square()
    for digit in f"{exponent:b}"[1:-1]:
        if digit == "1":
            out.mul_(e)
        out.square_()
    return out.mul_(e) if exponent % 2 else out


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
    q, ratio = c / t_kl, _whole_ratio(t, t_kl)
    reference = lse_s / ratio if ratio else lse_q  # so that e to the n is p itself: neither overflows
    e = (q - reference).exp_()
    ce = _power(e, ratio).div_(t) if ratio else (c / t).sub_(lse_s + math.log(t)).exp_()
    kl = q.sub_(mean_q).mul_(e)
    factor = slope / t_kl * (reference - lse_q).exp()
    if kl_weight is None:
        return [ce.to(dtype), kl.mul_(factor).to(dtype)]
    return [ce.addcmul_(kl, kl_weight * factor).to(dtype)]
