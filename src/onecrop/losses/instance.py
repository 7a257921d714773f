"""Instance discrimination over a bank of all images: cross-entropy and SqrtKL.

    N   rows of the bank, w_k          c   cosines w_k·z, [B, N]
    B   images of the batch, z_i       s   c / T, cross-entropy logits       p   softmax(s)
    i   an image's own row             q   c / T_kl, logits of the KL term   π   softmax(q)

    CE      = lse(s) − s_i                                       under CutMix: lse(s) − μ·s_a − (1 − μ)·s_b
    SqrtKL  = KL(π ‖ u),  u = softmax(q/2) ∝ √π, held constant:  ½E − lse(q) + lse(q/2),  E = Σ π_k q_k
    L1, L2  = Σ π log π,  −Σ π log u                             their sum is SqrtKL
    ∂CE/∂s_k = p_k − y_k        ∂SqrtKL/∂q_k = ½·π_k(q_k − E)    ∂L1 = 2·∂SqrtKL,  ∂L2 = −∂SqrtKL

The closed forms above are values only: differentiating them would send a gradient through u, which is a constant.
The rows need no gradient, so loss and dz are sums over the rows: a bank too large for one block of cosines is read
twice, block by block, and nothing of size B×N is ever held.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KL = Literal["sqrt", "l1", "l2", "none"]
# ∂/∂q of each variant, as a multiple of π(q − E)
KL_SLOPE: dict[str, float] = {"sqrt": 0.5, "l1": 1.0, "l2": -0.5, "none": 0.0}
# Cosines held at a time. Up to DENSE in all they are computed once and kept; beyond that they are recomputed in blocks
# of BLOCK, small enough to stay in a GPU's cache between the products.
DENSE_ELEMENTS = 2**26
BLOCK_ELEMENTS = 2**23
# The cosine of a row that is left out: its exponential is 0, and no difference of two turns into nan as with −inf.
LEFT_OUT = -1e30


class InstanceLoss(NamedTuple):
    cross_entropy: Tensor  # [] mean over the batch, differentiable in z
    sqrt_kl: Tensor  # [] mean over the batch, differentiable in z, unweighted
    accuracy: Tensor  # [] share of images whose own row is the nearest one
    batch_probabilities: Tensor  # [B, B] constant; [j, i]: p that image j gives to the row of image i


def sqrt_kl(logits: Tensor, u: Tensor | None = None) -> Tensor:
    """KL(π ‖ u) for π = softmax(logits), per row -> [B]. u ∝ √π is a constant; pass it in to keep it fixed."""
    log_p = F.log_softmax(logits, dim=-1)
    log_u = F.log_softmax(logits / 2, dim=-1).detach() if u is None else u.log()
    return (log_p.exp() * (log_p - log_u)).sum(-1)


def instance_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """−log softmax(logits)[target], per row -> [B]."""
    return F.cross_entropy(logits, target, reduction="none")


def instance_loss(
    z: Tensor,  # [B, D]
    rows: Tensor,  # [N, D] constant
    target: Tensor,  # [B] each image's own row
    *,
    temperature: float,
    kl_temperature: float,
    kl: KL = "sqrt",
    kl_weight: float | None = None,
    mixed_target: Tensor | None = None,  # [B] row of the image that was pasted in
    mix: Tensor | float = 1.0,  # [] or [B] weight of `target` against `mixed_target`
    mask: Tensor | None = None,  # bool [N] or [B, N]: rows left out (duplicates); never an image's own
) -> InstanceLoss:
    """Both losses over all rows. Works out dz in its forward pass and keeps only that, so that the rows may be written
    before `backward`.

    kl_weight saves a matrix product: where λ is known beforehand, the gradient of cross_entropy + λ·sqrt_kl is worked
    out as one, and only that sum of the two results has a meaningful gradient.
    """
    if kl not in KL_SLOPE:
        raise ValueError(f"kl must be one of {', '.join(KL_SLOPE)}, not {kl!r}")
    constant = z.detach()
    mixed_target = target if mixed_target is None else mixed_target
    with torch.no_grad():
        own = rows[target].to(z.dtype)  # [B, D]
        weight = mix.to(z.dtype).expand(len(z)) if isinstance(mix, Tensor) else z.new_full((len(z),), mix)
        mixture = torch.lerp(rows[mixed_target].to(z.dtype), own, weight[:, None])
        read = _read_dense if len(z) * len(rows) <= DENSE_ELEMENTS else _read_in_blocks
        lse_s, lse_q, lse_half, mean_q, nearest, dz = read(
            constant, rows, mask, temperature, kl_temperature, kl, kl_weight
        )
        # dz[0]: Σ_k p_k·w_k / T, to which the targets are added; dz[1], where apart: that of the KL term
        dz[0].sub_(mixture, alpha=1 / temperature)
        dz = [part / len(z) for part in dz]
        cross_entropy = (lse_s - (constant * mixture).sum(-1) / temperature).mean()
        l1, l2 = mean_q - lse_q, lse_half - mean_q / 2
        kl_value = {"sqrt": l1 + l2, "l1": l1, "l2": l2, "none": torch.zeros_like(l1)}[kl].mean()
        accuracy = (nearest == target).to(z.dtype).mean()
        batch_probabilities = (constant @ own.T / temperature - lse_s[:, None]).exp()  # [B, B]
        if mask is not None:
            batch_probabilities = batch_probabilities.masked_fill(mask[..., target], 0)
    # The value, with the gradient dz attached: z − z is zero, its derivative is not.
    cross_entropy = cross_entropy + ((z - constant) * dz[0]).sum()
    if len(dz) == 2:
        kl_value = kl_value + ((z - constant) * dz[1]).sum()
    return InstanceLoss(cross_entropy, kl_value, accuracy, batch_probabilities)


Reading = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]  # lse_s, lse_q, lse_half, E, nearest row, [dz, …]


def _read_dense(
    z: Tensor, rows: Tensor, mask: Tensor | None, t: float, t_kl: float, kl: str, kl_weight: float | None
) -> Reading:
    c = _cosines(z, rows, mask)
    best, nearest, sums = _statistics(c, t, t_kl)
    lse_s, lse_q, lse_half, mean_q = _normalisers(best, sums, t, t_kl)
    slopes = _slopes(c, lse_s, lse_q, mean_q, t, t_kl, kl, kl_weight)
    return lse_s, lse_q, lse_half, mean_q, nearest, [_product(slope, rows, z.dtype) for slope in slopes]


def _read_in_blocks(
    z: Tensor, rows: Tensor, mask: Tensor | None, t: float, t_kl: float, kl: str, kl_weight: float | None
) -> Reading:
    width = max(1, BLOCK_ELEMENTS // len(z))
    blocks = [slice(start, min(start + width, len(rows))) for start in range(0, len(rows), width)]
    masks = [None if mask is None else mask[..., block] for block in blocks]
    best = z.new_full((len(z),), LEFT_OUT)
    sums = z.new_zeros(4, len(z))
    nearest = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    for block, left_out in zip(blocks, masks, strict=True):
        best_here, nearest_here, sums_here = _statistics(_cosines(z, rows[block], left_out), t, t_kl)
        nearest = torch.where(best_here > best, nearest_here + block.start, nearest)
        new = torch.maximum(best, best_here)
        sums = _rebase(sums, best - new, t, t_kl) + _rebase(sums_here, best_here - new, t, t_kl)
        best = new
    lse_s, lse_q, lse_half, mean_q = _normalisers(best, sums, t, t_kl)
    dz: list[Tensor] = []
    for block, left_out in zip(blocks, masks, strict=True):
        slopes = _slopes(_cosines(z, rows[block], left_out), lse_s, lse_q, mean_q, t, t_kl, kl, kl_weight)
        parts = [_product(slope, rows[block], z.dtype) for slope in slopes]
        dz = [total.add_(part) for total, part in zip(dz, parts, strict=True)] if dz else parts
    return lse_s, lse_q, lse_half, mean_q, nearest, dz


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with operands in b's format, summed and returned in `dtype`."""
    if a.is_cuda and b.dtype != dtype:
        return torch.mm(a.to(b.dtype), b, out_dtype=dtype)
    return (a.to(b.dtype) @ b).to(dtype)


