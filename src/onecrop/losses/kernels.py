"""The element-wise work of the instance loss on a GPU: one kernel a reading, fused by hand (Triton).

The symbols are those of `instance.py`. c arrives in float32 from the matrix product; the slopes leave in the bank's
format for the next one.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

COLUMNS = 4096  # columns a program takes at a time
# A product and its sum as one instruction: Triton 3.9 warns where nobody asks for it, and later ones will not do it.
FUSED = {"enable_fp_fusion": True}


@triton.jit  # type: ignore[untyped-decorator]
def _statistics_kernel(  # type: ignore[no-untyped-def]
    c_ptr, best_ptr, nearest_ptr, sums_ptr, rows, columns, first, inv_t, inv_t_kl, COLUMNS: tl.constexpr
):
    """One program an image: a running maximum and four sums relative to it, carried from block to block."""
    row = tl.program_id(0)
    c_row = c_ptr + row.to(tl.int64) * columns
    best = tl.load(best_ptr + row)
    nearest = tl.load(nearest_ptr + row)
    sum_s = tl.load(sums_ptr + row)
    sum_q = tl.load(sums_ptr + rows + row)
    sum_half = tl.load(sums_ptr + 2 * rows + row)
    weighted = tl.load(sums_ptr + 3 * rows + row)
    for start in range(0, columns, COLUMNS):
        offset = start + tl.arange(0, COLUMNS)
        inside = offset < columns
        c = tl.load(c_row + offset, mask=inside, other=-1e30)
        highest, where = tl.max(c, axis=0, return_indices=True)
        new = tl.maximum(best, highest)
        nearest = tl.where(highest > best, (first + start + where).to(tl.int64), nearest)
        shift = best - new
        below = c - new
        e_half = tl.exp(below * (0.5 * inv_t_kl))
        e_q = e_half * e_half
        old_q = sum_q * tl.exp(shift * inv_t_kl)
        weighted = weighted * tl.exp(shift * inv_t_kl) + old_q * shift + tl.sum(below * e_q, axis=0)
        sum_q = old_q + tl.sum(e_q, axis=0)
        sum_half = sum_half * tl.exp(shift * 0.5 * inv_t_kl) + tl.sum(e_half, axis=0)
        sum_s = sum_s * tl.exp(shift * inv_t) + tl.sum(tl.exp(below * inv_t), axis=0)
        best = new
    tl.store(best_ptr + row, best)
    tl.store(nearest_ptr + row, nearest)
    tl.store(sums_ptr + row, sum_s)
    tl.store(sums_ptr + rows + row, sum_q)
    tl.store(sums_ptr + 2 * rows + row, sum_half)
    tl.store(sums_ptr + 3 * rows + row, weighted)


def add_statistics(c: Tensor, first: int, best: Tensor, nearest: Tensor, sums: Tensor, t: float, t_kl: float) -> None:
    """Add a block of cosines [B, n], which begins at row `first` of the bank, to best, nearest [B] and sums [4, B]."""
    rows, columns = c.shape
    _statistics_kernel[(rows,)](
        c, best, nearest, sums, rows, columns, first, 1 / t, 1 / t_kl, COLUMNS, num_warps=8, **FUSED
    )


@triton.jit  # type: ignore[untyped-decorator]
def _slopes_kernel(  # type: ignore[no-untyped-def]
    c_ptr,
    ce_ptr,
    kl_ptr,
    lse_s_ptr,
    lse_q_ptr,
    mean_q_ptr,
    columns,
    inv_t,
    inv_t_kl,
    kl_factor,
    WITH_KL: tl.constexpr,
    APART: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    offset = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = offset < columns
    place = row.to(tl.int64) * columns + offset
    c = tl.load(c_ptr + place, mask=inside, other=-1e30)
    ce = tl.exp(c * inv_t - tl.load(lse_s_ptr + row)) * inv_t
    if WITH_KL:
        q = c * inv_t_kl
        kl = kl_factor * tl.exp(q - tl.load(lse_q_ptr + row)) * (q - tl.load(mean_q_ptr + row))
        if APART:
            tl.store(kl_ptr + place, kl.to(kl_ptr.dtype.element_ty), mask=inside)
        else:
            ce += kl
    tl.store(ce_ptr + place, ce.to(ce_ptr.dtype.element_ty), mask=inside)


def slopes(
    c: Tensor,
    normalisers: tuple[Tensor, Tensor, Tensor, Tensor],
    t: float,
    t_kl: float,
    slope: float | None,
    kl_weight: float | None,
    dtype: torch.dtype,
) -> list[Tensor]:
    """∂/∂c of both terms, as one where kl_weight is known -> [B, n] each, in `dtype`."""
    lse_s, lse_q, _, mean_q = normalisers
    rows, columns = c.shape
    apart = slope is not None and kl_weight is None
    ce = torch.empty_like(c, dtype=dtype)
    kl = torch.empty_like(c, dtype=dtype) if apart else ce
    factor = (slope or 0.0) / t_kl * (1.0 if kl_weight is None else kl_weight)
    grid = (rows, triton.cdiv(columns, COLUMNS))
    _slopes_kernel[grid](
        c, ce, kl, lse_s, lse_q, mean_q, columns, 1 / t, 1 / t_kl, factor, slope is not None, apart, COLUMNS,
        num_warps=8, **FUSED,
    )  # fmt: skip
    return [ce, kl] if apart else [ce]
