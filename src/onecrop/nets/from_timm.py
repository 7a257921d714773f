"""Networks of timm, by name: `timm/resnet10t`. Built without weights and without a classifier, under timm's own keys.

The small stem: the first two halvings of the resolution are taken out, as for the mobile nets. Which layers those are
is seen from a picture that runs through the network; one that does not begin with two plain ones has no such stem.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from onecrop.errors import UserError, from_extra, unknown

HALVES = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)


def _timm() -> Any:
    return from_extra("timm", "timm", "backbones named timm/NAME need timm")


def check_timm(name: str) -> None:
    timm = _timm()
    if not timm.is_model(name):
        raise unknown("backbone", f"timm/{name}", [f"timm/{known}" for known in timm.list_models()])


def build_timm(name: str, stem: Literal["small", "standard"], image_size: int) -> nn.Module:
    """any network of timm by its name, without weights (pip install 'onecrop[timm]')"""
    check_timm(name)
    net = _that_runs(name, image_size)
    if stem == "small":
        _keep_resolution(net, name, image_size)
    return net


def _that_runs(name: str, image_size: int) -> nn.Module:
    """As it is where it takes pictures of any size; else made for this one."""
    reason = ""
    for options in ({}, {"img_size": image_size}):
        try:
            net = _timm().create_model(name, pretrained=False, num_classes=0, **options)
            _run(net, image_size)
            return net  # type: ignore[no-any-return]
        except (AssertionError, RuntimeError, ValueError, TypeError) as error:
            reason = reason or " ".join(str(error).split())[:150]
    raise UserError(f"timm/{name} takes no pictures of {image_size} px: choose another --image-size ({reason})")


@torch.no_grad()
def _run(net: nn.Module, image_size: int) -> None:
    was = net.training
    net.eval()(torch.zeros(2, 3, image_size, image_size))
    net.train(was)


def _keep_resolution(net: nn.Module, name: str, image_size: int) -> None:
    """Every stride-2 layer that sees the whole or the half picture: convolutions get stride 1, pooling goes."""
    halving = [n for n, m in net.named_modules() if isinstance(m, HALVES) and m.stride in (2, (2, 2))]
    sides = _sides(net, halving, image_size)
    half = (image_size + 1) // 2
    first = [n for n, (side, _) in sides.items() if side in (image_size, half)]
    refusal = UserError(
        f"timm/{name} has no small stem, for its first layers do not halve the picture twice: pass --stem standard"
    )
    if {sides[n][0] for n in first} != {image_size, half}:
        raise refusal
    for layer in first:
        module = net.get_submodule(layer)
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
        else:
            parent, _, own = layer.rpartition(".")
            setattr(net.get_submodule(parent), own, nn.Identity())
    try:
        kept = _sides(net, first, image_size)
    except RuntimeError:  # branches that no longer meet at one resolution
        raise refusal from None
    if any(seen != (image_size, image_size) for seen in kept.values()):
        raise refusal


def _sides(net: nn.Module, layers: list[str], image_size: int) -> dict[str, tuple[int, int]]:
    """Layer -> side of what goes in and of what comes out, for a picture of this size."""
    seen: dict[str, tuple[int, int]] = {}

    def watch(layer: str) -> Any:
        def note(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            seen[layer] = inputs[0].shape[-1], output.shape[-1]

        return net.get_submodule(layer).register_forward_hook(note)

    handles = [watch(layer) for layer in layers]
    try:
        _run(net, image_size)
    finally:
        for handle in handles:
            handle.remove()
    return seen
