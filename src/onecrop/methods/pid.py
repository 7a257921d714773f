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
from onecrop.bank import Table
from onecrop.data import Batch
from onecrop.methods.base import Method, Settings, augmentation, autocast, spread
from onecrop.nets.backbones import Backbone


@dataclass(frozen=True)
class PidSettings(Settings):
    cutmix: Annotated[float, "α of Beta(α, α); 0 switches it off"] = 0.5  # sid's; its own paper names no α
    smoothing: Annotated[float, "share of the target that is spread over all images"] = 0.1


class Pid(Method):
    """parametric instance discrimination: a trained classifier over all images"""

    Settings = PidSettings

    def __init__(
        self, settings: PidSettings, backbone: Backbone, num_images: int, image_size: int, dtype: torch.dtype
    ) -> None:
        super().__init__(backbone, dtype)
        self.settings = settings
        bound = backbone.dim**-0.5  # as torch begins a linear layer
        self.classifier = Table(torch.empty(num_images, backbone.dim).uniform_(-bound, bound))
        self.augment, self.cutmix = augmentation(settings, image_size), CutMix(settings.cutmix)

    @classmethod
    def tables(
        cls, settings: PidSettings, feature_dim: int, num_images: int, batch_size: int, dtype: torch.dtype
    ) -> dict[str, int]:
        logits = 2 * batch_size * num_images * dtype.itemsize  # and their slopes
        return {"classifier": num_images * feature_dim * torch.float32.itemsize, "logits": logits}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        x = self.augment(batch.images, batch.aspect, batch.draws)
        x, partner, mix = self.cutmix(x, batch.draws)
        with autocast(x, self.dtype):
            z = self.backbone(x.contiguous(memory_format=torch.channels_last))  # [B, D]
            logits = F.linear(z, self.classifier).float()  # [B, N]
        accuracy = (logits.detach().argmax(1) == batch.index).float().mean()
        self.watch = {"accuracy": accuracy, "spread": spread(F.normalize(z.float(), dim=1))}
        loss = smoothed_cross_entropy(logits, batch.index, self.settings.smoothing)
        if partner is not None:
            other = smoothed_cross_entropy(logits, batch.index[partner], self.settings.smoothing)
            loss = mix * loss + (1 - mix) * other
        return {"cross_entropy": loss}


def smoothed_cross_entropy(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """−Σ_k y_k·log p_k with y = (1 − ε)·onehot + ε/N, mean over the batch -> []."""
    return F.cross_entropy(logits, target, label_smoothing=smoothing)
