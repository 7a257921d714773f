"""What is chosen where a recipe leaves it open, and that nothing else is."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from onecrop import Recipe, UserError
from onecrop.choices import (
    CHOICES,
    DENSE,
    Choice,
    choose,
    choose_all,
    choose_by_steps,
    describe_choices,
    folder_image_size,
    resolve,
    settle,
    typical_side,
)
from onecrop.data.images import ImageSet
from onecrop.data.scan import list_pictures
from onecrop.nets import BACKBONES
from onecrop.recipes import RECIPES, named

CPU = torch.device("cpu")
OPEN = {**Recipe().flat(), "image_size": 64}


def values(gpu, num_images=5000, **fields):
    made = choose({**OPEN, **fields}, num_images, gpu, "bfloat16" if gpu else "float32")
    assert all(choice.reason for choice in made.values())
    return {name: choice.value for name, choice in made.items()}


def noise(count, size=32):
    return ImageSet("noise", np.zeros((count, 3, size, size), np.uint8), image_size=size)


def test_on_a_gpu_the_defaults_that_were_measured_there(monkeypatch):
    made = values(True, num_images=50_000, image_size=32)
    assert made == {
        "backbone": "resnet18",
        "stem": "small",
        "crop_resolution": 0.75,
        "batch_size": 512,
        "epochs": 100,
        "optimizer": "muon",
        "lr": 0.02,
        "weight_decay": 0.05,
        "precision": "bfloat16",
        "compile": True,
        "hidden": 2048,
        "dim": 256,
        "cutmix": 0.5,
        "bank_momentum": 0.2,
        "relation": 0.9,
        "relation_rise": 0.95,
    }
    assert values(True, image_size=224)["stem"] == "standard"
    assert values(True, num_images=480, epochs=100)["compile"] is False  # 1,500 steps are over before a compiler is
    assert values(False, num_images=50_000)["compile"] is False
    monkeypatch.setattr("onecrop.choices.triton_works", lambda: False)
    assert values(True, num_images=50_000)["compile"] is False  # nothing to compile with, as on Windows


def test_on_a_cpu_a_few_thousand_images_take_minutes():
    made = values(False, num_images=4000)
    assert made["backbone"] == "tiny"
    assert made["stem"] == "standard"
    assert made["epochs"] * 4000 == 400_000
    assert (made["batch_size"], made["precision"]) == (128, "float32")
    assert made["hidden"] <= 256
    assert values(False, image_size=32)["stem"] == "small"
    assert values(False, backbone="resnet18")["stem"] == values(True, backbone="resnet18")["stem"] == "small"


@pytest.mark.parametrize(
    ("backbone", "chosen"),
    [("tiny", "bfloat16"), ("resnet18", "bfloat16"), ("mobilenet_v3_small", "float32"), ("timm/x", "float32")],
)
def test_a_cpu_that_multiplies_bfloat16_uses_it_where_it_is_faster(backbone, chosen):
    fields = {**OPEN, "backbone": backbone}
    made = choose(fields, 4000, gpu=False, precision="bfloat16")["precision"]
    assert made.value == chosen
    assert ("depthwise" in made.reason) == (chosen == "float32")
    assert choose(fields, 4000, gpu=True, precision="bfloat16")["precision"].value == "bfloat16"
    assert choose(fields, 4000, gpu=False, precision="float32")["precision"].value == "float32"


def test_networks_called_dense_have_no_depthwise_convolutions():
    for name, build in BACKBONES.items():
        grouped = any(isinstance(m, nn.Conv2d) and m.groups > 1 for m in build("small").modules())
        assert grouped == (name not in DENSE), name


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("count", [2, 3, 15, 16, 17, 20, 100, 1000, 4095, 10**6])
def test_the_batch_never_exceeds_the_images(gpu, count):
    size = values(gpu, num_images=count)["batch_size"]
    assert 2 <= size <= min(count, 512)
    assert count < 128 or count // size >= 8
    assert (100 if gpu else 5) <= values(gpu, num_images=count)["epochs"] <= 800
    assert values(gpu, num_images=1)["batch_size"] == 2  # the loader then says what one image lacks


@pytest.mark.parametrize(("count", "on_a_cpu", "on_a_gpu"), [(60, 800, 800), (1000, 400, 400), (8000, 50, 100)])
def test_few_images_take_many_passes(count, on_a_cpu, on_a_gpu):
    assert values(False, num_images=count)["epochs"] == on_a_cpu
    assert values(True, num_images=count)["epochs"] == on_a_gpu


def test_what_is_given_is_never_chosen():
    given = {"backbone": "resnet50", "epochs": 3, "batch_size": 7, "optimizer": "sgd", "hidden": 9}
    made = values(False, **given)
    assert not set(given) & set(made)
    assert made["lr"] == 1.0  # what suits the optimizer that was given
    whole = dict.fromkeys(CHOICES, 1)
    assert choose({**OPEN, **whole}, 100, gpu=False, precision="float32") == {}


def test_methods_without_a_field_are_not_given_one():
    assert not {"dim", "hidden"} & set(choose(Recipe(method="npid").flat() | {"image_size": 32}, 9, False, "float32"))


@pytest.mark.parametrize("gpu", [False, True])
def test_the_smallest_network_is_spared_cutmix(gpu):
    assert values(gpu, backbone="tiny")["cutmix"] == 0
    assert values(gpu, backbone="mobilenet_v3_small")["cutmix"] == 0.5


@pytest.mark.parametrize(
    ("changes", "share"),
    [({}, 0.75), ({"image_size": 28}, 1.0), ({"backbone": "timm/x"}, 1.0), ({"backbone": "module/Mine"}, 1.0)],
)
def test_crops_are_smaller_where_there_is_resolution_to_lose(changes, share):
    assert values(False, **changes)["crop_resolution"] == values(True, **changes)["crop_resolution"] == share
    assert "crop_resolution" not in values(False, crop_resolution=0.5, **changes)


def test_crops_of_large_images_on_a_gpu_keep_their_size():
    assert values(True, image_size=224)["crop_resolution"] == 1.0
    assert values(False, image_size=224)["crop_resolution"] == 0.75


@pytest.mark.parametrize(
    ("epochs", "optimizer", "decay"),
    [(20, "muon", 0.05), (100, "muon", 0.05), (400, "muon", 0.015), (800, "muon", 0.0077), (400, "sgd", 1e-4)],
)
def test_the_longer_the_run_the_weaker_muons_decay(epochs, optimizer, decay):
    """From 12,000 steps on lr·wd·steps is the same."""
    made = choose({**OPEN, "epochs": epochs, "optimizer": optimizer}, 50_000, gpu=True, precision="bfloat16")
    assert made["weight_decay"].value == decay
    assert ("forget" in made["weight_decay"].reason) == (epochs > 100 and optimizer == "muon")


def test_decay_is_chosen_again_when_epochs_or_batch_change():
    images = noise(640, 8)
    for said, after in (({}, 0.03), ({"weight_decay": 0.3}, 0.3)):
        recipe = Recipe(data="noise", epochs=100, batch_size=64, optimizer="muon").override(said)
        chosen = choose_all(recipe, images, CPU)
        recipe = settle(recipe, chosen)
        assert recipe.weight_decay == said.get("weight_decay", 0.05)
        longer = recipe.override({"epochs": 2000})  # 20,000 steps
        longer, reasons = choose_by_steps(longer, chosen | {"epochs": Choice(2000, "fits")}, images, CPU)
        assert longer.weight_decay == after
        assert reasons["epochs"].reason == "fits"
        assert ("weight_decay" in reasons) != bool(said)


@pytest.mark.parametrize(("gpu", "count"), [(True, 10_000), (False, 50_000)])
def test_neighbours_are_targets_only_where_that_was_seen_to_gain(gpu, count):
    made = values(gpu, num_images=count)
    assert (made["bank_momentum"], made["relation"]) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("side", "gpu", "size"), [(500, True, 224), (500, False, 64), (100, True, 96), (50, False, 48), (9, False, 16)]
)
def test_the_size_of_a_folders_images(side, gpu, size):
    choice = folder_image_size(side, gpu)
    assert choice.value == size
    assert str(side) in choice.reason


def test_the_typical_side_is_read_from_headers(tmp_path):
    assert typical_side(list_pictures(tmp_path)) is None
    (tmp_path / "broken.jpg").write_bytes(b"nothing")
    assert typical_side(list_pictures(tmp_path)) is None
    for number, shape in enumerate([(40, 90), (50, 50), (60, 300)]):
        Image.fromarray(np.zeros((*shape, 3), np.uint8)).save(tmp_path / f"{number}.png")
    assert typical_side(list_pictures(tmp_path)) == 50


@pytest.mark.parametrize("name", RECIPES)
def test_named_recipes_leave_nothing_open_that_tells_results_apart(name):
    """On a CPU as on a GPU: the network, the head, epochs, batch and optimiser are the recipe's own."""
    recipe = named(name)
    resolved = resolve(recipe, noise(600), CPU).flat()
    for field in ("backbone", "epochs", "batch_size", "optimizer", "dim", "hidden", "cutmix"):
        if field in recipe.flat():
            assert resolved[field] == recipe.flat()[field], field
            assert resolved[field] is not None, field


