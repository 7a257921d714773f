"""The memory bank: one unit row an image, no gradient, saved with the model.

Of several processes each holds a contiguous part of the rows. All of them see every feature of the batch, and each
writes the rows that it owns: one bank, exact, in as many pieces.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecrop.distributed import ALONE, Group

# Below this length m·w + (1−m)·ẑ has no direction worth keeping: the row stays as it was.
MIN_NORM = 1e-6
DRAWN_ROWS = 2**16  # at a time, where most of them belong to other processes


class Table(nn.Parameter):
    """Rows that are trained, one an image: a list, not a map, so that there is nothing in it to orthogonalise."""

    group: Group = ALONE  # whose parts make up the whole


def own_rows(draw: Callable[[int], Tensor], num_images: int, group: Group) -> Tensor:
    """This process' part of draw(num_images), random rows, without ever holding the others' parts.

    Every process draws all rows, so that its generator goes on as a single process' would.
    """
    if group.size == 1:
        return draw(num_images)
    mine, out = group.part(num_images), []
    starts = range(0, max(1, num_images - DRAWN_ROWS + 1), DRAWN_ROWS)  # the last piece is the longest: see the tests
    for start in starts:
        end = num_images if start == starts[-1] else start + DRAWN_ROWS
        out.append(draw(end - start)[max(mine.start - start, 0) : max(mine.stop - start, 0)].clone())
    return torch.cat(out)


class MemoryBank(nn.Module):
    """Rows w_1 … w_N of unit length, random until `write` fills them (Feature Calibrate)."""

    weight: Tensor  # [N, D], or this process' part of the N rows

    def __init__(
        self,
        num_images: int,
        dim: int,
        momentum: float = 0.5,
        dtype: torch.dtype = torch.float32,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {momentum}")
        self.momentum, self.num_images, self.group = momentum, num_images, group
        drawn = own_rows(lambda count: torch.randn(count, dim), num_images, group)
        self.register_buffer("weight", F.normalize(drawn, dim=1).to(dtype))

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the whole bank, whoever holds them."""
        return self.group.fetch(self.weight, self.place(index))

    def place(self, index: Tensor) -> Tensor:
        """Where in `weight` rows of the whole bank stand; −1 where another process holds them."""
        return self.group.place(index, self.num_images)

    @torch.no_grad()
    def write(self, index: Tensor, z: Tensor) -> None:
        """Set rows to the direction of z."""
        own = self._own(index)
        self._store(own, F.normalize(z[own.image], dim=1))

    @torch.no_grad()
    def update(
        self,
        index: Tensor,
        z: Tensor,
        probabilities: Tensor | None = None,
        labels: "SoftLabels | None" = None,
        momentum: Tensor | None = None,
    ) -> None:
        """w_i ← normalise(m·w_i + (1−m)·ẑ_i) for the rows of the batch alone.

        Plain rule: ẑ_i = z_i. Corrected rule (Grad Update, Eq. 4–6), given p[j, i] = image j's probability of row i:
        ẑ_i = Σ_j (y_ji − p[j, i])·z_j, the negative gradient of the batch's cross-entropy in w_i; y_ji = δ_ij, or what
        `labels` say. momentum: m [] in this step, where it changes along the run.
        """
        direction = corrected_direction(z, probabilities, labels) if probabilities is not None else z
        own = self._own(index)
        old = self.weight[own.place].to(z.dtype)
        weight = self.momentum if momentum is None else momentum.to(z.dtype)
        moved = torch.lerp(direction[own.image], old, weight)
        norm = moved.norm(dim=1, keepdim=True)
        self._store(own, torch.where(norm > MIN_NORM, moved / norm, old))

    def _own(self, index: Tensor) -> "_Own":
        """Which images of the batch have their row here, and where; found without asking the device how many."""
        if self.group.size == 1:
            return _Own(slice(None), index, None)
        place = self.place(index)
        held = place >= 0
        # an image whose row is elsewhere stands for the first one whose row is here: it writes the same once more
        image = torch.where(held, torch.arange(len(index), device=index.device), held.int().argmax(0, keepdim=True))
        return _Own(image, place[image], held.any())

    def _store(self, own: "_Own", rows: Tensor) -> None:
        rows = rows.to(self.weight.dtype)
        if own.some is not None:
            rows = torch.where(own.some, rows, self.weight[own.place])
        self.weight[own.place] = rows


class _Own(NamedTuple):
    image: Tensor | slice
    place: Tensor
    some: Tensor | None  # [] are there any? None where all are


class Queue(nn.Module):
    """The last `size` keys, oldest replaced first; random unit rows until it has filled."""

    rows: Tensor  # [size, D]
    place: Tensor  # [] where the next key goes; on the device, so that pushing needs no synchronisation

    def __init__(self, size: int, dim: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("rows", F.normalize(torch.randn(size, dim), dim=1).to(dtype))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def push(self, keys: Tensor) -> None:
        keys = keys[-len(self.rows) :]  # of a batch longer than the queue the last keys
        places = (self.place + torch.arange(len(keys), device=keys.device)) % len(self.rows)
        self.rows[places] = keys.to(self.rows.dtype)
        self.place.add_(len(keys)).remainder_(len(self.rows))


class SoftLabels(NamedTuple):
    """Of images that were mixed: y_jj = μ_j, and y_ji = 1 − μ_j for the partner i of image j."""

    partner: Tensor  # [B] places in the batch, each once
    mix: Tensor  # [] or [B] μ


def corrected_direction(z: Tensor, probabilities: Tensor, labels: SoftLabels | None = None) -> Tensor:
    """ẑ_i = Σ_j (y_ji − p[j, i])·z_j -> [B, D]; y_ji = δ_ij without labels."""
    given = z
    if labels is not None:
        mix = labels.mix.to(z.dtype).expand(len(z))[:, None]
        given = (mix * z).index_add(0, labels.partner, (1 - mix) * z)
    return given - probabilities.to(z.dtype).T @ z
