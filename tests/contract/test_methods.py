"""Every method with one small backbone, every backbone with one method: what any of them must do."""

import copy

import numpy as np
import pytest
import torch

from onecrop import Recipe
from onecrop.data import Loader, load
from onecrop.data.sources import Request
from onecrop.methods import METHODS
from onecrop.nets import BACKBONES
from onecrop.optim import OPTIMIZERS, optimizer_tensors, restore_optimizer
from onecrop.recipe import hints
from onecrop.train import build_method, resolve

CPU = torch.device("cpu")
SMALL = {"dim": 16, "hidden": 32}


def build(method="sid", backbone="tiny", **changes):
    images = load("shapes", request=Request(subset=50, image_size=16))
    recipe = Recipe(data="shapes", method=method, backbone=backbone, batch_size=8)
    known = hints(type(recipe.settings))
    recipe = recipe.override({**{k: v for k, v in SMALL.items() if k in known}, **changes})
    recipe = resolve(recipe, images, CPU)
    loader = Loader(images, 8, CPU, seed=0)
    made = build_method(recipe, len(images))
    made.prepare(loader)
    return made.train(), loader


def objective(method, batch):
    return torch.stack(list(method(batch).values())).sum()


CASES = [(m, "tiny") for m in METHODS] + [("sid", b) for b in BACKBONES]


@pytest.mark.parametrize(("method", "backbone"), CASES)
def test_terms_are_finite_and_every_parameter_learns(method, backbone):
    made, loader = build(method, backbone)
    terms = made(loader.batch(0))
    assert terms
    assert all(term.ndim == 0 and torch.isfinite(term) for term in terms.values())
    assert {"accuracy", "spread"} <= made.watch.keys()
    assert not any(value.requires_grad for value in made.watch.values())
    torch.stack(list(terms.values())).sum().backward()
    for name, parameter in made.named_parameters():
        assert parameter.requires_grad == (parameter.grad is not None), name
        if parameter.requires_grad:
            assert parameter.grad.abs().sum() > 0, f"{name} gets no gradient"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_loss_falls_on_a_fixed_batch(method, optimizer):
    made, loader = build(method)
    lr = {"lars": 2.0, "adamw": 0.002}.get(optimizer, 0.02)
    optimizer = OPTIMIZERS[optimizer].build(made.parameters(), torch.tensor(lr), 0.9, 0.0)
    batch = loader.batch(0)
    losses = []
    for _ in range(25):
        loss = objective(made, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.1


@pytest.mark.parametrize("method", METHODS)
def test_save_load_step_is_bit_identical(method):
    made, loader = build(method)
    copied = copy.deepcopy(made)
    pairs = [(m, OPTIMIZERS["muon"].build(m.parameters(), torch.tensor(0.02), 0.9, 0.05)) for m in (made, copied)]

    def step(pair, number):
        objective(pair[0], loader.batch(number)).backward()
        pair[1].step()
        pair[1].zero_grad()

    step(pairs[0], 0)
    copied.load_state_dict({k: v.clone() for k, v in made.state_dict().items()})
    restore_optimizer(pairs[1][1], copied, {k: v.clone() for k, v in optimizer_tensors(pairs[0][1], made).items()})
    for pair in pairs:
        step(pair, 1)
    for (name, a), b in zip(made.state_dict().items(), copied.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("method", ["sid"])
def test_single_crop_methods_run_the_backbone_once_an_image(method):
    made, loader = build(method)
    seen = []
    made.backbone.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    made(loader.batch(0))
    assert seen == [8]


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize(("size", "stem"), [(32, "small"), (64, "standard")])
def test_backbones_pool_to_their_dim(name, size, stem):
    torch.manual_seed(0)
    backbone = BACKBONES[name](stem).eval()
    out = backbone(torch.randn(2, 3, size, size))
    assert out.shape == (2, backbone.dim)


@pytest.mark.parametrize(("name", "count"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_standard_stem_has_torchvisions_keys_and_size(name, count):
    from torchvision.models import get_model

    theirs, ours = get_model(name, weights=None), BACKBONES[name]("standard")
    assert sum(p.numel() for p in theirs.parameters()) == count
    assert set(theirs.state_dict()) - set(ours.state_dict()) == {"fc.weight", "fc.bias"}
    loaded = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert loaded.missing_keys == ["fc.weight", "fc.bias"]
    assert not loaded.unexpected_keys
    x = torch.randn(2, 3, 64, 64)
    theirs.fc = torch.nn.Identity()
    assert torch.equal(theirs.eval()(x), ours.eval()(x))


@pytest.mark.parametrize("name", ["shapes", "digits"])
def test_data_sets_that_need_no_files(name):
    if name == "digits":
        pytest.importorskip("sklearn")
    for split in ("train", "test"):
        images = load(name, split)
        assert images.images.dtype == np.uint8
        assert images.images.ndim == 4
        assert images.images.shape[1] == 3
        assert len(images.labels) == len(images)
        assert images.labels.max() < len(images.classes)
