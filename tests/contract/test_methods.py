"""Every method with one small backbone, every backbone with one method: what any of them must do."""

import copy
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from onecrop import Recipe, pretrain
from onecrop.build import build_method, build_network
from onecrop.choices import resolve
from onecrop.data import Loader, load
from onecrop.data.sources import Request
from onecrop.methods import METHODS
from onecrop.nets import BACKBONES
from onecrop.nets.backbones import feature_map
from onecrop.optim import OPTIMIZERS, optimizer_tensors, restore_optimizer
from onecrop.recipe import hints

CPU = torch.device("cpu")
SMALL = {"dim": 16, "hidden": 32, "bottleneck": 8, "queue_size": 24, "norm_groups": 2, "noise_samples": 20}
SMALL["cutmix"] = 0.5  # which `tiny` would be spared


def build(method="sid", backbone="tiny", given=None, **changes):
    images = load("shapes", request=Request(subset=50, image_size=16))
    recipe = Recipe(data="shapes", method=method, backbone=backbone, batch_size=8, precision="float32")
    known = hints(type(recipe.settings))
    recipe = recipe.override({**{k: v for k, v in SMALL.items() if k in known}, **changes})
    recipe = resolve(recipe, images, CPU)
    loader = Loader(images, 8, CPU, seed=0)
    made = build_method(recipe, len(images), build_network(recipe, given))
    made.prepare(loader)
    return made.train(), loader


def objective(method, batch):
    return torch.stack(list(method(batch).values())).sum()


CASES = [(method, backbone, "small") for method in METHODS for backbone in ("tiny", "mobilenet_v3_small")]
CASES += [("sid", backbone, stem) for backbone in BACKBONES for stem in ("small", "standard")]
CASES = list(dict.fromkeys(CASES))


@pytest.mark.parametrize(("method", "backbone", "stem"), CASES)
def test_terms_are_finite_and_every_parameter_learns(method, backbone, stem):
    made, loader = build(method, backbone, stem=stem, image_size=16 if stem == "small" else 64)
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
    moving = {name: value for name, value in made.named_buffers() if name.startswith(("bank.", "queue."))}
    begun = {name: value.clone() for name, value in moving.items()}
    losses = []
    for _ in range(25):
        for name, value in moving.items():  # a bank or queue that moves would move the goal
            value.copy_(begun[name])
        loss = objective(made, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 0.1


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


@pytest.mark.parametrize("method", METHODS)
def test_the_backbone_runs_as_often_as_the_method_says(method):
    """Single-crop methods run it once an image; `crops` and `networks` are what the cost tables print."""
    made, loader = build(method)
    seen = []
    nets = [module for name, module in made.named_children() if "backbone" in name]
    for net in nets:
        first = next(module for module in net.modules() if isinstance(module, torch.nn.Conv2d))
        first.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    made(loader.batch(0))
    assert len(nets) == made.networks
    images = {"byol": 4 * 8}.get(method, made.crops * 8)  # byol: both views through both networks
    assert sum(seen) == images


@pytest.mark.parametrize("method", METHODS)
def test_crops_of_their_own_size(method):
    """Training sees crops of three quarters of the image size, JigClu's patches of them too."""
    made, loader = build(method, crop_resolution=0.75)
    sides = set()
    for name, net in made.named_children():
        if "backbone" in name:
            net.convs[0].register_forward_pre_hook(lambda module, inputs: sides.add(inputs[0].shape[2:]))
    assert torch.isfinite(objective(made, loader.batch(0)))
    assert sides == {(12, 12)}


def test_the_first_lines_say_what_the_run_has(small_recipe, tmp_path, capsys):
    """A bank that is calibrated, where there is one, and strides that are not the network's usual ones."""
    for method, calibrate in (("sid", True), ("sid", False), ("pid", None)):
        settings = {} if calibrate is None else {"calibrate": calibrate}
        short = {"epochs": 1, "subset": 64, "batch_size": 32, "out": str(tmp_path / f"{method}-{calibrate}")}
        pretrain(small_recipe.override({"method": method, **settings, **short}))
        said = capsys.readouterr().out
        assert ("bank calibrated, data loaded in" in said) == bool(calibrate)
        assert "data loaded in" in said
        assert "--stem small: the first strides are 1" in said


def test_only_simsiams_predictor_keeps_its_learning_rate(small_recipe, monkeypatch):
    """With a schedule that is 0 from the start nothing else of any method moves."""
    monkeypatch.setattr("onecrop.train.cosine", lambda step, total, warmup: 0.0)
    for method in ("simsiam", "byol"):
        settings = {"dim": 16, "hidden": 32} | ({"bottleneck": 8} if method == "simsiam" else {})
        recipe = small_recipe.override({"method": method, "epochs": 1, "subset": 64, "batch_size": 32, **settings})
        recipe = recipe.override({"out": f"{recipe.out}-{method}", "stem": "small", "precision": "float32"})
        begun = dict(build_method(recipe, 64).named_parameters())
        saved = load_file(pretrain(recipe) / "checkpoint/state.safetensors")
        moved = {key for key, value in begun.items() if not torch.equal(saved[f"method.{key}"], value)}
        assert moved == {key for key in begun if key.startswith("predictor.") and method == "simsiam"}


def test_moving_averages_follow_and_get_no_gradient():
    for method, name in (("byol", "target_backbone"), ("moco", "key_backbone")):
        made, loader = build(method)
        average, online = getattr(made, name), made.backbone
        objective(made, loader.batch(0)).backward()
        assert all(p.grad is None for p in average.parameters())
        with torch.no_grad():
            for p in online.parameters():
                p.add_(1.0)
        before = [p.clone() for p in average.parameters()]
        made.after_step(torch.tensor(0.0))
        base = {"byol": 0.996, "moco": 0.999}[method]
        for old, new, target in zip(before, average.parameters(), online.parameters(), strict=True):
            torch.testing.assert_close(new, base * old + (1 - base) * target)
        before = [p.clone() for p in average.parameters()]
        made.after_step(torch.tensor(0.25))
        at_a_quarter = {"byol": 1 - 0.004 * (math.cos(math.pi / 4) + 1) / 2, "moco": 0.999}[method]
        for old, new, target in zip(before, average.parameters(), online.parameters(), strict=True):
            torch.testing.assert_close(new - old, (1 - at_a_quarter) * (target - old), rtol=1e-3, atol=1e-7)
        frozen = [p.clone() for p in average.parameters()]
        made.after_step(torch.tensor(1.0))
        moved = any(not torch.equal(a, b) for a, b in zip(frozen, average.parameters(), strict=True))
        assert moved == (method == "moco")  # byol's average stands still at the end


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize(("size", "stem"), [(32, "small"), (64, "standard")])
def test_backbones_pool_to_their_dim(name, size, stem):
    torch.manual_seed(0)
    backbone = BACKBONES[name](stem).eval()
    out = backbone(torch.randn(2, 3, size, size))
    assert out.shape == (2, backbone.dim)


PUBLISHED = {  # parameters with the classifier of 1,000 classes, features without it
    "resnet18": (11_689_512, 512),
    "resnet50": (25_557_032, 2048),
    "mobilenet_v2": (3_504_872, 1280),
    "mobilenet_v3_small": (2_542_856, 576),
    "mobilenet_v3_large": (5_483_032, 960),
    "efficientnet_b0": (5_288_548, 1280),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_standard_stem_has_torchvisions_keys_and_size(name):
    from torchvision.models import get_model

    theirs, ours = get_model(name, weights=None), BACKBONES[name]("standard")
    classifier = "fc" if name.startswith("resnet") else "classifier"
    assert (sum(p.numel() for p in theirs.parameters()), ours.dim) == PUBLISHED[name]
    loaded = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not loaded.unexpected_keys
    assert all(key.startswith(f"{classifier}.") for key in loaded.missing_keys)
    x = torch.randn(2, 3, 64, 64)
    setattr(theirs, classifier, torch.nn.Identity())
    assert torch.equal(theirs.eval()(x), ours.eval()(x))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_small_stem_ends_as_four_by_four(name):
    """Features of a 32-px picture are 4×4 before pooling, not 1×1; keys stay torchvision's."""
    standard, small = BACKBONES[name]("standard").eval(), BACKBONES[name]("small").eval()
    assert standard.state_dict().keys() == small.state_dict().keys()
    pool = small.avgpool if hasattr(small, "avgpool") else None
    sizes = []
    if pool is not None:
        pool.register_forward_hook(lambda module, inputs, output: sizes.append(inputs[0].shape[-1]))
    else:
        small.features.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[-1]))
    small(torch.randn(1, 3, 32, 32))
    assert sizes == [4]


