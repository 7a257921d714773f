"""What a run will need, before it starts: memory by kind, and, once the step is warm, the time."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from onecrop.augment import central_crop
from onecrop.data import Loader
from onecrop.device import free_memory
from onecrop.errors import UserError
from onecrop.losses.instance import BLOCK_ELEMENTS, DENSE_ELEMENTS
from onecrop.methods import METHODS, Method
from onecrop.recipe import Recipe

SAMPLE = 4  # images that go through a copy of the network to see what it keeps for its backward pass


def need_memory(recipe: Recipe, num_images: int, device: torch.device) -> None:
    """Refuse, before anything is built, a run whose tables alone are more than the device has free."""
    assert recipe.precision is not None, "the recipe is not resolved"
    assert recipe.batch_size is not None
    dtype = getattr(torch, recipe.precision)
    parts = METHODS[recipe.method].tables(recipe.settings, num_images, recipe.batch_size, dtype)
    if "classifier" in parts:
        moments = 2 if recipe.optimizer == "adamw" else 1
        parts |= {"gradient": parts["classifier"], "momentum": moments * parts["classifier"]}
    needed, free = sum(parts.values()), free_memory(device)
    if free is None or needed <= free:
        return
    kinds = ", ".join(f"{name} {_readable(size)}" for name, size in parts.items())
    remedy = "--queue-size or --dim" if "queue" in parts else "--subset or --dim"
    if "classifier" in parts:
        remedy += ", or take --method sid, whose bank has no gradient"
    raise UserError(
        f"{recipe.method} over {num_images:,} images with --dim {recipe.flat()['dim']} needs at least "
        f"{_readable(needed)} ({kinds}), and {_readable(free)} are free on {device}: lower {remedy}"
    )


def forecast_memory(method: Method, loader: Loader, image_size: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes on the device by kind; their sum is the peak to expect."""
    parameters = _bytes(method.parameters())
    bank = _bytes(b for name, b in method.named_buffers() if name.startswith("bank."))
    cosines = 0
    if bank:
        rows = len(method.get_buffer("bank.weight"))
        elements = loader.batch_size * rows
        elements = elements if elements <= DENSE_ELEMENTS else BLOCK_ELEMENTS
        cosines = elements * (4 + dtype.itemsize)  # in float32, and their slopes in the bank's format
    tables = method.tables(method.settings, loader.num_images, loader.batch_size, dtype)
    return {
        "data": _bytes([loader.images, loader.aspect]) if loader.resident else 0,
        "bank": bank,
        "network": 3 * parameters + (parameters // 2 if dtype != torch.float32 else 0),  # with gradients and momentum
        "activations": method.crops * loader.batch_size * _saved_per_image(method.backbone, loader, image_size, dtype),
        "loss": cosines + tables.get("logits", 0),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _saved_per_image(backbone: nn.Module, loader: Loader, image_size: int, dtype: torch.dtype) -> int:
    """Bytes that autograd keeps of a forward pass, through a copy of the network: nothing of the run changes."""
    copied = copy.deepcopy(backbone).train()
    mine = {p.data_ptr() for p in copied.parameters()}
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in mine and tensor.numel() >= SAMPLE:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = tensor.numel() * tensor.element_size()
            kept.append(tensor)  # alive until counted, or another tensor would take its address
        return tensor

    kept: list[Tensor] = []
    images = loader.empty().images[:SAMPLE]
    x = central_crop(images, torch.ones(len(images), device=loader.device), image_size)
    x = x.contiguous(memory_format=torch.channels_last)
    with (
        torch.autocast(x.device.type, dtype=dtype, enabled=dtype != torch.float32),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        copied(x)
    casts = sum(p.numel() * dtype.itemsize for p in copied.parameters()) if dtype != torch.float32 else 0
    return max(0, sum(seen.values()) - casts) // len(images)  # weights cast for the products are not activations


def describe_memory(parts: dict[str, int]) -> str:
    names = ", ".join(f"{name} {_readable(size)}" for name, size in parts.items() if size)
    return f"memory to expect: {_readable(sum(parts.values()))} ({names})"


def _readable(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
