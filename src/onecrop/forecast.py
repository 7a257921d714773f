"""What a run will need, before it starts: memory by kind, and the time that work takes, from some of it."""

import copy
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from onecrop.choices import LEAST_BATCH
from onecrop.data import ImageSet, Loader
from onecrop.data.images import fits
from onecrop.device import free_memory
from onecrop.distributed import ALONE
from onecrop.errors import UserError
from onecrop.losses.instance import loss_bytes
from onecrop.methods import METHODS, Method
from onecrop.nets.backbones import Backbone
from onecrop.nets.depth import share_depth
from onecrop.progress import readable
from onecrop.recipe import Recipe

MOMENTS = {"adamw": 2}  # tensors that an optimiser keeps beside each weight, where it is not one
MARGIN = 1.25  # by which a forecast may be off
ROOM = 1.2  # times what is forecast has to be free for a batch that is chosen: for the head, the loss, and what is off
SAMPLE = 4  # images that go through a copy of the network to see what it keeps for its backward pass
GROWTH = 4  # by which the work grows from one that is timed to the next


def need_memory(recipe: Recipe, feature_dim: int, num_images: int, device: torch.device, processes: int = 1) -> None:
    """Refuse, before anything is built, a run whose tables alone are more than the device has free.

    Of several processes, a device each, every one holds its part of what has a row an image.
    """
    assert recipe.batch_size is not None, "the recipe is not resolved"
    parts = _tables(recipe, feature_dim, num_images, recipe.batch_size)
    parts = {name: size if name == "queue" else size // processes for name, size in parts.items()}
    needed, free = sum(parts.values()), free_memory(device)
    if free is None or needed <= free:
        return
    kinds = ", ".join(f"{name} {readable(size)}" for name, size in parts.items())
    remedy = "lower --queue-size or --dim" if "queue" in parts else "lower --subset or --dim"
    if "drawn rows" in parts:
        remedy = "lower --noise-samples or --batch-size, or pass --objective softmax"
    if "classifier" in parts:
        remedy = "lower --subset, or take --method sid, whose bank has no gradient"
    raise UserError(
        f"{recipe.method} over {num_images:,} images needs at least {readable(needed)} ({kinds}), "
        f"and {readable(free)} are free on {device}: {remedy}"
    )


def _tables(recipe: Recipe, feature_dim: int, num_images: int, batch_size: int) -> dict[str, int]:
    """Those of the recipe's method; of one that is trained what goes with each weight, too."""
    assert recipe.precision is not None, "the recipe is not resolved"
    dtype = getattr(torch, recipe.precision)
    parts = METHODS[recipe.method].tables(recipe.settings, feature_dim, num_images, batch_size, dtype)
    if "classifier" in parts:
        moments = MOMENTS.get(str(recipe.optimizer), 1)
        parts |= {"gradient": parts["classifier"], "momentum": moments * parts["classifier"]}
    return parts


def need_step(parts: dict[str, int], method: Method, batch_size: int, device: torch.device) -> None:
    """Refuse, before the first step, one that takes more than is free: a system short of memory kills without a word.

    parts: of `forecast_memory`, of which data, bank and weights are there already.
    """
    kept, free = parts["network"] - _bytes(method.parameters()), free_memory(device)  # gradients, momentum: exact
    passing = parts["activations"] + parts["loss"]
    if free is not None and kept + passing / MARGIN > free:
        remedy = "lower --batch-size or --image-size"
        if kept > passing:
            remedy = "take a smaller --backbone or, under pid, a smaller --subset"
        raise UserError(
            f"a step of {batch_size:,} images needs about {readable(kept + passing)} beside data, bank and weights, "
            f"and {readable(free)} are free on {device}: {remedy}"
        )


def fitting_batch(recipe: Recipe, network: Backbone, images: ImageSet, device: torch.device, processes: int = 1) -> int:
    """The recipe's batch, halved until a step fits into what a GPU has free; on a CPU as it is."""
    assert recipe.precision is not None, "the recipe is not resolved"
    assert recipe.batch_size is not None
    free, batch, dtype = free_memory(device), recipe.batch_size, getattr(torch, recipe.precision)
    if device.type != "cuda" or free is None:
        return batch
    method = METHODS[recipe.method]
    saved = method.crops * _saved_per_image(network, min(SAMPLE, batch), torch.device("cpu"), recipe.crop_size, dtype)
    fixed = 4 * _bytes(network.parameters())  # with gradients, momentum and short copies
    fixed += images.images.nbytes if fits(images.images.nbytes, device) else 0
    while batch > LEAST_BATCH:
        tables = _tables(recipe, network.dim, len(images), batch)
        if fixed + (sum(tables.values()) + batch * saved) // processes <= free / ROOM:
            break
        batch //= 2
    return batch


def checkpoint_bytes(recipe: Recipe, method: Method) -> int:
    """Of the whole run, the parts of other processes included."""
    state = method.state_dict()
    elsewhere = (method.group.size - 1) * _bytes(value for name, value in state.items() if name in method.shards)
    return _bytes(state.values()) + elsewhere + MOMENTS.get(str(recipe.optimizer), 1) * _bytes(method.parameters())


def forecast_memory(method: Method, loader: Loader, crop_size: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes on the device by kind; their sum is the peak to expect."""
    parameters = _bytes(method.parameters())
    bank = _bytes(b for name, b in method.named_buffers() if name.startswith("bank."))
    tables = method.tables(method.settings, method.backbone.dim, loader.num_images, loader.batch_size, dtype)
    parts = sum(tables.get(name, 0) for name in ("logits", "drawn rows")) // method.group.size
    count = min(SAMPLE, loader.part_size)
    saved = _saved_per_image(method.backbone, count, loader.device, crop_size, dtype)
    cosines = 0
    if bank and "drawn rows" not in tables:
        rows = method.get_buffer("bank.weight")
        cosines = loss_bytes(loader.batch_size, len(rows), rows.shape[1], dtype, loader.device)
    return {
        "data": loader.num_images * loader.images[0].nbytes + loader.aspect.nbytes if loader.resident else 0,
        "bank": bank,
        "network": 3 * parameters + (parameters // 2 if dtype != torch.float32 else 0),  # with gradients and momentum
        "activations": method.crops * loader.part_size * saved,
        "loss": cosines + parts,
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def _saved_per_image(backbone: nn.Module, count: int, device: torch.device, crop_size: int, dtype: torch.dtype) -> int:
    """Bytes that autograd keeps of a forward pass, through a copy of the network: nothing of the run changes."""
    copied = copy.deepcopy(backbone).train()
    share_depth(copied, ALONE, 0)  # not the images of a step
    mine = {p.data_ptr() for p in copied.parameters()}
    seen: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        tensor = saved.detach()  # with its history a layer's result would hold itself, and stay for good
        if tensor.data_ptr() not in mine and tensor.numel() >= SAMPLE:
            seen[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            kept.append(tensor)  # alive until counted, or another tensor would take its address
        return tensor

    kept: list[Tensor] = []
    x = torch.zeros(count, 3, crop_size, crop_size, device=device)
    x = x.contiguous(memory_format=torch.channels_last)
    with (
        torch.random.fork_rng([x.device] if x.is_cuda else []),  # layers that draw
        torch.autocast(x.device.type, dtype=dtype, enabled=dtype != torch.float32),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        copied(x)
    casts = sum(p.numel() * dtype.itemsize for p in copied.parameters()) if dtype != torch.float32 else 0
    return max(0, sum(seen.values()) - casts) // count  # weights cast for the products are not activations


def describe_memory(parts: dict[str, int]) -> str:
    names = ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)
    return f"memory to expect: {readable(sum(parts.values()))} ({names})"


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that it takes, on the device too."""
    started = time.monotonic()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - started


def forecast_seconds(seconds: Callable[[int], float], first: int, whole: int, longest: float) -> tuple[float, int]:
    """Of work on so many things as `whole`, from smaller ones that are done and timed; and the largest of them.

    Two sizes tell what it takes a thing from what it takes by itself. The largest is the whole where that is quick
    enough: its things take at most `longest` seconds.
    """
    size = first
    seconds(first)  # prepares much, and does not count
    base = taken = seconds(first)
    slope = 0.0
    while size < whole and slope * GROWTH * size < longest:
        size = min(whole, GROWTH * size)
        taken = seconds(size)
        slope = max(0.0, taken - base) / (size - first)
    return taken + slope * (whole - size), size
