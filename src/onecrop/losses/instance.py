"""Instance discrimination over a bank of all images: cross-entropy and SqrtKL.

    N   rows of the bank, w_k          c   cosines w_k·z, [B, N]
    B   images of the batch, z_i       s   c / T, cross-entropy logits       p   softmax(s)
    i   an image's own row             q   c / T_kl, logits of the KL term   π   softmax(q)

    CE      = lse(s) − s_i                                       under CutMix: lse(s) − μ·s_a − (1 − μ)·s_b
    SqrtKL  = KL(π ‖ u),  u = softmax(q/2) ∝ √π, held constant:  ½E − lse(q) + lse(q/2),  E = Σ π_k q_k
    L1, L2  = Σ π log π,  −Σ π log u                             their sum is SqrtKL
    relation  r = softmax over k ≠ i of w_i·w_k / T_rel, a soft target from the bank itself: y becomes (1 − a)·y + a·r
    ∂CE/∂s_k = p_k − y_k        ∂SqrtKL/∂q_k = ½·π_k(q_k − E)    ∂L1 = 2·∂SqrtKL,  ∂L2 = −∂SqrtKL

The closed forms above are values only: differentiating them would send a gradient through u, which is a constant.
The rows need no gradient, so loss and dz are sums over the rows: a bank too large for one block of cosines is read
twice, block by block, and nothing of size B×N is ever held. For the same reason the rows may lie on several processes:
each reads its own ones for all images, the statistics of all are put together, and each adds its part of dz.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onecrop.device import triton_works
from onecrop.distributed import ALONE, Group
from onecrop.losses import plain

KL = Literal["sqrt", "l1", "l2", "none"]
# ∂/∂q of each variant, as a multiple of π(q − E)
KL_SLOPE: dict[str, float] = {"sqrt": 0.5, "l1": 1.0, "l2": -0.5, "none": 0.0}
# Cosines held at a time (64 MiB in float32). Up to DENSE in all they are computed once and kept; beyond that they are
# recomputed block by block. On a CPU a block is what its caches hold: its numbers are gone through a dozen times.
DENSE_ELEMENTS = 2**26
BLOCK_ELEMENTS = 2**24
CACHED_ELEMENTS = 2**18


class Relation(NamedTuple):
    weight: Tensor | float  # [] a, the share of the soft target
    temperature: float  # T_rel, at least .02


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
    relation: Relation | None = None,  # neighbours of the image's own row as part of the target
    group: Group = ALONE,  # of several processes each has some of the rows; targets elsewhere are −1
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
        own = group.fetch(rows, target).to(z.dtype)  # [B, D]
        weight = mix.to(z.dtype).expand(len(z)) if isinstance(mix, Tensor) else z.new_full((len(z),), mix)
        other = own if mixed_target is target else group.fetch(rows, mixed_target).to(z.dtype)
        mixture = torch.lerp(other, own, weight[:, None])
        if relation is not None:
            share = torch.as_tensor(relation.weight, dtype=z.dtype, device=z.device)
            neighbours = related(rows, target, relation.temperature, mask, z.dtype, group)
            mixture = torch.lerp(mixture, neighbours, share)
        normalisers, hit, dz = _read(constant, rows, target, mask, temperature, kl_temperature, kl, kl_weight, group)
        lse_s, lse_q, lse_half, mean_q = normalisers
        # dz[0]: Σ_k p_k·w_k / T, to which the targets are added; dz[1], where apart: that of the KL term
        dz[0].sub_(mixture, alpha=1 / temperature)
        dz = [part / len(z) for part in dz]
        cross_entropy = (lse_s - (constant * mixture).sum(-1) / temperature).mean()
        l1, l2 = mean_q - lse_q, lse_half - mean_q / 2
        kl_value = {"sqrt": l1 + l2, "l1": l1, "l2": l2, "none": torch.zeros_like(l1)}[kl].mean()
        accuracy = hit.to(z.dtype).mean()
        batch_probabilities = (constant @ own.T / temperature - lse_s[:, None]).exp()  # [B, B]
        if mask is not None:
            batch_probabilities = batch_probabilities.masked_fill(mask[..., target], 0)
    # The value, with the gradient dz attached: z − z is zero, its derivative is not.
    cross_entropy = cross_entropy + ((z - constant) * dz[0]).sum()
    if len(dz) == 2:
        kl_value = kl_value + ((z - constant) * dz[1]).sum()
    return InstanceLoss(cross_entropy, kl_value, accuracy, batch_probabilities)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # on a GPU its kernels are already fused; a compiler would only unroll the blocks
def _read(
    z: Tensor,
    rows: Tensor,
    target: Tensor,
    mask: Tensor | None,
    t: float,
    t_kl: float,
    kl: str,
    kl_weight: float | None,
    group: Group,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor, list[Tensor]]:
    """-> (lse(s), lse(q), lse(q/2), E); is the own row the nearest; Σ_k (∂/∂c_k)·w_k of both terms, or of each."""
    if z.is_cuda and triton_works() and mask is None and (kl == "none" or kl_weight is not None):
        from onecrop.losses import sweep

        if sweep.takes(rows.shape[1], rows.dtype, t, t_kl) and len(rows):
            operand = z.to(rows.dtype)
            best, sums = sweep.statistics(operand, rows, target, t, t_kl)
            cosine = (operand.float() * rows[target].float()).sum(-1)
            one, hit = torch.ones_like(best), cosine > best
            if group.size > 1:
                best = torch.maximum(best, cosine)
            one, sums, hit = _put_together(one, sums, best, hit, target, t, t_kl, group)
            normalisers = plain.normalisers(one, sums, t, t_kl)
            factor = KL_SLOPE[kl] / t_kl * (kl_weight or 0.0)
            return normalisers, hit, [group.sum(sweep.gradient(operand, rows, normalisers, t, t_kl, factor))]
    if z.is_cuda and triton_works() and z.dtype == torch.float32:
        from onecrop.losses.kernels import add_statistics, slopes
    else:
        add_statistics, slopes = plain.add_statistics, plain.slopes
    blocks = _blocks(len(z), len(rows), z.device)
    kept: list[Tensor] | None = [] if len(z) * len(rows) <= DENSE_ELEMENTS else None

    operand = z.to(rows.dtype)

    def cosines(block: slice) -> Tensor:
        c = _product(operand, rows[block].T, z.dtype)
        return c if mask is None else c.masked_fill(mask[..., block], plain.LEFT_OUT)

    best, sums = z.new_full((len(z),), plain.LEFT_OUT), z.new_zeros(4, len(z))
    nearest = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    for block in blocks:
        c = cosines(block)
        add_statistics(c, block.start, best, nearest, sums, t, t_kl)
        if kept is not None:
            kept.append(c)
    best, sums, hit = _put_together(best, sums, best, nearest == target, target, t, t_kl, group)
    normalisers = plain.normalisers(best, sums, t, t_kl)
    slope = None if kl == "none" else KL_SLOPE[kl]
    dz: list[Tensor] = []
    for number, block in enumerate(blocks):
        c = cosines(block) if kept is None else kept[number]
        parts = slopes(c, normalisers, t, t_kl, slope, kl_weight, rows.dtype)
        parts = [_product(part, rows[block], z.dtype) for part in parts]
        dz = [total.add_(part) for total, part in zip(dz, parts, strict=True)] if dz else parts
    if not dz:  # a process without rows
        dz = [torch.zeros_like(z) for _ in range(2 if slope is not None and kl_weight is None else 1)]
    return normalisers, hit, [group.sum(part) for part in dz]


def _put_together(
    reference: Tensor,
    sums: Tensor,
    best: Tensor,
    hit: Tensor,
    target: Tensor,
    t: float,
    t_kl: float,
    group: Group,
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of all processes' rows from those of each -> reference [B], sums [4, B] relative to it, hit [B].

    best, hit: the highest cosine among the rows of this process, and whether it is the own row's.
    """
    if group.size == 1:
        return reference, sums, hit
    mine = [reference[None], sums, best[None], (hit & (target >= 0)).to(sums.dtype)[None]]
    parts = group.stack(torch.cat(mine))  # [size, 7, B]
    reference = parts[:, 0].amax(0)
    shift = parts[:, 0] - reference  # [size, B]
    scale = torch.stack([(shift / t).exp(), (shift / t_kl).exp(), (shift / (2 * t_kl)).exp(), (shift / t_kl).exp()], 1)
    parts[:, 4] += parts[:, 2] * shift
    winner = parts[:, 5].argmax(0, keepdim=True)  # the first of equals, which holds the lower rows
    return reference, (parts[:, 1:5] * scale).sum(0), parts[:, 6].gather(0, winner)[0] > 0


