"""Weights into a network, strictly: every key and shape must match, and no other network is filled by accident."""

from torch import Tensor, nn

from onecrop.errors import UserError

# What torchvision and timm call the layers after the pooled features: a backbone has none of them.
CLASSIFIERS = ("fc.", "classifier.", "head.fc.", "head.weight", "head.bias")


def fill(net: nn.Module, state: dict[str, Tensor], origin: str, kind: str, *, but_classifier: bool = False) -> None:
    """Replace every weight of `net`, or raise and leave all as they were.

    but_classifier: keys of a classifier may be on one side alone; the network then keeps its own.
    """
    wanted = net.state_dict()

    def counts(key: str) -> bool:
        return not (but_classifier and key.startswith(CLASSIFIERS))

    problems = [f"{key} is missing" for key in wanted if key not in state and counts(key)]
    problems += [f"{key} is not one of its keys" for key in state if key not in wanted and counts(key)]
    shared = [key for key in wanted if key in state and counts(key)]
    problems += [
        f"{key} is {list(state[key].shape)}, not {list(wanted[key].shape)}"
        for key in shared
        if state[key].shape != wanted[key].shape
    ]
    if problems:
        more = f", and {len(problems) - 1} more like that" if len(problems) > 1 else ""
        raise UserError(f"{origin} does not fit {kind}: {problems[0]}{more}")
    net.load_state_dict({**wanted, **{key: state[key] for key in shared}})


def need_same_layers(net: nn.Module, reference: nn.Module, origin: str, stem: str | None) -> None:
    """Refuse a network whose kernels, strides or pooling differ: where shapes agree, weights would fit and mislead."""
    ours, theirs = _windows(reference), _windows(net)
    differing = [name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name)]
    if differing:
        layer = differing[0]
        raise UserError(
            f"{origin} was trained with the {stem} stem, and this {type(net).__name__} has other layers: {layer} is "
            f"{theirs.get(layer, 'not there')}, not {ours.get(layer, 'left out')}; load_backbone without `into` builds "
            "the network it needs"
        )


def _windows(net: nn.Module) -> dict[str, str]:
    """Layer -> kernel, stride and padding: what a state dict does not hold."""
    return {
        name: f"{type(module).__name__}({module.extra_repr()})"
        for name, module in net.named_modules()
        if hasattr(module, "kernel_size")
    }
