"""What a run will need, before it starts: memory by kind, and, once the step is warm, the time."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from onecrop.augment import central_crop
from onecrop.data import Loader
from onecrop.losses.instance import BLOCK_ELEMENTS, DENSE_ELEMENTS
from onecrop.methods import Method
from onecrop.progress import readable

SAMPLE = 4  # images that go through a copy of the network to see what it keeps for its backward pass


def forecast_memory(method: Method, loader: Loader, image_size: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes on the device by kind; their sum is the peak to expect."""
    parameters = _bytes(method.parameters())
    bank = _bytes(b for name, b in method.named_buffers() if name.startswith("bank."))
    cosines = loss_bytes(loader.batch_size, len(method.get_buffer("bank.weight")), dtype) if bank else 0
    return {
        "data": _bytes([loader.images, loader.aspect]) if loader.resident else 0,
        "bank": bank,
        "network": 3 * parameters + (parameters // 2 if dtype != torch.float32 else 0),  # with gradients and momentum
        "activations": method.crops * loader.batch_size * _saved_per_image(method.backbone, loader, image_size, dtype),
        "loss": cosines,
    }


def loss_bytes(batch_size: int, rows: int, dtype: torch.dtype) -> int:
    """Of the loss over the bank: its cosines in float32, and their slopes in the bank's format."""
    elements = batch_size * rows
    return (elements if elements <= DENSE_ELEMENTS else BLOCK_ELEMENTS) * (4 + dtype.itemsize)


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
    batch = loader.empty()
    x = central_crop(batch.images[:SAMPLE], torch.ones(SAMPLE, device=loader.device), image_size)
    x = x.contiguous(memory_format=torch.channels_last)
    with (
        torch.autocast(x.device.type, dtype=dtype, enabled=dtype != torch.float32),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        copied(x)
    casts = sum(p.numel() * dtype.itemsize for p in copied.parameters()) if dtype != torch.float32 else 0
    return max(0, sum(seen.values()) - casts) // SAMPLE  # weights cast for the products are not activations


def describe_memory(parts: dict[str, int]) -> str:
    names = ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)
    return f"memory to expect: {readable(sum(parts.values()))} ({names})"
