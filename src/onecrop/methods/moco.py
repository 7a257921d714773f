"""moco: each query finds its key, made by a slowly moving network, among a queue of earlier keys.

He et al., "Momentum Contrast" (2020), with the head and augmentation of Chen et al., "Improved Baselines with Momentum
Contrastive Learning" (v2, 2020), not symmetric; defaults are the published ones. Keys go through batch norm in shuffled
groups, as on several devices: a key's group must not tell which query it belongs to. Queries, which are evaluated, go
through it all together.
"""

import copy
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from onecrop.bank import Queue
from onecrop.data import Batch
from onecrop.losses.contrastive import info_nce, pair_accuracy
from onecrop.methods.base import Method, Settings, augmentation, autocast, move_towards, spread
from onecrop.nets import two_layers
from onecrop.nets.backbones import Backbone
from onecrop.nets.norms import norm_in_groups


@dataclass(frozen=True)
class MocoSettings(Settings):
    dim: Annotated[int, "length of a feature"] = 128
    hidden: Annotated[int, "width of the head"] = 2048
    temperature: Annotated[float, "of the softmax over the queue"] = 0.2
    queue_size: Annotated[int, "earlier keys that serve as negatives"] = 65536
    key_momentum: Annotated[float, "of the key network's moving average"] = 0.999
    norm_groups: Annotated[int, "groups in which keys go through batch norm"] = 8


class Moco(Method):
    """each query finds its key among a queue of earlier keys (v2)"""

    Settings = MocoSettings
    crops, networks = 2, 2

    def __init__(
        self, settings: MocoSettings, backbone: Backbone, num_images: int, image_size: int, dtype: torch.dtype
    ) -> None:
        super().__init__(backbone, dtype)
        self.settings = settings
        self.head = two_layers(backbone.dim, settings.hidden, settings.dim)
        self.key_backbone = norm_in_groups(copy.deepcopy(backbone), settings.norm_groups).requires_grad_(False)
        self.key_head = copy.deepcopy(self.head).requires_grad_(False)
        self.queue = Queue(settings.queue_size, settings.dim, dtype)
        self.augment = augmentation(settings, image_size)

    @classmethod
    def tables(
        cls, settings: MocoSettings, feature_dim: int, num_images: int, batch_size: int, dtype: torch.dtype
    ) -> dict[str, int]:
        return {"queue": settings.queue_size * settings.dim * dtype.itemsize}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        query_view, key_view = (
            self.augment(batch.images, batch.aspect, batch.draws, view).contiguous(memory_format=torch.channels_last)
            for view in ("query", "key")
        )
        with autocast(query_view, self.dtype):
            query = F.normalize(self.gather(self.head(self.backbone(query_view)), batch), dim=1)  # [B, D]
            with torch.no_grad():
                key = self.keys(key_view, batch)
        # a copy: the queue is written before the backward pass reads it
        loss = info_nce(query, key, self.queue.rows.clone(), self.settings.temperature)
        self.queue.push(key)  # after the loss: a queue never holds the current positives
        self.watch = {"accuracy": pair_accuracy(query, key), "spread": spread(query)}
        return {"info_nce": loss}

    def keys(self, x: Tensor, batch: Batch) -> Tensor:
        """Of the whole batch [B, D]; shuffled across all processes, too."""
        order = batch.draws.whole().uniform("shuffle", 1)[:, 0].argsort()
        shuffled = self.gather(self.key_head(self.key_backbone(self.group.take(x, order))), batch)
        return F.normalize(shuffled[order.argsort()], dim=1)

    def after_step(self, progress: Tensor) -> None:
        momentum = torch.full_like(progress, self.settings.key_momentum)
        move_towards(self.key_backbone, self.backbone, momentum)
        move_towards(self.key_head, self.head, momentum)
