import json

import pytest

from onecrop import Recipe, UserError
from onecrop.compare import member
from onecrop.methods import METHODS
from onecrop.methods.sid import SidSettings
from onecrop.optim import OPTIMIZERS
from onecrop.recipe import describe_hint, hints
from onecrop.recipes import RECIPES, named


@pytest.mark.parametrize("name", RECIPES)
def test_json_round_trip(name):
    recipe = named(name).override({"subset": 10, "crop_scale": 0.3})
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


def test_overrides_reach_recipe_and_settings_from_strings():
    changes = {"epochs": "7", "lr": "1e-3", "subset": "none", "kl": "l2", "calibrate": "false", "dim": "64"}
    recipe = Recipe().override(changes)
    assert (recipe.epochs, recipe.lr, recipe.subset) == (7, 1e-3, None)
    assert (recipe.settings.kl, recipe.settings.calibrate, recipe.settings.dim) == ("l2", False, 64)
    assert list(Recipe().changed(recipe)) == ["epochs", "lr", "dim", "kl", "calibrate"]
    assert not recipe.changed(recipe.override({"lr": None, "out": "elsewhere"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epohcs": 3}, "did you mean 'epochs'"),
        ({"method": "sidd"}, "did you mean 'sid'"),
        ({"backbone": "resnet81"}, "did you mean 'resnet18'"),
        ({"epochs": "many"}, "--epochs 'many' is not valid: it takes INT"),
        ({"epochs": 2.5}, "--epochs 2.5"),
        ({"kl": "l3"}, r"sqrt\|l1\|l2\|none"),
        ({"calibrate": "yes"}, r"true\|false"),
        ({"epochs": 0}, "at least 1"),
        ({"batch_size": 1}, "at least 2"),
        ({"lr": "nan"}, "--lr"),
        ({"epochs": 100, "warmup_epochs": 100}, "--warmup-epochs"),
        ({"bank_momentum": 1.5}, "--bank-momentum"),
        ({"temperature": 0}, "--temperature"),
    ],
)
def test_mistakes_are_named(changes, message):
    with pytest.raises(UserError, match=message):
        Recipe().override(changes)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "sid"])
def test_every_rival_has_a_recipe_for_small_images_and_compare_takes_it(method):
    recipe = named(f"{method}-small")
    assert (recipe.method, recipe.optimizer, recipe.epochs) == (method, "sgd", 400)
    compared = member(Recipe(data="shapes", epochs=3), method)
    assert (compared.data, compared.epochs) == ("shapes", 3)
    assert (compared.lr, compared.weight_decay, compared.settings) == (recipe.lr, recipe.weight_decay, recipe.settings)


@pytest.mark.parametrize(
    ("image_size", "share", "side"),
    [(32, 0.75, 24), (224, 0.75, 168), (64, 0.5, 32), (30, 0.75, 24), (8, 0.5, 8), (9, 0.99, 8), (30, 1, 30)],
)
def test_a_crops_side_is_a_multiple_of_four_or_all_of_the_image(image_size, share, side):
    assert Recipe(image_size=image_size, crop_resolution=share).crop_size == side


def test_recipes_that_are_compared_crop_alike():
    """Those of the paper's tables: an advantage of one must not be the size of its crops."""
    assert {named(name).crop_resolution for name in RECIPES if name == "paper" or name.endswith("-small")} == {1.0}


def test_settings_of_another_type_are_refused():
    with pytest.raises(UserError, match="SidSettings"):
        Recipe(settings=METHODS["sid"].__mro__[1].Settings())  # the base settings


@pytest.mark.parametrize("method", METHODS)
def test_no_setting_hides_a_field_of_the_recipe(method):
    assert not set(hints(METHODS[method].Settings)) & set(hints(Recipe))


def test_optimizers_are_the_ones_in_the_table():
    assert set(describe_hint(hints(Recipe)["optimizer"])[0].split("|")) == set(OPTIMIZERS)


def test_defaults_are_the_papers():
    ours = SidSettings()
    assert (ours.kl_weight, ours.temperature, ours.kl_temperature) == (20, 0.2, 1)
    paper = named("paper")
    assert (paper.epochs, paper.batch_size, paper.momentum, paper.optimizer) == (400, 512, 0.9, "sgd")
    assert (OPTIMIZERS["sgd"].lr, OPTIMIZERS["sgd"].weight_decay) == (1.0, 1e-4)
