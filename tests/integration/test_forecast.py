"""A forecast is worth printing if it comes true."""

import gc
import os
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from onecrop import UserError, pretrain
from onecrop.build import build_method, build_network
from onecrop.choices import LEAST_BATCH, resolve
from onecrop.cli import main
from onecrop.data import Loader, load
from onecrop.data.sources import Request
from onecrop.device import free_memory
from onecrop.forecast import (
    MARGIN,
    describe_memory,
    fitting_batch,
    forecast_memory,
    need_memory,
    need_step,
)
from onecrop.methods import METHODS
from onecrop.runs import Run
from onecrop.step import TrainStep
from tests.contract.test_methods import build

CPU = torch.device("cpu")


def test_activations_are_what_autograd_keeps():
    """Counted by hand at 16 px: a convolution keeps its input, a norm its input, ReLU its output."""
    made, loader = build("sid", "tiny", image_size=16)
    parts = forecast_memory(made, loader, 16, torch.float32)
    widths, side, expected = (3, 32, 64, 128, 256), 16, 0
    for before, after in pairwise(widths):
        expected += before * side**2 + 2 * after * side**2  # conv input, norm input, ReLU output
        if side > 4:
            expected += 2 * after * (side // 2) ** 2  # max-pool keeps the places of its maxima, as int64
            side //= 2
    per_image = parts["activations"] / loader.batch_size / 4
    assert per_image == pytest.approx(expected, rel=0.05)
    assert parts["bank"] == 50 * 16 * 4
    assert "bank 3.2 kB" in describe_memory(parts)


def test_the_forecast_leaves_the_run_as_it_was():
    made, loader = build("sid", "tiny")
    before = {name: value.clone() for name, value in made.state_dict().items()}
    forecast_memory(made, loader, 16, torch.float32)
    for name, value in made.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_run_leaves_nothing_in_memory(small_recipe):
    """Every run of a comparison would add its own, which no collector finds: the forecast's pass has a history."""

    def alive():
        gc.collect()
        return {id(x) for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter) and x.numel() > 1000}

    before = alive()
    pretrain(small_recipe)
    assert alive() <= before


@pytest.mark.parametrize("method", METHODS)
def test_tables_are_as_large_as_was_said_before_they_were_built(method):
    made, loader = build(method)
    said = made.tables(made.settings, made.backbone.dim, loader.num_images, loader.batch_size, torch.float32)
    held = {name: t for name, t in made.state_dict().items() if name in ("bank.weight", "classifier", "queue.rows")}
    assert {name.partition(".")[0]: t.nbytes for name, t in held.items()} == {
        name: size for name, size in said.items() if name not in ("logits", "drawn rows")
    }
    if method == "npid":  # [B, m, D] in float32
        drawn = 8 * made.settings.noise_samples * made.settings.dim * 4
        assert said["drawn rows"] == drawn == forecast_memory(made, loader, 16, torch.float32)["loss"]
        every = replace(made.settings, objective="softmax")
        assert made.tables(every, made.backbone.dim, 50, 8, torch.float32).keys() == {"bank"}
    if method == "pid":  # [B, N] in float32, and its gradient
        assert said["logits"] == 2 * 8 * 50 * 4
        assert forecast_memory(made, loader, 16, torch.float32)["loss"] == said["logits"]