def test_the_papers_values():
    paper = resolve(named("paper"), noise(600), CPU)
    assert (paper.epochs, paper.batch_size, paper.optimizer, paper.lr, paper.weight_decay) == (400, 512, "sgd", 1, 1e-4)
    ours = paper.settings
    assert (ours.dim, ours.hidden, ours.cutmix, paper.backbone, paper.stem) == (2048, 2048, 0.5, "resnet18", "small")
    assert (ours.bank_momentum, ours.relation, paper.crop_resolution) == (0.5, 0, 1)


def test_sid_is_what_a_gpu_is_given_but_for_its_length():
    fields = {**OPEN, "image_size": 32, "epochs": 400}
    made = choose(fields, 50_000, gpu=True, precision="bfloat16")
    sid = named("sid").flat() | {"weight_decay": made["weight_decay"].value}
    said = {name: value for name, value in sid.items() if name in made and value is not None}
    assert {name: made[name].value for name in said} == said


def test_a_resolved_recipe_stays_as_it_is():
    recipe = resolve(Recipe(data="noise"), noise(40), CPU)
    assert None not in [recipe.flat()[name] for name in CHOICES]
    assert resolve(recipe, noise(4000), CPU) == recipe
    assert recipe.image_size == 32


def test_open_fields_are_completed_from_the_run_that_began():
    begun = resolve(Recipe(data="noise", subset=40), noise(40), CPU)
    wanted = Recipe(data="noise", epochs=7)
    completed = wanted.completed(begun)
    assert completed.epochs == 7
    assert completed.override({"epochs": begun.epochs}) == begun


def test_lines_name_the_flag_and_the_reason():
    made = choose(OPEN, 20, gpu=False, precision="float32")
    lines = describe_choices(made)
    assert any(line.startswith("--batch-size 16: ") for line in lines)
    assert len(lines) == len(CHOICES)
    for line in lines:  # as the flag takes it
        name, value = line.partition(": ")[0].removeprefix("--").replace("-", "_").split()
        assert Recipe().override({name: value}).flat()[name] == made[name].value


def test_a_warm_up_longer_than_what_was_chosen():
    with pytest.raises(UserError, match=r"--warmup-epochs 800\.0 is not between 0 and the 800 epochs"):
        resolve(Recipe(data="noise", warmup_epochs=800), noise(40), CPU)
