"""What a method is: a backbone, a forward pass that returns named loss terms, and its own settings."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from onecrop.augment import Augment
from onecrop.data import Batch, Loader
from onecrop.distributed import world
from onecrop.nets.backbones import SMALL_IMAGE, Backbone


@dataclass(frozen=True)
class Settings:
    """Settings that every method has: its augmentation."""

    crop_scale: Annotated[float, "smallest share of the picture in a crop"] = 0.2
    jitter: Annotated[float, "strength of brightness, contrast and saturation; the hue gets a quarter of it"] = 0.4
    jitter_probability: Annotated[float, "share of images whose colours are jittered"] = 0.8
    grey_probability: Annotated[float, "share of images turned grey"] = 0.2
    blur_probability: Annotated[float, "for crops over 64 px; smaller ones are never blurred"] = 0.5


class Method(nn.Module, ABC):
    """The only abstract class. `backbone` is all that evaluation ever sees."""

    Settings: ClassVar[type[Settings]] = Settings
    crops: ClassVar[int] = 1  # views of an image in a step
    networks: ClassVar[int] = 1  # backbones in memory
    shards: ClassVar[tuple[str, ...]] = ()  # tensors of one row an image, of which each process holds a part
    undecayed: ClassVar[tuple[str, ...]] = ()  # parts whose learning rate stays at its peak
    backbone: Backbone
    watch: dict[str, Tensor]  # what progress shows beside the terms; set by `forward`, without gradient

    def __init__(self, backbone: Backbone, dtype: torch.dtype) -> None:
        super().__init__()
        self.backbone, self.dtype = backbone, dtype  # dtype: of the network's products and of a bank
        self.group = world()

    @abstractmethod
    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Named loss terms of the whole batch; the objective is their sum. Every process returns the same ones."""

    def gather(self, features: Tensor, batch: Batch) -> Tensor:
        """Features of this process' images -> of the whole batch, in float32 at least."""
        return self.group.gather(wide(features), len(batch.index))

    @classmethod
    def tables(
        cls, settings: Any, feature_dim: int, num_images: int, batch_size: int, dtype: torch.dtype
    ) -> dict[str, int]:
        """Bytes by kind that the method cannot do without beside its network; a "classifier" is trained, others not."""
        return {}

    def prepare(self, loader: Loader) -> None:
        """Before the first step: fill the bank."""

    def after_step(self, progress: Tensor) -> None:
        """After each step, `progress` [] going from 0 to 1 on the device: moving averages."""


def augmentation(settings: Settings, image_size: int) -> Augment:
    return Augment(
        image_size,
        settings.crop_scale,
        settings.jitter,
        settings.jitter_probability,
        settings.grey_probability,
        settings.blur_probability if image_size > SMALL_IMAGE else 0.0,
    )


def wide(features: Tensor) -> Tensor:
    """In float32 at least: losses are not worked out in a short format."""
    return features.to(torch.promote_types(features.dtype, torch.float32))


def spread(z: Tensor) -> Tensor:
    """1 − ‖mean of the unit features‖²: near 1 when they cover the sphere, 0 when they have collapsed to a point."""
    return 1 - z.detach().mean(0).square().sum()


def autocast(x: Tensor, dtype: torch.dtype) -> torch.autocast:
    """Matrix products of the network in `dtype`; everything else stays in float32."""
    return torch.autocast(x.device.type, dtype=dtype, enabled=dtype != torch.float32)


@torch.no_grad()
def move_towards(average: nn.Module, network: nn.Module, momentum: Tensor) -> None:
    """average ← momentum·average + (1 − momentum)·network, for the parameters; momentum [] lives on the device.

    Batch norm statistics stay the average's own: it sees its own features.
    """
    mine: list[Tensor] = list(average.parameters())
    theirs: list[Tensor] = list(network.parameters())
    change = torch._foreach_sub(theirs, mine)
    torch._foreach_mul_(change, 1 - momentum)
    torch._foreach_add_(mine, change)