@pytest.mark.parametrize(
    ("method", "changes", "needed", "words"),
    [
        ("pid", {}, 3 * 256 * 256 * 4 + 2 * 64 * 256 * 4, "lower --subset, or take --method sid"),
        ("pid", {"optimizer": "adamw"}, 4 * 256 * 256 * 4 + 2 * 64 * 256 * 4, "momentum 524 kB"),
        ("sid", {"dim": 2048}, 256 * 2048 * 4, "lower --subset or --dim"),
        ("npid", {"dim": 128, "objective": "softmax"}, 256 * 128 * 4, "bank 131 kB"),
        ("npid", {"dim": 16, "noise_samples": 9}, 256 * 16 * 4 + 64 * 9 * 16 * 4, "lower --noise-samples"),
        ("moco", {"dim": 16, "queue_size": 10_000}, 10_000 * 16 * 4, "lower --queue-size or --dim"),
    ],
)
def test_tables_that_do_not_fit_are_refused_before_anything_is_built(
    small_recipe, tmp_path, monkeypatch, method, changes, needed, words
):
    recipe = small_recipe.override({"method": method, "precision": "float32", **changes})
    monkeypatch.setattr("onecrop.forecast.free_memory", lambda device: needed)
    need_memory(recipe, 256, 256, CPU)  # just fits
    monkeypatch.setattr("onecrop.forecast.free_memory", lambda device: None)
    need_memory(recipe, 256, 256, CPU)  # nobody knows
    monkeypatch.setattr("onecrop.forecast.free_memory", lambda device: needed - 1)
    monkeypatch.setattr("onecrop.train.build_method", None)
    with pytest.raises(UserError, match=f"{method} over 256 images needs") as caught:
        pretrain(recipe)
    assert words in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_methods_without_a_table_are_never_refused(small_recipe, monkeypatch):
    monkeypatch.setattr("onecrop.forecast.free_memory", lambda device: 0)
    for method in ("simclr", "simsiam", "byol", "jigclu"):
        need_memory(small_recipe.override({"method": method, "precision": "float32"}), 256, 10**9, CPU)
    with pytest.raises(UserError, match="0 B are free"):  # one with a table is, under the same conditions
        need_memory(small_recipe.override({"method": "sid", "precision": "float32"}), 256, 10**9, CPU)


def test_a_batch_that_does_not_fit_is_refused_before_the_first_step(small_recipe, tmp_path, monkeypatch):
    made, loader = build("sid", "tiny")
    parts = forecast_memory(made, loader, 16, torch.float32)
    weights = sum(p.nbytes for p in made.parameters())
    assert parts["network"] == 3 * weights  # gradients and momentum are yet to come
    for step in (100 * weights, weights):  # what passes is the larger part, or what stays
        parts |= {"activations": step - parts["loss"]}
        needed = 2 * weights + step / MARGIN
        for free in (None, needed):
            monkeypatch.setattr("onecrop.forecast.free_memory", lambda device, free=free: free)
            need_step(parts, made, 8, CPU)
        monkeypatch.setattr("onecrop.forecast.free_memory", lambda device, needed=needed: needed - 1)
        with pytest.raises(UserError, match="lower --batch-size" if step > 2 * weights else "smaller --backbone"):
            need_step(parts, made, 8, CPU)
    bank = 256 * 2048 * 4  # fits, and nothing beside it
    monkeypatch.setattr("onecrop.forecast.free_memory", lambda device: bank)
    with pytest.raises(UserError, match=r"a step of 64 images needs about .* free on cpu: lower --batch-size"):
        pretrain(small_recipe.override({"dim": 2048, "precision": "float32"}))
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/meminfo")
def test_free_memory_of_this_machine():
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0.001 * whole < free_memory(CPU) < whole


@pytest.mark.gpu
def test_free_memory_of_a_gpu_counts_what_is_only_cached():
    device = torch.device("cuda")
    before = free_memory(device)
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert before - free_memory(device) >= 2**28
    del held
    assert abs(before - free_memory(device)) < 2**26


def test_a_batch_smaller_than_the_sample():
    made, _ = build("sid", "tiny")
    images = load("shapes", request=Request(subset=50, image_size=16))
    small, large = (
        forecast_memory(made, Loader(images, count, CPU, seed=0), 16, torch.float32)["activations"] for count in (2, 8)
    )
    assert large == pytest.approx(4 * small, rel=0.05)  # norms keep a little that is not per image


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("backbone", "count", "dim"), [("resnet18", 20_000, 2048), ("tiny", 100_000, 256)])
def test_memory_comes_within_a_fifth(backbone, count, dim):
    from onecrop import Recipe
    from onecrop.build import build_method
    from onecrop.choices import resolve
    from onecrop.optim import OPTIMIZERS

    device = torch.device("cuda")
    images = load("shapes", request=Request(subset=512))
    images = images.take(torch.arange(count).numpy() % 512)
    recipe = resolve(Recipe(data="shapes", backbone=backbone, batch_size=256).override({"dim": dim}), images, device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    method = build_method(recipe, count).to(device).to(memory_format=torch.channels_last)
    loader = Loader(images, 256, device, seed=0)
    expected = sum(forecast_memory(method, loader, recipe.crop_size, torch.bfloat16).values())
    lr = torch.tensor(recipe.lr, device=device)
    optimizer = OPTIMIZERS["sgd"].build(method.parameters(), lr, 0.9, recipe.weight_decay)
    step = TrainStep(method, optimizer, loader, seed=0, fast=True)
    for number in range(8):
        step(number, 0.01, 0.0)
    torch.cuda.synchronize()
    assert expected == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.2)