def test_stochastic_depth_draws_from_the_step():
    """The same step twice gives the same drops; another step gives others."""
    from onecrop.device import seed_step

    torch.manual_seed(0)
    net = BACKBONES["efficientnet_b0"]("small").train()
    x = torch.randn(4, 3, 32, 32)
    outputs = []
    for step in (5, 5, 6):
        seed_step(0, step)
        outputs.append(net(x).detach())
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    ("backbone", "seeded"),
    [("efficientnet_b0", True), ("efficientnet_b0", False), ("mobilenet_v3_small", True), ("mobilenet_v3_large", True)],
)
def test_killed_and_resumed_networks_that_draw_end_with_the_same_bits(
    small_recipe, tmp_path, killed_at, monkeypatch, backbone, seeded
):
    """Without the step's own seed a resumed efficientnet drops other blocks: the test would notice."""
    if not seeded:
        monkeypatch.setattr("onecrop.step.seed_step", lambda seed, step: None)
    changes = {"backbone": backbone, "subset": 24, "batch_size": 8, "epochs": 1, "checkpoint_seconds": 0.0}
    recipe = small_recipe.override(changes)
    whole = pretrain(recipe.override({"out": str(tmp_path / "whole")}))
    with killed_at(2):
        pretrain(recipe)
    run = pretrain(recipe, resume=True)
    for file in ("backbone.safetensors", "checkpoint/state.safetensors"):
        one, other = load_file(whole / file), load_file(run / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one) == seeded


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


@pytest.mark.parametrize("name", BACKBONES)
def test_feature_map_pools_to_the_features(name):
    torch.manual_seed(0)
    backbone, x = BACKBONES[name]("small").eval(), torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(feature_map(backbone, x).mean((2, 3)), backbone(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cutmix", [0.0, 0.5])
def test_pid_is_the_papers_first_equation(cutmix):
    """−Σ_k y_k·log p_k, p = softmax(w·z) over all images, y smoothed by ε and mixed as the pictures are."""
    made, loader = build("pid", cutmix=cutmix, smoothing=0.2)
    batch = loader.batch(0)
    x, partner, mix = made.cutmix(made.augment(batch.images, batch.aspect, batch.draws), batch.draws)
    z, w = made.backbone(x).double(), made.classifier.detach().double()
    expected = 0.0
    for i in range(8):
        log_p = torch.log_softmax(w @ z[i], 0)
        y = torch.full((50,), 0.2 / 50, dtype=torch.float64)
        other = batch.index[i] if partner is None else batch.index[partner[i]]
        y[batch.index[i]] += 0.8 * float(mix)
        y[other] += 0.8 * (1 - float(mix))
        expected -= float((y * log_p.detach()).sum()) / 8
    assert made(batch)["cross_entropy"].item() == pytest.approx(expected, rel=1e-5)
