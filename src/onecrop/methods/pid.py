"""pid: parametric instance discrimination; the rows are the weights of a classifier over all images.

Dosovitskiy et al. (2014), in the form that the paper compares with (its Eq. 1–2, and Cao, Yu and Wu, "Training Vision
Transformers with Only 2040 Images", 2022): a linear classifier right on the backbone's features, trained like any other
layer, with CutMix and label smoothing. What it costs: N×D weights, their gradient and their momentum.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from onecrop.augment import CutMix
from onecrop.bank import Table, own_rows
from onecrop.data import Batch
from onecrop.distributed import Group
from onecrop.methods.base import Method, Settings, augmentation, autocast, spread, wide
from onecrop.nets.backbones import Backbone


@dataclass(frozen=True)
class PidSettings(Settings):
    cutmix: Annotated[float, "α of Beta(α, α); 0 switches it off"] = 0.5  # sid's; its own paper names no α
    smoothing: Annotated[float, "share of the target that is spread over all images"] = 0.1


class Pid(Method):
    """parametric instance discrimination: a trained classifier over all images"""

    Settings = PidSettings
    shards = ("classifier",)  # weights, gradient and momentum: no process could hold them all for long

    def __init__(
        self, settings: PidSettings, backbone: Backbone, num_images: int, image_size: int, dtype: torch.dtype
    ) -> None:
        super().__init__(backbone, dtype)
        self.settings = settings
        self.num_images, dim = num_images, backbone.dim
        bound = dim**-0.5  # as torch begins a linear layer
        drawn = own_rows(lambda count: torch.empty(count, dim).uniform_(-bound, bound), num_images, self.group)
        self.classifier = Table(drawn)
        self.classifier.group = self.group
        self.augment, self.cutmix = augmentation(settings, image_size), CutMix(settings.cutmix, self.group)

    @classmethod
    def tables(
        cls, settings: PidSettings, feature_dim: int, num_images: int, batch_size: int, dtype: torch.dtype
    ) -> dict[str, int]:
        logits = batch_size * num_images * (dtype.itemsize + torch.float32.itemsize)  # widened for the softmax
        return {"classifier": num_images * feature_dim * torch.float32.itemsize, "logits": logits}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        x = self.augment(batch.images, batch.aspect, batch.draws)
        x, partner, mix = self.cutmix(x, batch.draws)
        with autocast(x, self.dtype):
            z = self.backbone(x.contiguous(memory_format=torch.channels_last))
            z = self.group.gather(z, len(batch.index))  # [B, D]
            logits = wide(F.linear(self.group.fan_out(z), self.classifier))  # [B, N], or this process' columns
        place = self.group.place(batch.index, self.num_images)
        accuracy = self.hits(logits.detach(), place).float().mean()
        self.watch = {"accuracy": accuracy, "spread": spread(F.normalize(wide(z), dim=1))}
        loss = self.cross_entropy(logits, place)
        if partner is not None:
            loss = mix * loss + (1 - mix) * self.cross_entropy(logits, place[partner])
        return {"cross_entropy": loss}

    def cross_entropy(self, logits: Tensor, place: Tensor) -> Tensor:
        if self.group.size == 1:
            return smoothed_cross_entropy(logits, place, self.settings.smoothing)
        return cross_entropy_in_parts(logits, place, self.settings.smoothing, self.num_images, self.group)

    def hits(self, logits: Tensor, place: Tensor) -> Tensor:
        """Is the own row the highest? -> [B]."""
        best, where = logits.max(1)
        hit = where == place
        if self.group.size == 1:
            return hit
        winner = self.group.stack(best).argmax(0, keepdim=True)  # the first of equals, which holds the lower rows
        return self.group.stack(hit.to(best.dtype)).gather(0, winner)[0]


def smoothed_cross_entropy(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """−Σ_k y_k·log p_k with y = (1 − ε)·onehot + ε/N, mean over the batch -> []."""
    return F.cross_entropy(logits, target, label_smoothing=smoothing)


def cross_entropy_in_parts(logits: Tensor, place: Tensor, smoothing: float, total: int, group: Group) -> Tensor:
    """The same where each process has some of the N columns: lse − (1 − ε)·l_i − ε/N·Σl -> [].

    place: the target's column, −1 where another process has it.
    """
    highest = group.stack(logits.detach().amax(1)).amax(0)  # [B]
    lse = group.total((logits - highest[:, None]).exp().sum(1)).log() + highest
    own = logits.gather(1, place.clamp(min=0)[:, None])[:, 0] * (place >= 0)
    share = (1 - smoothing) * own + smoothing / total * logits.sum(1)
    return (lse - group.total(share)).mean()
