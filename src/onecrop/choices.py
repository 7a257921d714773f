"""What a run does where its recipe leaves it open: from the data and the device, each choice with its reason.

On a GPU the choices are the defaults that were measured there. On a CPU they are a small, honest start: minutes for a
few thousand photographs. Whatever a recipe or a flag says is never chosen here.
"""

import statistics
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from onecrop.data import SOURCES, ImageSet
from onecrop.data.archives import is_archive
from onecrop.data.listing import Listing
from onecrop.data.scan import list_pictures
from onecrop.device import choose_precision, triton_works
from onecrop.nets.backbones import MODULE, SMALL_IMAGE, TIMM, check_stem
from onecrop.optim import OPTIMIZERS
from onecrop.recipe import Recipe, flag, spelled

DENSE = ("resnet18", "resnet50", "tiny")  # networks without depthwise convolutions
CROPS = 400_000  # of a run on a CPU, or on few images: three to four minutes of two cores for tiny at 64 px
GPU_EPOCHS = 100  # where those are not more
MOST_EPOCHS = 800  # 500 images gained 4 to 5 points from 100 to 800 epochs
LEAST_REDUCED = 32  # px of images whose crops are made smaller
LEAST_STEPS = 8  # an epoch, where there are enough images
LEAST_BATCH = 16  # batch norm and the other images of a batch need some
COMPILED_STEPS = 5000  # from here on a compiled step gains what compiling costs: 3 of 9 ms for ResNet-18 at 32 px
LONG_RUN = 12_000  # steps; up to about there Muon's decay was measured at .05: by lr·wd a weight forgets six times
MANY_IMAGES = 20_000  # between 10,000, where rows and neighbours made no difference, and 45,000, where they did
SAMPLED_FILES = 100  # whose headers are read to see how large the images of a folder are


class Choice(NamedTuple):
    value: Any
    reason: str


class Given(NamedTuple):
    """What is known when a choice is made: the fields that are settled, the data and the device."""

    fields: Mapping[str, Any]
    chosen: Collection[str]  # those of them that nobody said
    num_images: int
    gpu: bool
    precision: str


