"""simsiam: each view predicts the other's feature; the predicted side gets no gradient.

Chen and He, "Exploring Simple Siamese Representation Learning" (2021). Defaults are the published ones, with a
predictor whose learning rate does not decay; the recipe `simsiam-small` has those for small images. Its code also
begins each residual branch at zero, which is left to the backbone here: torchvision's begin it at one.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecrop.data import Batch
from onecrop.losses.contrastive import negative_cosine, pair_accuracy
from onecrop.methods.base import Method, Settings, augmentation, autocast, spread
from onecrop.nets import mlp, two_layers
from onecrop.nets.backbones import Backbone


@dataclass(frozen=True)
class SimsiamSettings(Settings):
    dim: Annotated[int, "length of a feature"] = 2048
    hidden: Annotated[int, "width of the projection head"] = 2048
    bottleneck: Annotated[int, "width of the predictor"] = 512


class Simsiam(Method):
    """each view predicts the other; no negatives, no second network"""

    Settings = SimsiamSettings
    crops = 2
    undecayed = ("predictor",)  # it has to follow the latest features, and need not converge

    def __init__(
        self, settings: SimsiamSettings, backbone: Backbone, num_images: int, image_size: int, dtype: torch.dtype
    ) -> None:
        super().__init__(backbone, dtype)
        self.settings = settings
        projector = mlp(backbone.dim, settings.hidden, settings.dim)
        projector[-1] = nn.Linear(settings.hidden, settings.dim, bias=False)  # batch norm follows
        self.projector = nn.Sequential(*projector, nn.BatchNorm1d(settings.dim, affine=False))
        self.predictor = two_layers(settings.dim, settings.bottleneck, settings.dim, norm=True)
        self.augment = augmentation(settings, image_size)

    def encode(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """-> projection z and prediction p of one view, [B, D] each."""
        with autocast(x, self.dtype):
            z = self.projector(self.backbone(x.contiguous(memory_format=torch.channels_last)))
            return self.gather(z, batch), self.gather(self.predictor(z), batch)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        # one view at a time: batch norm sees the views apart, as in the published code
        (z1, p1), (z2, p2) = (
            self.encode(self.augment(batch.images, batch.aspect, batch.draws, view), batch)
            for view in ("first", "second")
        )
        a, b = F.normalize(z1.detach(), dim=1), F.normalize(z2.detach(), dim=1)
        self.watch = {"accuracy": pair_accuracy(a, b), "spread": spread(a)}
        return {"negative_cosine": (negative_cosine(p1, z2) + negative_cosine(p2, z1)) / 2}
