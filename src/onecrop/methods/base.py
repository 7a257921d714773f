"""What a method is: a backbone, a forward pass that returns named loss terms, and its own settings."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from onecrop.augment import Augment
from onecrop.data import Batch, Loader
from onecrop.nets.backbones import SMALL_IMAGE, Backbone


@dataclass(frozen=True)
class Settings:
    """Settings that every method has: its augmentation."""

    crop_scale: float = 0.2  # smallest share of the picture in a crop
    jitter: float = 0.4  # strength of brightness, contrast and saturation; the hue gets a quarter of it
    jitter_probability: float = 0.8
    grey_probability: float = 0.2
    blur_probability: float = 0.5  # for images over 64 px; smaller ones are never blurred


class Method(nn.Module, ABC):
    """The only abstract class. `backbone` is all that evaluation ever sees."""

    Settings: ClassVar[type[Settings]] = Settings
    backbone: Backbone
    watch: dict[str, Tensor]  # what progress shows beside the terms; set by `forward`, without gradient

    @abstractmethod
    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Named loss terms; the objective is their sum."""

    def prepare(self, loader: Loader) -> None:  # noqa: B027
        """Before the first step: fill the bank."""

    def after_step(self, progress: float) -> None:  # noqa: B027
        """After each step, `progress` going from 0 to 1: moving averages."""


def augmentation(settings: Settings, image_size: int) -> Augment:
    return Augment(
        image_size,
        settings.crop_scale,
        settings.jitter,
        settings.jitter_probability,
        settings.grey_probability,
        settings.blur_probability if image_size > SMALL_IMAGE else 0.0,
    )


def spread(z: Tensor) -> Tensor:
    """1 − ‖mean of the unit features‖²: near 1 when they cover the sphere, 0 when they have collapsed to a point."""
    return 1 - z.detach().mean(0).square().sum()


def bank_dtype(device: torch.device) -> torch.dtype:
    """Half the bytes where the matrix units take them."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
