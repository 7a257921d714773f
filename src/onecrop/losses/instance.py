"""Instance discrimination over a bank of all images: cross-entropy and SqrtKL.

    N   rows of the bank, w_k          c   cosines w_k·z, [B, N]
    B   images of the batch, z_i       s   c / T, cross-entropy logits       p   softmax(s)
    i   an image's own row             q   c / T_kl, logits of the KL term   π   softmax(q)

    CE      = lse(s) − s_i                                       under CutMix: lse(s) − μ·s_a − (1 − μ)·s_b
    SqrtKL  = KL(π ‖ u),  u = softmax(q/2) ∝ √π, held constant:  ½E − lse(q) + lse(q/2),  E = Σ π_k q_k
    L1, L2  = Σ π log π,  −Σ π log u                             their sum is SqrtKL
    ∂CE/∂s_k = p_k − y_k        ∂SqrtKL/∂q_k = ½·π_k(q_k − E)    ∂L1 = 2·∂SqrtKL,  ∂L2 = −∂SqrtKL

The closed forms above are values only: differentiating them would send a gradient through u, which is a constant.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

KL = Literal["sqrt", "l1", "l2", "none"]
# ∂/∂q of each variant, as a multiple of π(q − E)
KL_SLOPE: dict[str, float] = {"sqrt": 0.5, "l1": 1.0, "l2": -0.5, "none": 0.0}
# Cosines held at a time: one [B, rows] block of this many elements (128 MiB in float32); a bank that fits is one block.
BLOCK_ELEMENTS = 2**25


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
    mixed_target: Tensor | None = None,  # [B] row of the image that was pasted in
    mix: Tensor | float = 1.0,  # [] or [B] weight of `target` against `mixed_target`
    mask: Tensor | None = None,  # bool [N] or [B, N]: rows left out (duplicates); never an image's own
) -> InstanceLoss:
    """Both losses over all rows. Works out dz in its forward pass and keeps only that, so that the rows may be written
    before `backward`. A bank too large for one block is read twice, block by block; nothing of size B×N is held."""
    if kl not in KL_SLOPE:
        raise ValueError(f"kl must be one of {', '.join(KL_SLOPE)}, not {kl!r}")
    mix = mix.to(z.dtype).expand(len(z)) if isinstance(mix, Tensor) else z.new_full((len(z),), mix)
    mixed_target = target if mixed_target is None else mixed_target
    out = _InstanceLoss.apply(z, rows, target, mixed_target, mix, mask, temperature, kl_temperature, kl)
    return InstanceLoss(*cast(tuple[Tensor, Tensor, Tensor, Tensor], out))


def _blocks(z: Tensor, rows: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """(cosines [B, n], rows [n, D], mask) for consecutive blocks of the bank."""
    width = max(1, BLOCK_ELEMENTS // len(z))
    for start in range(0, len(rows), width):
        block = rows[start : start + width]
        cosines = (z.to(rows.dtype) @ block.T).to(z.dtype)
        yield cosines, block, None if mask is None else mask[..., start : start + width]


class _InstanceLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx,
        z: Tensor,
        rows: Tensor,
        target: Tensor,
        mixed_target: Tensor,
        mix: Tensor,
        mask: Tensor | None,
        temperature: float,
        kl_temperature: float,
        kl: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with_kl = kl != "none"
        blocks = list(_blocks(z, rows, mask)) if z.shape[0] * len(rows) <= BLOCK_ELEMENTS else None
        # −inf would turn into nan where a whole block is left out
        lowest = z.new_full((len(z),), torch.finfo(z.dtype).min)
        lse_s = lse_q = lse_half = best = lowest
        mean_q = torch.zeros_like(lowest)  # E over the rows read so far
        best_row = torch.zeros_like(target)

        # First reading: the normalisers, E and the nearest row.
        start = 0
        for c, _, left_out in blocks or _blocks(z, rows, mask):
            c = c if left_out is None else c.masked_fill(left_out, -torch.inf)
            lse_s = torch.logaddexp(lse_s, (c / temperature).logsumexp(-1))
            highest, where = c.max(-1)
            best_row = torch.where(highest > best, where + start, best_row)
            best = torch.maximum(best, highest)
            start += c.shape[1]
            if with_kl:
                q = c / kl_temperature
                lse_block = torch.maximum(q.logsumexp(-1), lowest)
                pi = (q - lse_block[:, None]).exp()
                mean_block = (pi * q.masked_fill(pi == 0, 0)).sum(-1)
                lse_new = torch.logaddexp(lse_q, lse_block)
                share = (lse_block - lse_new).exp()
                mean_q = torch.lerp(mean_q, mean_block, share)
                lse_q = lse_new
                lse_half = torch.logaddexp(lse_half, (q / 2).logsumexp(-1))

        # Second reading: dz = Σ_k (∂/∂c_k)·w_k for both terms.
        dz_ce, dz_kl = torch.zeros_like(z), torch.zeros_like(z)
        for c, block, left_out in blocks or _blocks(z, rows, mask):
            c = c if left_out is None else c.masked_fill(left_out, -torch.inf)
            p = (c / temperature - lse_s[:, None]).exp()
            dz_ce += (p.to(rows.dtype) @ block).to(z.dtype)
            if with_kl:
                q = c / kl_temperature
                pi = (q - lse_q[:, None]).exp()
                slope = pi * (q - mean_q[:, None]).masked_fill(pi == 0, 0)
                dz_kl += (slope.to(rows.dtype) @ block).to(z.dtype)
        own, mixed_in = rows[target].to(z.dtype), rows[mixed_target].to(z.dtype)  # [B, D]
        mixture = torch.lerp(mixed_in, own, mix[:, None])
        dz_ce = (dz_ce - mixture) / (temperature * len(z))
        dz_kl *= KL_SLOPE[kl] / (kl_temperature * len(z))
        ctx.save_for_backward(dz_ce, dz_kl)

        cross_entropy = (lse_s - (z * mixture).sum(-1) / temperature).mean()
        l1, l2 = mean_q - lse_q, lse_half - mean_q / 2
        value = {"sqrt": l1 + l2, "l1": l1, "l2": l2}[kl].mean() if with_kl else z.new_zeros(())
        accuracy = (best_row == target).to(z.dtype).mean()
        batch_probabilities = (z @ own.T / temperature - lse_s[:, None]).exp()  # [B, B]
        if mask is not None:
            batch_probabilities = batch_probabilities.masked_fill(mask[..., target], 0)
        ctx.mark_non_differentiable(accuracy, batch_probabilities)
        return cross_entropy, value, accuracy, batch_probabilities

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dz_ce, dz_kl = ctx.saved_tensors  # type: ignore[attr-defined]
        return (grads[0] * dz_ce + grads[1] * dz_kl, *[None] * 8)
