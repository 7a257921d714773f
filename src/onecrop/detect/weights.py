"""What a detector starts from: a pretrained run, nothing, or torchvision's weights; every tensor is counted."""

from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from onecrop.errors import UserError
from onecrop.nets.backbones import Backbone, build_backbone, read_backbone
from onecrop.nets.weights import fill, read_weights

SCRATCH = "scratch"
Net = Literal["resnet18", "resnet50"]
NETS: tuple[Net, ...] = get_args(Net)
TORCH_FILES = (".pth", ".pt")


class Start(NamedTuple):
    """A ResNet with the standard stem, and where its weights came from."""

    net: Backbone
    backbone: Net
    of: str  # pretrained, scratch or torchvision
    loaded: int  # tensors; 0 from scratch
    pretraining: dict[str, Any] | None  # what the run's backbone file says of itself


def load_start(weights: str, backbone: Net | None, seed: int) -> Start:
    """weights: a run folder or backbone.safetensors, `scratch`, or a .pth file of torchvision's weights."""
    path = Path(weights)
    if weights == SCRATCH or path.suffix in TORCH_FILES:
        if backbone is None:
            raise UserError(f"say which network to build for {weights}: --backbone resnet18 or --backbone resnet50")
        torch.manual_seed(seed)
        net = build_backbone(backbone, "standard")
        if weights == SCRATCH:
            return Start(net, backbone, "scratch", 0, None)
        if not path.is_file():
            raise UserError(f"no file {path}: give torchvision's weights, a run folder, or `{SCRATCH}`")
        state, _ = read_weights(path)
        return Start(net, backbone, "torchvision", _fill(net, state, path, backbone), None)
    state, facts = read_backbone(path)
    name, stem = facts["backbone"], facts["stem"]
    if name not in NETS:
        raise UserError(f"{weights} holds {name}: detection with the C4 layout takes {' or '.join(NETS)}")
    if stem != "standard":
        raise UserError(
            f"{weights} was pretrained with the {stem} stem, which keeps four times the resolution: detection "
            "needs the standard one, pretrain with --stem standard"
        )
    if backbone not in (None, name):
        raise UserError(f"{weights} holds {name}, not {backbone}: leave --backbone out")
    net = build_backbone(name, "standard")
    return Start(net, name, "pretrained", _fill(net, state, path, name), facts)


def _fill(net: Backbone, state: dict[str, Tensor], path: Path, name: str) -> int:
    """Load every tensor of stem and stages 1 to 4 -> how many. Of the file only a classifier may be left over."""
    broken = [key for key, value in state.items() if value.is_floating_point() and not value.isfinite().all()]
    if broken:
        raise UserError(f"{path} holds numbers that are not finite, in {broken[0]}")
    return fill(net, state, str(path), name, but_classifier=True)
