"""From a recipe to what is trained: the backbone, and the method around it."""

from typing import Any, cast

import torch
from torch import nn

from onecrop.errors import UserError
from onecrop.methods import METHODS, Method
from onecrop.nets import build_backbone
from onecrop.nets.backbones import Backbone, features_length
from onecrop.nets.norms import share_norms
from onecrop.nets.weights import start_from
from onecrop.recipe import Recipe


def build_network(recipe: Recipe, given: nn.Module | None = None) -> Backbone:
    """The backbone a run starts from, a function of the recipe's seed, or the module that was given."""
    assert recipe.image_size is not None, "the recipe is not resolved"
    assert recipe.backbone is not None
    torch.manual_seed(recipe.seed)
    network = build_backbone(recipe.backbone, recipe.stem, recipe.image_size, given)
    if recipe.weights:
        start_from(network, recipe.weights, recipe.backbone, recipe.stem)
    return network


def need_crops(recipe: Recipe, network: Backbone) -> None:
    """Some networks are made for pictures of one size alone, and crops may have another."""
    if recipe.crop_size == recipe.image_size:
        return
    wrong = f"--crop-resolution {recipe.crop_resolution:g} does not go with this network"
    try:
        length = features_length(network, recipe.crop_size)
    except UserError as error:
        raise UserError(f"{wrong}: {error}") from error
    if length != network.dim:
        raise UserError(
            f"{wrong}: of {recipe.crop_size} px it makes {length} features, of whole pictures {network.dim}"
        )


def build_method(recipe: Recipe, num_images: int, network: Backbone | None = None) -> Method:
    """The untrained method; its own draws follow those of `build_network`, which is called here where it was not."""
    network = build_network(recipe) if network is None else network
    assert recipe.precision is not None, "the recipe is not resolved"
    build = cast(Any, METHODS[recipe.method])
    dtype = getattr(torch, recipe.precision)
    return cast(Method, build(recipe.settings, network, num_images, recipe.crop_size, dtype))


def share_batch_norm(method: Method, recipe: Recipe, device: torch.device) -> None:
    """Of several processes: statistics of the whole batch, unless the recipe says that each has its own."""
    group, batch_size = method.group, recipe.batch_size
    assert batch_size is not None, "the recipe is not resolved"
    if group.size == 1:
        return
    if recipe.sync_batch_norm:
        share_norms(method, group, batch_size, device)
    elif batch_size < 2 * group.size:
        raise UserError(f"--sync-batch-norm false: a batch of {batch_size} leaves a process one image; raise it")
