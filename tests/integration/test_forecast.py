"""A forecast is worth printing if it comes true."""

from itertools import pairwise

import pytest
import torch

from onecrop.data import Loader, load
from onecrop.data.sources import Request
from onecrop.forecast import describe_memory, forecast_memory
from onecrop.step import TrainStep
from tests.contract.test_methods import build


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


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("backbone", "count", "dim"), [("resnet18", 20_000, 2048), ("tiny", 100_000, 256)])
def test_memory_comes_within_a_fifth(backbone, count, dim):
    from onecrop import Recipe
    from onecrop.optim import OPTIMIZERS
    from onecrop.train import build_method, resolve

    device = torch.device("cuda")
    images = load("shapes", request=Request(subset=512))
    images = images.take(torch.arange(count).numpy() % 512)
    recipe = resolve(Recipe(data="shapes", backbone=backbone, batch_size=256).override({"dim": dim}), images, device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    method = build_method(recipe, count).to(device).to(memory_format=torch.channels_last)
    loader = Loader(images, 256, device, seed=0)
    expected = sum(forecast_memory(method, loader, 32, torch.bfloat16).values())
    lr = torch.tensor(recipe.lr, device=device)
    optimizer = OPTIMIZERS["sgd"].build(method.parameters(), lr, 0.9, recipe.weight_decay)
    step = TrainStep(method, optimizer, loader, seed=0, fast=True)
    for number in range(8):
        step(number, 0.01, 0.0)
    torch.cuda.synchronize()
    assert expected == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.2)
