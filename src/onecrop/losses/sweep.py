"""The instance loss over short rows (D ≤ 256) on a GPU: products and element-wise work in one kernel, no cosine stored.

At D = 256 a matrix product is an eighth of the work of D = 2048 while the exponentials stay, so writing the cosines and
reading them back would take most of the time. Each program holds a tile of the batch and walks over a part of the bank;
the parts are added up at the end. The symbols are those of `instance.py`.

Cosines of unit vectors are at most 1: exponentials are taken relative to that, so that sums of different parts of the
bank add up as they are. In float32 this holds down to LOWEST_TEMPERATURE, where e^(−2/T) would vanish.
"""

import math

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from onecrop.losses.kernels import FUSED

DIMS = (32, 64, 128, 256)
LOWEST_TEMPERATURE = 0.025
ROWS = 64  # of the bank at a time
LOG2_E = math.log2(math.e)
ROOM = 160 * 2**10  # bytes of shared memory that the large tiles of the longest rows need; a consumer's GPU has 100 kB


def takes(dim: int, dtype: torch.dtype, *temperatures: float) -> bool:
    return dtype == torch.bfloat16 and dim in DIMS and min(temperatures) >= LOWEST_TEMPERATURE


@triton.jit  # type: ignore[untyped-decorator]
def _tile(z_ptr, batch, BATCH: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """-> which images this program holds, and their features [BATCH, DIM]."""
    images = tl.program_id(0) * BATCH + tl.arange(0, BATCH)
    place = images[:, None] * DIM + tl.arange(0, DIM)[None, :]
    return images, tl.load(z_ptr + place, mask=images[:, None] < batch, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _rows(w_ptr, columns, end, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of the bank [ROWS, DIM], zeros beyond the end of the part."""
    place = columns.to(tl.int64)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    return tl.load(w_ptr + place, mask=(columns < end)[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _statistics_kernel(  # type: ignore[no-untyped-def]
    z_ptr, w_ptr, target_ptr, best_ptr, sums_ptr, batch, count, part, k_s, k_half,
    BATCH: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Of a part of the bank: the highest cosine beside the image's own, and Σe^s, Σe^q, Σe^(q/2), Σ(c − 1)·e^q."""
    images, z = _tile(z_ptr, batch, BATCH, DIM)
    target = tl.load(target_ptr + images, mask=images < batch, other=-1)
    first = tl.program_id(1) * part
    end = tl.minimum(first + part, count)
    best = tl.full([BATCH], -2.0, tl.float32)
    sum_s = tl.zeros([BATCH], tl.float32)
    sum_q = tl.zeros([BATCH], tl.float32)
    sum_half = tl.zeros([BATCH], tl.float32)
    weighted = tl.zeros([BATCH], tl.float32)
    for start in range(first, end, ROWS):
        columns = start + tl.arange(0, ROWS)
        c = tl.dot(z, tl.trans(_rows(w_ptr, columns, end, DIM)))
        inside = (columns < end)[None, :]
        below = tl.where(inside, c - 1.0, -1e30)
        other = tl.where(columns[None, :] == target[:, None], -1e30, below)
        best = tl.maximum(best, tl.max(other, axis=1) + 1.0)
        e_half = tl.exp2(below * k_half)
        e_q = e_half * e_half
        sum_s += tl.sum(tl.exp2(below * k_s), axis=1)
        sum_half += tl.sum(e_half, axis=1)
        sum_q += tl.sum(e_q, axis=1)
        weighted += tl.sum(tl.where(inside, below, 0.0) * e_q, axis=1)
    place = tl.program_id(1) * batch + images
    kept = images < batch
    step = tl.num_programs(1) * batch
    tl.store(best_ptr + place, best, mask=kept)
    tl.store(sums_ptr + place, sum_s, mask=kept)
    tl.store(sums_ptr + step + place, sum_q, mask=kept)
    tl.store(sums_ptr + 2 * step + place, sum_half, mask=kept)
    tl.store(sums_ptr + 3 * step + place, weighted, mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    z_ptr, w_ptr, lse_s_ptr, lse_q_ptr, mean_q_ptr, dz_ptr, batch, count, part, inv_t, inv_t_kl, kl_factor, log2_e,
    WITH_KL: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Of a part of the bank: Σ_k (∂/∂c_k)·w_k of both terms."""
    images, z = _tile(z_ptr, batch, BATCH, DIM)
    kept = images < batch
    lse_s = tl.load(lse_s_ptr + images, mask=kept, other=0.0)[:, None] * log2_e
    lse_q = tl.load(lse_q_ptr + images, mask=kept, other=0.0)[:, None] * log2_e
    mean_q = tl.load(mean_q_ptr + images, mask=kept, other=0.0)[:, None]
    first = tl.program_id(1) * part
    end = tl.minimum(first + part, count)
    dz = tl.zeros([BATCH, DIM], tl.float32)
    for start in range(first, end, ROWS):
        w = _rows(w_ptr, start + tl.arange(0, ROWS), end, DIM)
        c = tl.dot(z, tl.trans(w))
        slope = tl.exp2(c * (inv_t * log2_e) - lse_s) * inv_t
        if WITH_KL:
            q = c * inv_t_kl
            slope += kl_factor * tl.exp2(q * log2_e - lse_q) * (q - mean_q)
        dz = tl.dot(slope.to(w.dtype), w, dz)
    place = (tl.program_id(1) * batch + images)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(dz_ptr + place, dz, mask=kept[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _relation_kernel(  # type: ignore[no-untyped-def]
    own_ptr, w_ptr, target_ptr, total_ptr, out_ptr, batch, count, part, k,
    BATCH: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Of a part of the bank: Σ_k e_k and Σ_k e_k·w_k with e = exp((w_i·w_k − 1) / T_rel), the own row left out."""
    images, own = _tile(own_ptr, batch, BATCH, DIM)
    target = tl.load(target_ptr + images, mask=images < batch, other=-1)
    first = tl.program_id(1) * part
    end = tl.minimum(first + part, count)
    total = tl.zeros([BATCH], tl.float32)
    out = tl.zeros([BATCH, DIM], tl.float32)
    for start in range(first, end, ROWS):
        columns = start + tl.arange(0, ROWS)
        w = _rows(w_ptr, columns, end, DIM)
        below = tl.dot(own, tl.trans(w)) - 1.0
        left = (columns < end)[None, :] & (columns[None, :] != target[:, None])
        e = tl.where(left, tl.exp2(below * k), 0.0)
        total += tl.sum(e, axis=1)
        out = tl.dot(e.to(w.dtype), w, out)
    place = tl.program_id(1) * batch + images
    kept = images < batch
    tl.store(total_ptr + place, total, mask=kept)
    tl.store(out_ptr + place[:, None] * DIM + tl.arange(0, DIM)[None, :], out, mask=kept[:, None])


def _plan(z: Tensor, rows: Tensor) -> tuple[dict[str, int], tuple[int, int], int]:
    """-> tile sizes, grid (tiles of the batch, parts of the bank), rows in a part. The grid fills the device once."""
    units, room = _size(z.device)
    large = room >= ROOM or rows.shape[1] < DIMS[-1]
    tile = 128 if len(z) > 64 and large else 64
    tiles = triton.cdiv(len(z), tile)
    parts = max(1, min(units // tiles, triton.cdiv(len(rows), ROWS)))
    part = triton.cdiv(triton.cdiv(len(rows), parts), ROWS) * ROWS
    sizes = {
        "BATCH": tile,
        "ROWS": ROWS,
        "DIM": rows.shape[1],
        "num_warps": tile // 16,
        "num_stages": 3 if large else 2,
    }
    return {**sizes, **FUSED}, (tiles, triton.cdiv(len(rows), part)), part


def _size(device: torch.device) -> tuple[int, int]:
    """-> multiprocessors, bytes of shared memory of each."""
    if device.type != "cuda":
        return 4, ROOM
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_multiprocessor


def statistics(z: Tensor, rows: Tensor, target: Tensor, t: float, t_kl: float) -> tuple[Tensor, Tensor]:
    """-> the highest cosine beside the own one [B], and the sums [4, B] relative to a cosine of 1."""
    sizes, grid, part = _plan(z, rows)
    best = torch.empty(grid[1], len(z), device=z.device)
    sums = torch.empty(4, grid[1], len(z), device=z.device)
    _statistics_kernel[grid](
        z, rows, target, best, sums, len(z), len(rows), part, LOG2_E / t, LOG2_E / (2 * t_kl), **sizes
    )
    return best.amax(0), sums.sum(1)


def gradient(
    z: Tensor, rows: Tensor, normalisers: tuple[Tensor, Tensor, Tensor, Tensor], t: float, t_kl: float, kl_factor: float
) -> Tensor:
    """Σ_k (p_k/T + kl_factor·π_k(q_k − E))·w_k -> [B, D]."""
    lse_s, lse_q, _, mean_q = normalisers
    sizes, grid, part = _plan(z, rows)
    dz = torch.empty(grid[1], *z.shape, device=z.device)
    _gradient_kernel[grid](
        z, rows, lse_s, lse_q, mean_q, dz, len(z), len(rows), part, 1 / t, 1 / t_kl, kl_factor, LOG2_E,
        WITH_KL=kl_factor != 0, **sizes,
    )  # fmt: skip
    return dz.sum(0)


def neighbours(own: Tensor, rows: Tensor, target: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Σ_k e_k·w_k [B, D] and Σ_k e_k [B] over k ≠ i, with e = exp((w_i·w_k − 1) / T_rel)."""
    sizes, grid, part = _plan(own, rows)
    total = torch.empty(grid[1], len(own), device=own.device)
    out = torch.empty(grid[1], *own.shape, device=own.device)
    _relation_kernel[grid](own, rows, target, total, out, len(own), len(rows), part, LOG2_E / t, **sizes)
    return out.sum(0), total.sum(0)
