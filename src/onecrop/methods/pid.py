"""pid: parametric instance discrimination; the rows are the weights of a classifier over all images.

Dosovitskiy et al. (2014), in the form of Cao et al., "Parametric Instance Classification" (2020): one crop, cosine
softmax with T .2, a two-layer head of 128 dimensions. What it costs: N×D weights, their gradient and their momentum.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from onecrop.bank import Table
from onecrop.data import Batch
from onecrop.methods.base import Method, Settings, augmentation, autocast, spread
from onecrop.nets import two_layers
from onecrop.nets.backbones import Backbone


@dataclass(frozen=True)
class PidSettings(Settings):
    dim: Annotated[int, "length of a feature and of a classifier row"] = 128
    hidden: Annotated[int, "width of the head"] = 2048
    temperature: Annotated[float, "of the softmax over all images"] = 0.2


class Pid(Method):
    """parametric instance discrimination: a trained classifier over all images"""

    Settings = PidSettings

    def __init__(
        self, settings: PidSettings, backbone: Backbone, num_images: int, image_size: int, dtype: torch.dtype
    ) -> None:
        super().__init__(backbone, dtype)
        self.settings = settings
        self.head = two_layers(backbone.dim, settings.hidden, settings.dim)
        self.classifier = Table(F.normalize(torch.randn(num_images, settings.dim), dim=1))
        self.augment = augmentation(settings, image_size)

    @classmethod
    def tables(cls, settings: PidSettings, num_images: int, batch_size: int, dtype: torch.dtype) -> dict[str, int]:
        logits = 2 * batch_size * num_images * dtype.itemsize  # and their slopes
        return {"classifier": num_images * settings.dim * torch.float32.itemsize, "logits": logits}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        x = self.augment(batch.images, batch.aspect, batch.draws)
        with autocast(x, self.dtype):
            features = self.head(self.backbone(x.contiguous(memory_format=torch.channels_last)))
            z = F.normalize(features.float(), dim=1)  # [B, D]
            cosines = z @ F.normalize(self.classifier, dim=1).T  # [B, N]
        logits = cosines.float() / self.settings.temperature
        accuracy = (logits.detach().argmax(1) == batch.index).float().mean()
        self.watch = {"accuracy": accuracy, "spread": spread(z)}
        return {"cross_entropy": F.cross_entropy(logits, batch.index)}
