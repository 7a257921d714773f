"""simclr: two views of each image find each other in the batch.

Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations" (2020). Defaults are published ones
for ImageNet; for small images see the recipe `simclr-small`. The head is the paper's; its code adds batch norms to it.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from onecrop.data import Batch
from onecrop.losses.contrastive import nt_xent, pair_accuracy
from onecrop.methods.base import Method, Settings, augmentation, autocast, spread
from onecrop.nets import two_layers
from onecrop.nets.backbones import Backbone


@dataclass(frozen=True)
class SimclrSettings(Settings):
    crop_scale: Annotated[float, "smallest share of the picture in a crop"] = 0.08
    jitter: Annotated[float, "strength of the jitter; the hue gets a quarter of it"] = 0.8
    dim: Annotated[int, "length of a feature"] = 128
    hidden: Annotated[int, "width of the head"] = 2048
    temperature: Annotated[float, "of the softmax over the batch"] = 0.1


class Simclr(Method):
    """two views find each other in the batch"""

    Settings = SimclrSettings
    crops = 2

    def __init__(
        self, settings: SimclrSettings, backbone: Backbone, num_images: int, image_size: int, dtype: torch.dtype
    ) -> None:
        super().__init__(backbone, dtype)
        self.settings = settings
        self.head = two_layers(backbone.dim, settings.hidden, settings.dim)
        self.augment = augmentation(settings, image_size)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        views = [self.augment(batch.images, batch.aspect, batch.draws, view) for view in ("first", "second")]
        x = torch.cat(views).contiguous(memory_format=torch.channels_last)
        with autocast(x, self.dtype):
            features = self.head(self.backbone(x))
        a, b = (F.normalize(self.gather(view, batch), dim=1) for view in features.chunk(2))  # [B, D] each
        self.watch = {"accuracy": pair_accuracy(a, b), "spread": spread(a)}
        return {"nt_xent": nt_xent(a, b, self.settings.temperature)}
