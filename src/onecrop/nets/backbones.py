"""Backbones: torchvision's networks without their classifier, under torchvision's own keys.

A backbone maps [B, 3, S, S] to pooled features [B, backbone.dim]. For small images (64 px and less) the first strides
are taken out ("small" stem): a 32-px picture has no resolution to lose.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecrop.errors import UserError, unknown
from onecrop.tensors import load_tensors, save_tensors

Stem = Literal["small", "standard"]
SMALL_IMAGE = 64  # px; up to here the small stem is the default


class Backbone(nn.Module):
    """For type checkers: what every backbone has. torchvision's modules get `dim` as an attribute."""

    dim: int


def _resnet(name: str, stem: Stem) -> nn.Module:
    from torchvision.models import get_model

    net: Any = get_model(name, weights=None)
    net.dim, net.fc = net.fc.in_features, nn.Identity()
    if stem == "small":  # 3×3 stride 1 and no pooling, as everywhere on CIFAR
        net.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        net.maxpool = nn.Identity()
    return cast(nn.Module, net)


def _mobile(name: str, stem: Stem) -> nn.Module:
    """MobileNets and EfficientNet. The small stem: the first two strides become 1, and a 32-px picture ends as 4×4."""
    from torchvision.models import get_model

    net: Any = get_model(name, weights=None)
    net.dim = next(m for m in net.classifier if isinstance(m, nn.Linear)).in_features
    net.classifier = nn.Identity()
    if stem == "small":
        strided = [m for m in net.modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
        for conv in strided[:2]:
            conv.stride = (1, 1)
    return cast(nn.Module, net)


class Tiny(nn.Module):
    """four convolutions of 32 to 256 channels: small enough for a CPU demo, and a backbone like the others."""

    dim = 256

    def __init__(self, stem: Stem) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 256)
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2 if stem == "standard" and b == 32 else 1, padding=1, bias=False)
            for a, b in pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])

    def features(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
            x = F.max_pool2d(x, 2) if x.shape[-1] > 4 else x  # [B, width, S/2, S/2]
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x).mean((2, 3))


class Pixels(nn.Module):
    """The baseline that learns nothing: the picture itself, at 32 px or less, as a vector."""

    def __init__(self, image_size: int) -> None:
        super().__init__()
        self.size = min(image_size, 32)
        self.dim = 3 * self.size**2

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, self.size).flatten(1)


def resnet18(stem: Stem) -> nn.Module:
    """11.7 million parameters with its classifier, features of 512"""
    return _resnet("resnet18", stem)


def resnet50(stem: Stem) -> nn.Module:
    """25.6 million parameters with its classifier, features of 2048"""
    return _resnet("resnet50", stem)


def mobilenet_v2(stem: Stem) -> nn.Module:
    """3.5 million parameters with its classifier, features of 1280"""
    return _mobile("mobilenet_v2", stem)


def mobilenet_v3_small(stem: Stem) -> nn.Module:
    """2.5 million parameters with its classifier, features of 576"""
    return _mobile("mobilenet_v3_small", stem)


def mobilenet_v3_large(stem: Stem) -> nn.Module:
    """5.5 million parameters with its classifier, features of 960"""
    return _mobile("mobilenet_v3_large", stem)


def efficientnet_b0(stem: Stem) -> nn.Module:
    """5.3 million parameters with its classifier, features of 1280"""
    return _mobile("efficientnet_b0", stem)


BACKBONES: dict[str, Callable[[Stem], nn.Module]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mobilenet_v2": mobilenet_v2,
    "mobilenet_v3_small": mobilenet_v3_small,
    "mobilenet_v3_large": mobilenet_v3_large,
    "efficientnet_b0": efficientnet_b0,
    "tiny": Tiny,
}


def feature_map(backbone: nn.Module, x: Tensor) -> Tensor:
    """What a backbone sees before it pools -> [B, dim, h, w]."""
    net: Any = backbone
    if hasattr(net, "features"):
        return cast(Tensor, net.features(x))
    x = net.maxpool(net.relu(net.bn1(net.conv1(x))))
    return cast(Tensor, net.layer4(net.layer3(net.layer2(net.layer1(x)))))


def choose_stem(image_size: int) -> Stem:
    return "small" if image_size <= SMALL_IMAGE else "standard"


def build_backbone(name: str, stem: Stem) -> Backbone:
    if name not in BACKBONES:
        raise unknown("backbone", name, BACKBONES)
    return cast(Backbone, BACKBONES[name](stem))


def save_backbone(path: Path, backbone: nn.Module, facts: dict[str, Any]) -> None:
    """Weights under torchvision's keys; `facts` (name, stem, image size, where it comes from) go into the metadata."""
    save_tensors(path, backbone.state_dict(), facts)


def read_backbone(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """-> weights, facts. Reads safetensors only: nothing in the file is executed."""
    path = Path(path)
    path = path / "backbone.safetensors" if path.is_dir() else path
    if not path.exists():
        raise UserError(f"no backbone at {path}: give a finished run folder or a backbone.safetensors file")
    state, facts = load_tensors(path)
    if not isinstance(facts, dict) or not {"backbone", "stem", "image_size"} <= facts.keys():
        raise UserError(f"{path} was not written by onecrop: its metadata names no backbone and stem")
    return state, facts


def load_backbone(path: Path | str) -> Backbone:
    """A run folder or backbone.safetensors -> the network in eval mode. Every key must match."""
    state, facts = read_backbone(path)
    backbone = build_backbone(facts["backbone"], facts["stem"])
    try:
        backbone.load_state_dict(state, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} does not fit {facts['backbone']} with the {facts['stem']} stem: {reason}") from None
    return cast(Backbone, backbone.eval().requires_grad_(False))


def untrained_like(path: Path | str, seed: int) -> Backbone:
    """The same network as at `path`, before any training: the baseline that every claim needs."""
    _, facts = read_backbone(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cast(Backbone, build_backbone(facts["backbone"], facts["stem"]).eval().requires_grad_(False))
