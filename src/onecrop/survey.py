"""`onecrop scan`: look through a folder, say what training on it will take, and leave a list and a contact sheet."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onecrop.build import build_method, build_network
from onecrop.choices import choose_image_size, resolve, settle
from onecrop.data import ImageSet, Loader
from onecrop.data.images import fits
from onecrop.data.scan import scan, thumbnails
from onecrop.data.sources import stored_size
from onecrop.device import choose_device, describe
from onecrop.files import write_atomically
from onecrop.forecast import fitting_batch, forecast_memory, forecast_seconds, timed
from onecrop.losses.instance import loss_bytes
from onecrop.optim import OPTIMIZERS
from onecrop.pace import epochs_within
from onecrop.recipe import Recipe
from onecrop.report.scan import draw_contact_sheet, scan_text, sheet_names, write_findings
from onecrop.report.sheet import PICTURE
from onecrop.step import TrainStep

FIRST_BATCH = 8  # images of the first step that is timed
LONGEST_STEP = 10.0  # seconds that the images of a timed step may take, unless less is asked for
TABLES_TO_TRY = 2 * 10**9  # bytes of a bank, queue or classifier that a scan may make only to time a step


def survey(recipe: Recipe, out: Path, json_to: str | None) -> dict[str, Any]:
    """Scan recipe.data and forecast the recipe on it; `json_to` is a file, or - for standard output."""
    found = scan(Path(recipe.data))
    facts = found.facts()
    left = found.num_images - (found.num_repeats if recipe.drop_duplicates else 0)
    facts["forecast"] = forecast(recipe, left) if left >= 2 else None
    written = [write_findings(facts, out / "findings.tsv")]
    if facts["groups"] or facts["broken"]:
        tiles = thumbnails(found.listing, sheet_names(facts), PICTURE)
        written.append(draw_contact_sheet(facts, tiles, out / "contact-sheet.png"))
    text = json.dumps(facts, indent=2) + "\n"
    if json_to == "-":
        print(text, end="")
        return facts
    if json_to is not None:
        write_atomically(Path(json_to), text.encode())
        written.append(Path(json_to))
    print(scan_text(facts))
    print(f"\n{'written':<12} {', '.join(map(str, written))}")
    return facts


def forecast(recipe: Recipe, num_images: int, longest_step: float = LONGEST_STEP) -> dict[str, Any]:
    """What pretraining on so many images will take, without making the run: a small stand-in is measured."""
    device = choose_device(recipe.device)
    recipe = settle(recipe, choose_image_size(recipe, device))
    size = recipe.image_size or 224
    shape = (3, stored_size(size), stored_size(size))
    whole = ImageSet(recipe.data, np.broadcast_to(np.uint8(0), (num_images, *shape)), image_size=size)
    left_open, open_epochs = recipe.batch_size is None, recipe.epochs is None
    recipe = resolve(recipe, whole, device)
    if left_open:
        recipe = replace(recipe, batch_size=fitting_batch(recipe, build_network(recipe), whole, device))
    assert recipe.batch_size is not None
    assert recipe.epochs is not None
    batch_size, epochs = min(recipe.batch_size, num_images), recipe.epochs
    recipe = replace(recipe, batch_size=batch_size)
    few = ImageSet(recipe.data, np.zeros((batch_size, *shape), np.uint8), image_size=size)
    memory, tables = _memory(recipe, few, whole, device)
    step, timed = None, ""
    if tables <= TABLES_TO_TRY:
        step, timed = _seconds_a_step(recipe, few, num_images, device, longest_step)
        if recipe.minutes is not None:
            fitting = epochs_within(recipe.minutes, step * (num_images // batch_size), recipe.settings)
            epochs = fitting if open_epochs else min(epochs, fitting)
    return {
        "run": f"{recipe.method}, {recipe.backbone} at {recipe.image_size} px, crops at {recipe.crop_size}, "
        f"batch {batch_size}",
        "device": describe(device),
        "images": num_images,
        "stored_size": shape[-1],
        "pack": whole.images.nbytes,
        "memory": memory,
        "epochs": epochs,
        "seconds": None if step is None else step * epochs * (num_images // batch_size),
        "timed": timed,
    }


def _memory(recipe: Recipe, few: ImageSet, whole: ImageSet, device: torch.device) -> tuple[dict[str, int], int]:
    """forecast_memory of a run on a few images, put right where it grows with their number; bytes of its tables."""
    dtype, count = getattr(torch, str(recipe.precision)), len(whole)
    method = build_method(recipe, len(few)).to(device)
    loader = Loader(few, len(few), device, recipe.seed)
    memory = forecast_memory(method, loader, recipe.crop_size, dtype)
    small, large = (
        method.tables(recipe.settings, method.backbone.dim, images, len(few), dtype) for images in (len(few), count)
    )
    memory["data"] = whole.images.nbytes + 4 * count if fits(whole.images.nbytes, device) else 0
    if memory["bank"]:
        memory["bank"] = memory["bank"] * count // len(few)
        memory["loss"] = loss_bytes(len(few), count, recipe.flat()["dim"], dtype, device)
    if "classifier" in large:  # trained: weights, gradient and momentum, as all of the network
        weights = sum(parameter.nbytes for parameter in method.parameters())
        memory["network"] = memory["network"] * (weights - small["classifier"] + large["classifier"]) // weights
        memory["loss"] = large.pop("logits")
    return memory, sum(large.values())


def _seconds_a_step(
    recipe: Recipe, few: ImageSet, num_images: int, device: torch.device, longest: float
) -> tuple[float, str]:
    """From real training steps, bank and optimiser included, and how they were taken."""
    assert recipe.lr is not None
    assert recipe.weight_decay is not None
    assert recipe.optimizer is not None
    method = build_method(recipe, num_images).to(device).to(memory_format=torch.channels_last)
    rate = torch.tensor(recipe.lr, device=device)
    optimizer = OPTIMIZERS[recipe.optimizer].build(method.parameters(), rate, recipe.momentum, recipe.weight_decay)

    def seconds(batch_size: int) -> float:
        step = TrainStep(method, optimizer, Loader(few, batch_size, device, recipe.seed), recipe.seed, fast=False)
        return timed(lambda: step(0, 0.0, 0.0), device)

    first = min(len(few), FIRST_BATCH)
    taken, size = forecast_seconds(seconds, first, len(few), longest)
    return taken, f"from steps of {first} to {size} images, not compiled"
