"""What stands before a run's first step: choices made, images there, the network built, memory looked at."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from onecrop.build import build_network, need_crops
from onecrop.choices import Choice, choose_all, choose_by_steps, choose_image_size, describe_choices, settle
from onecrop.data import ImageSet, Loader, load
from onecrop.data.sources import Labelled, load_labelled
from onecrop.device import describe, triton_works
from onecrop.distributed import world
from onecrop.errors import UserError
from onecrop.forecast import fitting_batch, need_memory
from onecrop.nets.backbones import Backbone
from onecrop.nets.weights import hash_weights
from onecrop.recipe import Recipe


class Opening(NamedTuple):
    recipe: Recipe  # nothing in it is left open
    chosen: dict[str, Choice]  # what it left open, and why it is now as it is
    images: ImageSet
    loader: Loader
    network: Backbone
    sets: Labelled | None  # what probes along the way are scored on
    weights_sha256: str | None  # of the weights it starts from

    def with_epochs(self, epochs: Choice) -> "Opening":
        recipe = replace(self.recipe, epochs=epochs.value)
        recipe, chosen = choose_by_steps(recipe, self.chosen | {"epochs": epochs}, self.images, self.loader.device)
        return self._replace(recipe=recipe.agreed(world()), chosen=chosen)

    def describe(self) -> list[str]:
        """The run's first lines."""
        recipe, processes = self.recipe, world().size
        return [
            *describe_choices(self.chosen),
            f"{recipe.data}: {len(self.images):,} images at {recipe.image_size} px, crops at {recipe.crop_size}; "
            f"{recipe.backbone}, {recipe.stem or 'its own'} stem; {recipe.method}, {recipe.optimizer} lr {recipe.lr:g}"
            f"; {f'{processes} × ' * (processes > 1)}{describe(self.loader.device)}, {recipe.precision}",
        ]


def open_run(recipe: Recipe, device: torch.device, backbone: nn.Module | None, begun: bool) -> Opening:
    """begun: there is a checkpoint to go on from, and the weights to start from are behind it."""
    group = world()
    if recipe.compile and device.type == "cuda" and not triton_works():
        raise UserError(
            "--compile true takes Triton, a C compiler and Python's headers, which are not all here: drop it"
        )
    chosen = choose_image_size(recipe, device)
    recipe = settle(recipe, chosen).agreed(group)
    with group.by_turns():
        images = load(recipe.data, "train", recipe.request())
    images.need_same(group)
    chosen |= choose_all(recipe, images, device)
    recipe = settle(recipe, chosen).agreed(group)
    network = build_network(replace(recipe, weights=None) if begun else recipe, backbone)
    need_crops(recipe, network)
    need_memory(recipe, network.dim, len(images), device, group.size)
    if "batch_size" in chosen:
        fitting = fitting_batch(recipe, network, images, device, group.size)
        if fitting != recipe.batch_size:
            chosen["batch_size"] = Choice(fitting, "a larger one does not fit into the GPU's free memory")
            recipe, chosen = choose_by_steps(replace(recipe, batch_size=fitting), chosen, images, device)
        recipe = recipe.agreed(group)
    sets = None
    if recipe.probe_every:
        with group.by_turns():
            sets = load_labelled(recipe.data, recipe.request())  # now, not after the first epoch: it may have no labels
    assert recipe.batch_size is not None
    loader = Loader(images, recipe.batch_size, device, recipe.seed, group)
    sha256 = hash_weights(recipe.weights, str(recipe.backbone)) if recipe.weights and not begun else None
    return Opening(recipe, chosen, images, loader, network, sets, sha256)