@pytest.mark.parametrize("method", ["sid", "simclr"])
def test_a_batch_that_is_chosen_fits_into_the_gpus_memory(small_recipe, monkeypatch, method):
    """Halved until it does, by the same forecast that is printed; on a CPU, or where it was said, it stays."""
    images = load("shapes", request=small_recipe.request())
    changes = {"method": method, "batch_size": 128, "precision": "bfloat16"}
    recipe = resolve(small_recipe.override(changes), images, CPU)
    network = build_network(recipe)
    made, loader = build_method(recipe, len(images), build_network(recipe)), Loader(images, 128, CPU, seed=0)
    parts = forecast_memory(made, loader, 16, torch.bfloat16)
    whole = parts["data"] + parts["bank"] + 4 * sum(p.nbytes for p in network.parameters()) + parts["activations"]
    monkeypatch.setattr("onecrop.forecast.fits", lambda size, device: True)
    gpu = torch.device("cuda")
    found = []
    for free in (2 * whole, 1.1 * whole, 0.6 * whole, 1000):
        monkeypatch.setattr("onecrop.forecast.free_memory", lambda device, free=free: free)
        found.append(fitting_batch(recipe, network, images, gpu))
    assert found[0] == 128
    assert found[1] == 64
    assert found == sorted(found, reverse=True)
    assert found[-1] == LEAST_BATCH
    assert fitting_batch(recipe, network, images, CPU) == 128


def test_a_batch_is_chosen_beside_what_goes_with_a_classifier_s_weights(small_recipe, monkeypatch):
    """Where the gradient and one moment just fit, a second moment takes the room of a larger batch."""
    images = load("shapes", request=small_recipe.request())
    changes = {"method": "pid", "batch_size": 128, "precision": "bfloat16"}
    recipe = resolve(small_recipe.override(changes), images, CPU)
    network = build_network(recipe)

    def chosen(optimizer, free):
        monkeypatch.setattr("onecrop.forecast.free_memory", lambda device: free)
        return fitting_batch(recipe.override({"optimizer": optimizer}), network, images, torch.device("cuda"))

    monkeypatch.setattr("onecrop.forecast.fits", lambda size, device: True)
    too_little, enough = 0, 10**9
    while enough - too_little > 10**5:
        middle = (too_little + enough) // 2
        too_little, enough = (too_little, middle) if chosen("sgd", middle) == 128 else (middle, enough)
    assert chosen("sgd", enough) == 128
    assert chosen("adamw", enough) == 64


def test_a_smaller_batch_is_said_with_its_reason(small_recipe, monkeypatch, capsys):
    monkeypatch.setattr("onecrop.opening.fitting_batch", lambda *_: 16)
    pretrain(small_recipe.override({"batch_size": None, "epochs": 1}))
    assert "--batch-size 16: a larger one does not fit into the GPU's free memory" in capsys.readouterr().out
    said = small_recipe.override({"epochs": 1, "out": small_recipe.out + "-said"})  # batches of 64
    assert Run(pretrain(said)).recipe().batch_size == 64


@pytest.mark.parametrize(
    ("error", "whose"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "GPU"),
        (MemoryError(), "machine"),
        (lambda: torch.empty(2**60), "machine"),
    ],
)
def test_memory_that_is_full_is_one_sentence(monkeypatch, capsys, error, whose):
    def full(*_, **__):
        raise error if isinstance(error, Exception) else error()

    monkeypatch.setattr("onecrop.cli.pretrain", full)
    assert main(["pretrain", "shapes"]) == 1
    assert capsys.readouterr().err.startswith(f"onecrop: the {whose}'s memory is full: lower --batch-size")


def test_other_errors_are_not_taken_for_a_full_memory(monkeypatch):
    def wrong(*_, **__):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("onecrop.cli.pretrain", wrong)
    with pytest.raises(RuntimeError, match="do not match"):
        main(["pretrain", "shapes"])
