"""Weights into a network, strictly: every key and shape must match, and no other network is filled by accident."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onecrop.errors import UserError
from onecrop.files import sha256_of
from onecrop.tensors import load_tensors

# What torchvision and timm call the layers after the pooled features: a backbone has none of them.
CLASSIFIERS = ("fc.", "classifier.", "head.fc.", "head.weight", "head.bias")
COUNTER = "num_batches_tracked"  # of batches that a norm has seen: torchvision's oldest files have none


def fill(net: nn.Module, state: dict[str, Tensor], origin: str, kind: str, *, but_classifier: bool = False) -> int:
    """Replace every weight of `net`, or raise and leave all as they were -> how many tensors.

    but_classifier: keys of a classifier may be on one side alone; the network then keeps its own.
    """
    wanted = net.state_dict()

    def counts(key: str) -> bool:
        return not (but_classifier and key.startswith(CLASSIFIERS))

    missing = [key for key in wanted if key not in state and counts(key) and not key.endswith(COUNTER)]
    problems = [f"{key} is missing" for key in missing]
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
    return len(shared)


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


def start_from(net: nn.Module, weights: str, backbone: str, stem: str | None) -> None:
    """Fill an untrained network from a file, or from torchvision's own weights; only the classifier may differ."""
    path = weights_file(weights, backbone)
    state, theirs = read_weights(path)
    if stem is not None and theirs != stem:  # the mobile nets' shapes would fit all the same
        raise UserError(
            f"the weights {weights} are for the {theirs} stem, and this {backbone} has the {stem} one: "
            f"pass --stem {theirs}"
        )
    kind = f"{backbone} with the {stem} stem" if stem else backbone
    fill(net, state, f"the weights {weights}", kind, but_classifier=stem is not None)


def hash_weights(weights: str, backbone: str) -> str:
    return sha256_of(weights_file(weights, backbone))


def weights_file(weights: str, backbone: str) -> Path:
    if weights == "torchvision":
        return _torchvision_file(backbone)
    if not Path(weights).is_file():
        raise UserError(f"--weights {weights} is not there: give a .safetensors or .pth file, or torchvision")
    return Path(weights)


def _torchvision_file(backbone: str) -> Path:
    """torchvision's weights for this network, downloaded once to where torchvision itself keeps them."""
    from torchvision.models import get_model_weights

    try:
        kinds: Any = get_model_weights(backbone)
        url: str = kinds.DEFAULT.url
    except ValueError:
        raise UserError(f"torchvision has no weights for {backbone}: give a file with --weights FILE") from None
    name = url.rpartition("/")[2]
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if not path.exists():
        digest = name.rpartition("-")[2].removesuffix(".pth")  # torchvision's names end in the start of the hash
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), hash_prefix=digest, progress=False)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"torchvision's weights for {backbone} cannot be downloaded ({error}): fetch {url} elsewhere and pass "
                "it with --weights FILE"
            ) from None
    return path


def read_weights(path: Path) -> tuple[dict[str, Tensor], str]:
    """-> state dict, stem. Nothing in the file is executed. A file that names no stem has the standard one."""
    if path.suffix == ".safetensors":
        state, facts = load_tensors(path)
        return state, (facts or {}).get("stem") or "standard"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # of many kinds, by what the file is
        raise UserError(
            f"{path} cannot be read as weights: it is damaged, or holds more than tensors, which would have to be "
            "executed: save model.state_dict() alone"
        ) from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} does not hold a plain state dict: save model.state_dict() alone")
    return state, "standard"
