"""A backbone for other programs: under torchvision's or timm's keys, or as ONNX.

Every file is read back into the other program's own network and must give the same features, or it does not stay.
"""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onecrop.augment import MEAN, STD, central_crop
from onecrop.data.shapes import shapes
from onecrop.errors import UserError, from_extra, unknown
from onecrop.files import atomically
from onecrop.nets import BACKBONES, build_timm, load_backbone, read_backbone
from onecrop.nets.backbones import TIMM, Backbone, backbone_file
from onecrop.nets.weights import fill
from onecrop.tensors import load_tensors, save_tensors

TOLERANCE = 1e-4  # of the largest feature: float32 through another program's order of sums
NUM_PICTURES = 8

TORCHVISION = [name for name in BACKBONES if name != "tiny"]
# timm's name of the identical network. Its mobilenetv3 is another one: batch norm with another ε, and a layer more.
TIMM_TWINS = {
    "resnet18": "resnet18",
    "resnet50": "resnet50",
    "mobilenet_v2": "mobilenetv2_100",
    "efficientnet_b0": "efficientnet_b0",
}

Features = Callable[[Tensor], Tensor]


def export(run: Path | str, format: str, out: Path | str | None = None, backbone: nn.Module | None = None) -> Path:
    """Write a run's backbone in another program's form -> the file, once its features are known to be the same.

    backbone: the module that the run was given, where it came from Python; it stays as it is.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    _, facts = read_backbone(run)
    net = load_backbone(run, into=copy.deepcopy(backbone)).requires_grad_(False)
    usual, endings, write = FORMATS[format]
    path = Path(out) if out else backbone_file(run).with_name(usual)
    if path.suffix not in endings:
        raise UserError(f"--out {path} does not fit --format {format}: let it end in {' or '.join(endings)}")
    if path.exists():
        raise UserError(f"{path} exists and is not overwritten: choose another --out, or remove it")
    x = pictures(facts["image_size"])
    with atomically(path) as temporary:
        features = write(net, facts, temporary, path.suffix)
        difference, largest = compare_features(net, features, x)
        said = f"largest difference {difference:.2g} among features up to {largest:.3g}, {len(x)} pictures"
        if not difference <= TOLERANCE * largest:
            raise UserError(f"{path} is not written: its {said}, is over {TOLERANCE:g} of the largest")
    print(f"{path}: read back, {said} (tolerance {TOLERANCE:g} of the largest)")
    return path


def pictures(image_size: int) -> Tensor:
    """A few pictures as evaluation would show them."""
    images = shapes(NUM_PICTURES, image_size, seed=0)
    return central_crop(torch.from_numpy(images.images), torch.from_numpy(images.true_aspect), image_size)


@torch.no_grad()
def compare_features(net: nn.Module, features: Features, x: Tensor) -> tuple[float, float]:
    """-> largest difference, largest feature."""
    ours, theirs = net(x), features(x)
    assert ours.shape == theirs.shape, f"{list(theirs.shape)} in place of {list(ours.shape)}"
    return float((ours - theirs).abs().max()), float(ours.abs().max())


def to_torchvision(net: Backbone, facts: dict[str, Any], path: Path, suffix: str) -> Features:
    """torchvision's keys, only the classifier missing (.safetensors or .pth)"""
    from torchvision.models import get_model

    name = facts["backbone"]
    if name not in TORCHVISION:
        raise UserError(f"torchvision has no {name}: choose --format {'timm' if name.startswith(TIMM) else 'onnx'}")
    _refuse_small_stem(facts, "torchvision")
    _save(net.state_dict(), facts, path, suffix)
    model = get_model(name, weights=None)
    fill(model, _read(path, suffix), str(path), name, but_classifier=True)
    setattr(model, "fc" if hasattr(model, "fc") else "classifier", nn.Identity())
    return model.eval()


def to_timm(net: Backbone, facts: dict[str, Any], path: Path, suffix: str) -> Features:
    """timm's keys, only the classifier missing (.safetensors or .pth)"""
    name = facts["backbone"]
    twin = name.removeprefix(TIMM) if name.startswith(TIMM) else TIMM_TWINS.get(name)
    if twin is None:
        others = "torchvision or onnx" if name in TORCHVISION else "onnx"
        raise UserError(f"timm has no network that is the same as {name} in every layer: choose --format {others}")
    _refuse_small_stem(facts, "timm")
    model = build_timm(twin, "standard", facts["image_size"])
    # Both list the same layers in the same order under names of their own; a shape that differs would be refused.
    state = dict(zip(model.state_dict(), net.state_dict().values(), strict=True))
    _save(state, {**facts, "backbone": f"{TIMM}{twin}"}, path, suffix)
    fill(model, _read(path, suffix), str(path), twin)
    return model.eval()


def to_onnx(net: Backbone, facts: dict[str, Any], path: Path, suffix: str) -> Features:
    """ONNX: normalised pictures of the run's size in, features out, any number at once (.onnx)"""
    # onnxscript: what torch's exporter is written in
    onnx, _ = (from_extra(name, "onnx", "exporting to ONNX needs two packages more") for name in ("onnx", "onnxscript"))
    example = torch.zeros(2, 3, facts["image_size"], facts["image_size"])
    batch = ({0: torch.export.Dim("batch")},)
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["features"]}
    try:
        with warnings.catch_warnings():  # of torch's exporter about itself: nothing a user can mend
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(net, (example,), dynamic_shapes=batch, verbose=False, **names)
    except torch.onnx.OnnxExporterError as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise UserError(f"torch cannot write {facts['backbone']} as ONNX: {reason}") from None
    program.model.metadata_props["onecrop"] = json.dumps({**facts, "mean": MEAN, "std": STD})
    program.save(path, external_data=False)  # one file
    return _run_onnx(path.read_bytes(), onnx)


def _run_onnx(content: bytes, onnx: Any) -> Features:
    """By onnxruntime where it is installed, else by the slow evaluator that defines what ONNX means."""
    try:
        import onnxruntime
    except ImportError:
        evaluator = onnx.reference.ReferenceEvaluator(onnx.load_from_string(content))
    else:
        evaluator = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(evaluator.run(None, {"images": x.numpy()})[0])


def _refuse_small_stem(facts: dict[str, Any], program: str) -> None:
    """Of the mobile nets the weights would even fit: only strides differ, and features would be wrong in silence."""
    if facts["stem"] == "small":
        raise UserError(
            f"this {facts['backbone']} has the small stem, which {program}'s network has not, and would give other "
            "features there: choose --format onnx, use onecrop.load_backbone, or pretrain with --stem standard"
        )


def _save(state: dict[str, Tensor], facts: dict[str, Any], path: Path, suffix: str) -> None:
    if suffix == ".safetensors":
        save_tensors(path, state, facts)
    else:
        torch.save({key: value.contiguous() for key, value in state.items()}, path)


def _read(path: Path, suffix: str) -> dict[str, Tensor]:
    return load_tensors(path)[0] if suffix == ".safetensors" else torch.load(path, weights_only=True)


STATE = (".safetensors", ".pth")
# name -> usual file, endings that it may have, function that writes it and returns what was read back
FORMATS: dict[str, tuple[str, tuple[str, ...], Callable[[Backbone, dict[str, Any], Path, str], Features]]] = {
    "torchvision": ("torchvision.safetensors", STATE, to_torchvision),
    "timm": ("timm.safetensors", STATE, to_timm),
    "onnx": ("backbone.onnx", (".onnx",), to_onnx),
}