def loss_bytes(batch: int, num_rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Memory of the loss beside the bank: cosines in float32 and their slopes, none where kernels sweep."""
    if device.type == "cuda" and triton_works():
        from onecrop.losses import sweep

        if sweep.takes(dim, dtype, 1.0):
            return 0
    block = _blocks(batch, num_rows, device)[0]
    width = block.stop - block.start
    kept = num_rows if batch * num_rows <= DENSE_ELEMENTS else width
    return batch * (4 * kept + dtype.itemsize * width)


def _blocks(batch: int, num_rows: int, device: torch.device) -> list[slice]:
    """The bank in blocks of rows: on a GPU one, where all cosines may be held at a time."""
    if not num_rows:
        return []
    if device.type == "cpu":
        width = max(1, CACHED_ELEMENTS // batch)
    else:
        width = num_rows if batch * num_rows <= DENSE_ELEMENTS else max(1, BLOCK_ELEMENTS // batch)
    return [slice(start, min(start + width, num_rows)) for start in range(0, num_rows, width)]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
@torch.no_grad()
def related(
    rows: Tensor, target: Tensor, t: float, mask: Tensor | None, dtype: torch.dtype, group: Group = ALONE
) -> Tensor:
    """Σ_k r_k·w_k with r = softmax over k ≠ i of w_i·w_k / T_rel: the neighbours of each own row -> [B, D] in `dtype`.

    Cosines of unit rows are at most 1: exponentials relative to that add up from block to block.
    """
    own = group.fetch(rows, target)
    if own.is_cuda and triton_works() and mask is None:
        from onecrop.losses import sweep

        if sweep.takes(rows.shape[1], rows.dtype, t) and len(rows):
            out, total = sweep.neighbours(own, rows, target, t)
            return (group.sum(out) / group.sum(total)[:, None]).to(dtype)
    total, out = torch.zeros(len(own), dtype=dtype, device=own.device), torch.zeros_like(own, dtype=dtype)
    for block in _blocks(len(own), len(rows), own.device):
        c = _product(own, rows[block].T, dtype)
        place = torch.arange(block.start, block.stop, device=own.device)
        left_out = place == target[:, None]
        if mask is not None:
            left_out = left_out | mask[..., block]
        e = c.sub_(1).div_(t).exp_().masked_fill_(left_out, 0)
        total += e.sum(-1)
        out += _product(e, rows[block], dtype)
    return group.sum(out) / group.sum(total)[:, None]


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with operands in b's format, returned in `dtype`; on a GPU summed in it as well."""
    if a.is_cuda and b.dtype != dtype:
        return torch.mm(a.to(b.dtype), b, out_dtype=dtype)
    return (a.to(b.dtype) @ b).to(dtype)