def folder_image_size(side: float, gpu: bool) -> Choice:
    """side: the shorter side of a typical image, in pixels."""
    most = 224 if gpu else 64
    seen = f"the images' shorter side is about {side:.0f} px"
    if side >= most:
        return Choice(most, f"{seen}; {'the usual size' if gpu else 'twice the size takes four times as long'}")
    return Choice(max(16, int(side) // 8 * 8), f"{seen}: enlarging them would add nothing")


def _backbone(given: Given) -> Choice:
    if given.gpu:
        return Choice("resnet18", "the network of the measured recipes; resnet50 if there is time")
    return Choice("tiny", "about 1,000 images/s a core at 64 px, where resnet18 makes 100 to 200")


def _stem(given: Given) -> Choice:
    size = given.fields["image_size"]
    if given.fields["backbone"].startswith(MODULE):
        return Choice(None, "a module has a stem of its own")
    if size > SMALL_IMAGE:
        return Choice("standard", f"for images over {SMALL_IMAGE} px")
    # A network that was named is the same one on every device.
    if not given.gpu and size > SMALL_IMAGE // 2 and "backbone" in given.chosen:
        return Choice("standard", f"at {size} px the small one takes four times as long on a CPU")
    return Choice("small", f"the first strides are 1, for {size} px have no resolution to lose")


def _crop_resolution(given: Given) -> Choice:
    size = given.fields["image_size"]
    if given.fields["backbone"].startswith((TIMM, MODULE)):
        return Choice(1.0, "a network of another make may take pictures of one size alone")
    if size < LEAST_REDUCED:
        return Choice(1.0, f"{size} px have no resolution to lose")
    if given.gpu and size > SMALL_IMAGE:
        return Choice(1.0, f"0.75 takes about half the time, and is untried above {SMALL_IMAGE} px")
    return Choice(0.75, "a crop is a part of a picture: so small, things in it look as large as in the whole one")


def _batch_size(given: Given) -> Choice:
    most = 512 if given.gpu else 128
    wanted = max(LEAST_BATCH, given.num_images // LEAST_STEPS)
    size = 1 << (min(most, wanted).bit_length() - 1)  # the power of two below
    if size >= given.num_images:
        return Choice(max(2, given.num_images), f"all {given.num_images} images")  # of one the loader says why not
    if size == most:
        return Choice(most, "the paper's" if given.gpu else "the demo's, on two cores")
    return Choice(size, f"{given.num_images} images make {given.num_images // size} steps an epoch so")


def _epochs(given: Given) -> Choice:
    epochs = min(MOST_EPOCHS, round(CROPS / given.num_images))
    if given.gpu and epochs <= GPU_EPOCHS:
        return Choice(GPU_EPOCHS, "a quarter of the paper's reaches most of the accuracy")
    epochs = max(5, epochs)
    crops = f"{epochs * given.num_images:,} crops in all"
    if epochs >= GPU_EPOCHS:
        return Choice(epochs, f"{crops}: few images take many passes")
    return Choice(epochs, f"{crops}, for a CPU; a GPU would be given {GPU_EPOCHS} epochs")


def _optimizer(given: Given) -> Choice:
    if given.fields["method"] == "pid":
        return Choice("muon", "as for the others, which gain by it; pid does not: --recipe pid-small has SGD")
    if given.fields["method"] != "sid":
        return Choice("muon", "7 to 16 points over the published SGD, with few images and a small network")
    return Choice("muon", "6 points over SGD at 40 epochs on CIFAR-10")


def _lr(given: Given) -> Choice:
    optimizer = given.fields["optimizer"]
    return Choice(OPTIMIZERS[optimizer].lr, f"what suits {optimizer}")


def _weight_decay(given: Given) -> Choice:
    optimizer, steps = given.fields["optimizer"], _steps(given)
    usual = OPTIMIZERS[optimizer].weight_decay
    if optimizer == "muon" and steps > LONG_RUN:
        less = float(f"{usual * LONG_RUN / steps:.2g}")
        return Choice(less, f"in {steps:,} steps weights forget as often so as by {usual} in {LONG_RUN:,}")
    return Choice(usual, f"what suits {optimizer}")


def _steps(given: Given) -> int:
    return given.fields["epochs"] * (given.num_images // given.fields["batch_size"])


def _precision(given: Given) -> Choice:
    if given.precision == "bfloat16" and not given.gpu and given.fields["backbone"] not in DENSE:
        return Choice("float32", "on a CPU depthwise convolutions take longer in bfloat16")
    return Choice(given.precision, "what this device computes fastest in")


def _compile(given: Given) -> Choice:
    if not given.gpu:
        return Choice(False, "it is for GPUs")
    if not triton_works():
        return Choice(False, "it takes Triton, a C compiler and Python's headers, and they are not all here")
    steps = _steps(given)
    if steps < COMPILED_STEPS:
        return Choice(False, f"up to a minute at the start, more than it saves in {steps:,} steps")
    return Choice(True, f"up to a minute at the start, and a third off each of {steps:,} steps")


def _hidden(given: Given) -> Choice:
    if given.gpu:
        return Choice(2048, "the released code's")
    return Choice(256, "with 2048 the head alone would take seconds a step on a CPU")


def _dim(given: Given) -> Choice:
    if given.gpu:
        return Choice(256, "scores as the released code's 2048, with an eighth of the bank")
    return Choice(128, "in proportion to the head")


def _cutmix(given: Given) -> Choice:
    if given.fields["backbone"] == "tiny":
        return Choice(0.0, "it takes more from so small a network than it gives: 1 to 2 points on CIFAR-10")
    return Choice(0.5, "the released code's")


def _bank_momentum(given: Given) -> Choice:
    if given.gpu and given.num_images >= MANY_IMAGES:
        return Choice(0.2, "rows that follow faster gained half a point from 45,000 images")
    return Choice(0.5, "the paper's")


def _relation(given: Given) -> Choice:
    if given.gpu and given.num_images >= MANY_IMAGES:
        return Choice(0.9, "neighbours in the bank as targets gained a point from 45,000 images")
    return Choice(0.0, "the paper's; neighbours as targets gained from 45,000 images on a GPU, from 10,000 nothing")


def _relation_rise(given: Given) -> Choice:
    return Choice(0.95, "a share that grows to the end may be the larger one")


# In this order: a choice may look at those above it.
CHOICES: dict[str, Callable[[Given], Choice]] = {
    "backbone": _backbone,
    "stem": _stem,
    "crop_resolution": _crop_resolution,
    "batch_size": _batch_size,
    "epochs": _epochs,
    "optimizer": _optimizer,
    "lr": _lr,
    "weight_decay": _weight_decay,
    "precision": _precision,
    "compile": _compile,
    "hidden": _hidden,
    "dim": _dim,
    "cutmix": _cutmix,
    "bank_momentum": _bank_momentum,
    "relation": _relation,
    "relation_rise": _relation_rise,
}
BY_STEPS = ("weight_decay", "compile")  # those that hang on their number


def choose(fields: Mapping[str, Any], num_images: int, gpu: bool, precision: str) -> dict[str, Choice]:
    """Every field that is there and None, and may be chosen -> its value and why."""
    settled = dict(fields)
    made: dict[str, Choice] = {}
    for name, decide in CHOICES.items():
        if name in settled and settled[name] is None:
            made[name] = decide(Given(settled, made, num_images, gpu, precision))
            settled[name] = made[name].value
    return made


def choose_image_size(recipe: Recipe, device: torch.device) -> dict[str, Choice]:
    """Of a folder or archive, before its images are decoded to that size; named data sets have their own."""
    root = Path(recipe.data)
    if recipe.image_size is not None or recipe.data in SOURCES or not (root.is_dir() or is_archive(root)):
        return {}
    side = typical_side(list_pictures(root))
    return {} if side is None else {"image_size": folder_image_size(side, device.type == "cuda")}


def choose_all(recipe: Recipe, images: ImageSet, device: torch.device) -> dict[str, Choice]:
    made = {}
    if recipe.image_size is None:
        made["image_size"] = Choice(images.image_size, "the data set's own")
    fields = {**recipe.flat(), "image_size": recipe.image_size or images.image_size}
    return made | choose(fields, len(images), device.type == "cuda", choose_precision(device))


def choose_by_steps(
    recipe: Recipe, chosen: Mapping[str, Choice], images: ImageSet, device: torch.device
) -> tuple[Recipe, dict[str, Choice]]:
    """After a change of epochs or batch size: what hangs on the number of steps is chosen anew if it was chosen."""
    again = {name: None for name in BY_STEPS if name in chosen}
    made = choose_all(recipe.override(again), images, device)
    return settle(recipe, made), {**chosen, **made}


def resolve(recipe: Recipe, images: ImageSet, device: torch.device) -> Recipe:
    """Fill in every None: what a run did is read from its recipe, not from defaults of the day."""
    return settle(recipe, choose_all(recipe, images, device))


def settle(recipe: Recipe, made: Mapping[str, Choice]) -> Recipe:
    check_stem(recipe.backbone or "", recipe.stem)
    return recipe.override({name: choice.value for name, choice in made.items()})


def describe_choices(made: Mapping[str, Choice]) -> list[str]:
    """One line a choice, as the flag that would say the same."""
    return [f"{flag(name)} {spelled(c.value)}: {c.reason}" for name, c in made.items() if c.value is not None]


def typical_side(listing: Listing) -> float | None:
    """Median of the shorter sides of a sample, from the files' headers; None where none can be read."""
    sample = listing.entries[:: max(1, len(listing.entries) // SAMPLED_FILES)]
    sides = []
    for opener in listing.openers(sample):
        try:
            with warnings.catch_warnings(), opener() as file:  # of very large images: nothing is decoded here
                warnings.simplefilter("ignore")
                with Image.open(file) as image:
                    sides.append(min(image.size))
        except Exception:  # a broken file is the pack's business
            continue
    return statistics.median(sides) if sides else None
