"""byol: the network predicts a slowly moving average of itself on another view.

Grill et al., "Bootstrap Your Own Latent" (2020). Defaults are the published ones, but both views have one augmentation:
no solarisation (.2 of the second view there), blur for half of the images (all of the first view, .1 of the second),
saturation jittered like brightness (half as much). The recipe `byol-small` has those for small images.
"""

import copy
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from onecrop.data import Batch
from onecrop.losses.contrastive import negative_cosine, pair_accuracy
from onecrop.methods.base import Method, Settings, augmentation, autocast, move_towards, spread
from onecrop.nets import two_layers
from onecrop.nets.backbones import Backbone


@dataclass(frozen=True)
class ByolSettings(Settings):
    crop_scale: Annotated[float, "smallest share of the picture in a crop"] = 0.08
    dim: Annotated[int, "length of a feature"] = 256
    hidden: Annotated[int, "width of projector and predictor"] = 4096
    target_momentum: Annotated[float, "of the moving average at the start; it rises to 1 along a cosine"] = 0.996


class Byol(Method):
    """the network predicts its own moving average on another view"""

    Settings = ByolSettings
    crops, networks = 2, 2

    def __init__(
        self, settings: ByolSettings, backbone: Backbone, num_images: int, image_size: int, dtype: torch.dtype
    ) -> None:
        super().__init__(backbone, dtype)
        self.settings = settings
        self.projector = two_layers(backbone.dim, settings.hidden, settings.dim, norm=True)
        self.predictor = two_layers(settings.dim, settings.hidden, settings.dim, norm=True)
        self.target_backbone = copy.deepcopy(backbone).requires_grad_(False)
        self.target_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.augment = augmentation(settings, image_size)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        views = [
            self.augment(batch.images, batch.aspect, batch.draws, view).contiguous(memory_format=torch.channels_last)
            for view in ("first", "second")
        ]
        with autocast(views[0], self.dtype):
            p1, p2 = (self.gather(self.predictor(self.projector(self.backbone(x))), batch) for x in views)
            with torch.no_grad():
                z1, z2 = (self.gather(self.target_projector(self.target_backbone(x)), batch) for x in views)
        a, b = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
        self.watch = {"accuracy": pair_accuracy(a, b), "spread": spread(a)}
        return {"distance": 4 + 2 * (negative_cosine(p1, z2) + negative_cosine(p2, z1))}  # Σ over views of 2 − 2·cos

    def after_step(self, progress: Tensor) -> None:
        """τ = 1 − (1 − τ_base)·(cos(π·progress) + 1)/2."""
        momentum = 1 - (1 - self.settings.target_momentum) * ((torch.pi * progress).cos() + 1) / 2
        move_towards(self.target_backbone, self.backbone, momentum)
        move_towards(self.target_projector, self.projector, momentum)
