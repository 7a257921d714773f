"""Backbones: torchvision's networks without their classifier, under torchvision's own keys; timm's; any module.

A backbone maps [B, 3, S, S] to pooled features [B, backbone.dim]. For small images (64 px and less) the first strides
are taken out ("small" stem): a 32-px picture has no resolution to lose.
"""

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecrop.errors import UserError, unknown
from onecrop.nets.depth import replace_depth
from onecrop.nets.from_timm import build_timm, check_timm
from onecrop.nets.weights import fill, need_same_layers
from onecrop.tensors import load_tensors, save_tensors

Stem = Literal["small", "standard"]
SMALL_IMAGE = 64  # px; up to here the small stem is the default
TIMM, MODULE = "timm/", "module/"  # how the names of timm's networks and of modules from Python begin


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
    replace_depth(net)
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
            x = norm(conv(x))
            x = F.max_pool2d(x, 2) if x.shape[-1] > 4 else x  # [B, width, S/2, S/2]
            x = F.relu(x)  # of a quarter: it may as well come after the pooling
        return x

    def forward(self, x: Tensor) -> Tensor:
        # With channels innermost, as they lie: over the outer two, backward takes six times as long on a CPU.
        return self.features(x).permute(0, 2, 3, 1).flatten(1, 2).mean(1)


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
    for whole in ("forward_features", "features"):  # timm's name, torchvision's name
        if hasattr(net, whole):
            return cast(Tensor, getattr(net, whole)(x))
    x = net.maxpool(net.relu(net.bn1(net.conv1(x))))
    return cast(Tensor, net.layer4(net.layer3(net.layer2(net.layer1(x)))))


@torch.no_grad()
def need_feature_map(backbone: Backbone, image_size: int) -> None:
    """Refuse a network whose feature map is not [B, dim, h, w] with something to cut apart."""
    try:
        shape = feature_map(copy.deepcopy(backbone).eval(), torch.zeros(2, 3, image_size, image_size)).shape
    except AttributeError:
        raise UserError(
            f"{type(backbone).__name__} does not show the map that it pools, which this method cuts apart: give it a "
            "method `features`, images -> [B, dim, h, w]"
        ) from None
    except (TypeError, RuntimeError):
        shape = torch.Size()
    if len(shape) != 4 or shape[1] != backbone.dim or min(shape[2:]) < 2:
        raise UserError(
            f"{type(backbone).__name__} with crops of {image_size} px has no feature map of at least 2×2 with the "
            f"{backbone.dim} channels of its features, which this method cuts apart: choose another --backbone, "
            "--stem, --image-size or --crop-resolution"
        )


def check_stem(backbone: str, wanted: Stem | None) -> None:
    if wanted and backbone.startswith(MODULE):
        raise UserError(f"--stem {wanted} does not go with {backbone}, which has a stem of its own")


def check_backbone(name: str) -> None:
    if name.startswith(TIMM):
        check_timm(name.removeprefix(TIMM))
    elif name not in BACKBONES and not name.startswith(MODULE):
        raise unknown("backbone", name, [*BACKBONES, "timm/NAME"])


def build_backbone(
    name: str, stem: Stem | None, image_size: int | None = None, given: nn.Module | None = None
) -> Backbone:
    """The network before training, or a copy of the module that was given.

    image_size matters to modules and to some networks of timm, which are made for pictures of one size alone.
    """
    check_backbone(name)
    size = image_size or (32 if stem == "small" else 224)
    if given is not None:
        return adopt(given, size)
    if name.startswith(MODULE):
        raise UserError(
            f"{name} is a module from Python, and no name makes it: pass the object, pretrain(recipe, backbone=module) "
            "or load_backbone(run, into=module)"
        )
    assert stem is not None, "only a module has a stem of its own"
    if name.startswith(TIMM):
        net = build_timm(name.removeprefix(TIMM), stem, size)
        net.dim = features_length(net, size)  # type: ignore[assignment]
        return cast(Backbone, net)
    return cast(Backbone, BACKBONES[name](stem))


def module_name(module: nn.Module) -> str:
    if not isinstance(module, nn.Module):
        raise UserError(f"backbone={module!r} is not a module: a network's name goes into the recipe")
    return f"{MODULE}{type(module).__name__}"


def adopt(module: nn.Module, image_size: int) -> Backbone:
    """A module from Python as a backbone: a copy, so that the caller's own stays as it was."""
    copied: Any = copy.deepcopy(module).to("cpu")
    dim = features_length(copied, image_size)
    if getattr(copied, "dim", dim) != dim:
        raise UserError(f"{type(module).__name__}.dim is not the {dim} of its features: rename that attribute")
    copied.dim = dim
    return cast(Backbone, copied)


@torch.no_grad()
def features_length(net: nn.Module, image_size: int) -> int:
    """dim, from two pictures through a copy in eval mode."""
    name, x = type(net).__name__, torch.zeros(2, 3, image_size, image_size)
    try:
        out = copy.deepcopy(net).eval()(x)
    except Exception as error:  # a module of any make may raise anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{name} does not take pictures of {list(x.shape)}: {reason}") from error
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != 2:
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise UserError(f"{name} makes {got} of two pictures, not [2, dim]: let it end in pooled features")
    return out.shape[1]


def save_backbone(path: Path, backbone: nn.Module, facts: dict[str, Any]) -> None:
    """Weights under the network's own keys; `facts` (name, stem, image size, origin) go into the metadata."""
    save_tensors(path, backbone.state_dict(), facts)


def backbone_file(path: Path | str) -> Path:
    """Of a run folder, or the file itself."""
    return Path(path) / "backbone.safetensors" if Path(path).is_dir() else Path(path)


def read_backbone(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """-> weights, facts. Reads safetensors only: nothing in the file is executed."""
    path = backbone_file(path)
    if not path.exists():
        raise UserError(f"no backbone at {path}: give a finished run folder or a backbone.safetensors file")
    state, facts = load_tensors(path)
    if not isinstance(facts, dict) or not {"backbone", "stem", "image_size"} <= facts.keys():
        raise UserError(f"{path} was not written by onecrop: its metadata names no backbone and stem")
    return state, facts


def load_backbone(path: Path | str, into: nn.Module | None = None) -> Backbone:
    """A run folder or backbone.safetensors -> the network in eval mode. Every key must match.

    into: a module whose weights are replaced, and that comes back: the one that a run from Python was given, or a
    network of torchvision or timm, which keeps its own classifier; another stem than the run's is refused.
    """
    state, facts = read_backbone(path)
    name, stem = facts["backbone"], facts["stem"]
    if into is None:
        net = build_backbone(name, stem, facts["image_size"])
        fill(net, state, str(path), f"{name} with the {stem} stem")
        return cast(Backbone, net.eval().requires_grad_(False))
    named = not name.startswith(MODULE)
    if named:
        need_same_layers(into, build_backbone(name, stem, facts["image_size"]), str(path), stem)
    fill(into, state, str(path), type(into).__name__, but_classifier=named)
    return cast(Backbone, into.eval())


def untrained_like(path: Path | str, seed: int, given: nn.Module | None = None) -> Backbone:
    """The same network as at `path`, before any training: the baseline that every claim needs."""
    if given is not None:
        return cast(Backbone, copy.deepcopy(given).eval().requires_grad_(False))
    _, facts = read_backbone(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = build_backbone(facts["backbone"], facts["stem"], facts["image_size"])
        return cast(Backbone, net.eval().requires_grad_(False))