def _cosines(z: Tensor, rows: Tensor, left_out: Tensor | None) -> Tensor:
    c = _product(z, rows.T, z.dtype)
    return c if left_out is None else c.masked_fill(left_out, LEFT_OUT)


def _statistics(c: Tensor, t: float, t_kl: float) -> tuple[Tensor, Tensor, Tensor]:
    """-> highest cosine h [B], where it stands [B], and Σe^s, Σe^q, Σe^(q/2), Σ(c − h)·e^q relative to h [4, B]."""
    best, nearest = c.max(-1)
    below = c - best[:, None]
    e_q = (below / t_kl).exp()
    weighted = (below * e_q).sum(-1)  # 0 where left out: the exponential is
    return (
        best,
        nearest,
        torch.stack([(below / t).exp().sum(-1), e_q.sum(-1), (below / (2 * t_kl)).exp().sum(-1), weighted]),
    )


def _rebase(sums: Tensor, shift: Tensor, t: float, t_kl: float) -> Tensor:
    """The same sums relative to another highest cosine, higher by −shift."""
    factors = torch.stack([(shift / t).exp(), (shift / t_kl).exp(), (shift / (2 * t_kl)).exp(), (shift / t_kl).exp()])
    moved = sums * factors
    moved[3] += moved[1] * shift
    return moved


def _normalisers(best: Tensor, sums: Tensor, t: float, t_kl: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> lse(s), lse(q), lse(q/2), E, each [B]."""
    mean_q = (best + sums[3] / sums[1]) / t_kl
    return sums[0].log() + best / t, sums[1].log() + best / t_kl, sums[2].log() + best / (2 * t_kl), mean_q


def _slopes(
    c: Tensor, lse_s: Tensor, lse_q: Tensor, mean_q: Tensor, t: float, t_kl: float, kl: str, kl_weight: float | None
) -> list[Tensor]:
    """∂/∂c of Σ_k p_k-part of the cross-entropy and of the KL term, as one where kl_weight is known -> [B, n] each."""
    ce = (c / t - lse_s[:, None]).exp() / t
    if kl == "none":
        return [ce]
    q = c / t_kl
    pi = (q - lse_q[:, None]).exp()
    slope = KL_SLOPE[kl] / t_kl * pi * (q - mean_q[:, None])
    return [ce, slope] if kl_weight is None else [ce + kl_weight * slope]
