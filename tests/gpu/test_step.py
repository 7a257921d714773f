"""The step on a CUDA device: captured or compiled it equals the eager one, and it never waits."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onecrop import Recipe
from onecrop.build import build_method
from onecrop.choices import resolve
from onecrop.data.images import ImageSet, Loader
from onecrop.device import tune
from onecrop.methods import METHODS
from onecrop.muon import _orthogonalise_in_parallel
from onecrop.optim import OPTIMIZERS, hold_learning_rate
from onecrop.recipe import hints
from onecrop.step import WARM_UP, TrainStep

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # compilers warn about what is not ours
CUDA = torch.device("cuda")
SMALL = {"dim": 64, "hidden": 128, "bottleneck": 32, "queue_size": 512, "noise_samples": 100, "cutmix": 0.5}


def make(fast, optimizer="sgd", precision="bfloat16", compiled=True, count=2000, method="sid", double=False, **changes):
    """double: all but the augmentation in float64, for what turns a difference of rounding into another row or sum."""
    tune(CUDA)
    torch.set_float32_matmul_precision("highest")  # comparisons need more than ten bits
    torch.backends.cudnn.allow_tf32 = False
    images = np.random.default_rng(0).integers(0, 255, (count, 3, 32, 32), np.uint8)
    images = ImageSet("noise", images)
    recipe = Recipe(data="noise", method=method, batch_size=64, optimizer=optimizer, precision=precision)
    small = {name: value for name, value in SMALL.items() if name in hints(type(recipe.settings))}
    recipe = resolve(recipe.override({"backbone": "tiny", **small, **changes}), images, CUDA)
    method = build_method(recipe, count).to(CUDA).to(memory_format=torch.channels_last)
    if double:
        method.double().augment.register_forward_hook(lambda module, given, pictures: pictures.double())
        if hasattr(method, "cutmix"):
            method.cutmix.quantiles = method.cutmix.quantiles.float()  # as the draws are
    loader = Loader(images, 64, CUDA, seed=0)
    method.prepare(loader)
    lr = torch.tensor(recipe.lr, device=CUDA)
    chosen = OPTIMIZERS[optimizer].build(method.parameters(), lr, 0.9, recipe.weight_decay)
    hold_learning_rate(chosen, (p for part in method.undecayed for p in method.get_submodule(part).parameters()))
    return method, TrainStep(method, chosen, loader, seed=0, fast=fast, compiled=compiled)


SETTINGS = {
    "default": {},
    "sampled": {"sampled_rows": 500, "kl": "none", "cutmix": 0.0},
    "relation": {"relation": 0.5, "relation_start": 0.0},
    "mixed": {"update": "soft", "mixing": "image", "bank_momentum_end": 0.9, "proximal_weight": 1.0},
    "depth": {"backbone": "efficientnet_b0"},
    **{method: {"method": method} for method in METHODS if method != "sid"},
}


COMPILED = [
    *product(("sgd", "muon"), ("default", "sampled", "relation", "mixed")),
    *product(("adamw", "lars"), ["default"]),
    ("muon", "simsiam"),  # parameters in twice as many groups
]
# compiled, the depth is drawn by another generator
CAPTURED = [
    *product(OPTIMIZERS, ["relation"]),
    *(("sgd", settings) for settings in SETTINGS if settings == "depth" or settings in METHODS),
]


@pytest.mark.parametrize(
    ("optimizer", "settings", "compiled"),
    [*((*pair, True) for pair in COMPILED), *((*pair, False) for pair in CAPTURED)],
)
def test_a_fast_step_equals_an_eager_one(optimizer, settings, compiled):
    double = settings in ("depth", "simsiam")  # SimSiam's sum is near 0, and Muon's bfloat16 rounds by more than that
    settings, sums, tables = SETTINGS[settings], [], []
    for fast in (False, True):
        method, step = make(fast, optimizer, "float32", compiled, double=double, **settings)
        for number in range(WARM_UP + 4):
            # small: differences of rounding must not grow from step to step, and Adam's first steps amplify them
            step(number, 1e-4 if optimizer == "adamw" else 1e-3, 0.5)
        assert (step.graph is not None) == fast
        sums.append({name: value.item() for name, value in step.sums.items()})
        tables += [x.clone() for name, x in method.named_buffers() if name in ("bank.weight", "queue.rows")]
    assert sums[0].keys() == sums[1].keys()
    for name in sums[0]:
        assert sums[0][name] == pytest.approx(sums[1][name], rel=1e-2, abs=1e-3), name
    if tables:
        assert F.cosine_similarity(*tables).min() > 0.999


def test_a_captured_step_reads_what_changes_along_the_run():
    changing = {"bank_momentum_end": 0.9, "relation": 0.5, "relation_start": 0.0, "relation_rise": 1.0}
    method, step = make(True, compiled=False, **changing)
    for number in range(WARM_UP + 2):
        step(number, 0.01, 0.1)
    assert step.graph is not None
    before = [p.clone() for p in method.parameters()]
    step(WARM_UP + 2, 0.0, 1.0)
    assert method.bank_momentum.item() == pytest.approx(0.9)
    assert method.relation_weight.item() == pytest.approx(0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, method.parameters(), strict=True))  # at a learning rate of 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_captured_step_holds_the_predictors_learning_rate(optimizer):
    method, step = make(True, optimizer, compiled=False, method="simsiam", lr=0.01)
    for number in range(WARM_UP + 2):
        step(number, 0.001, 0.1)
    before = {name: p.clone() for name, p in method.named_parameters()}
    step(WARM_UP + 2, 0.0, 1.0)
    for name, p in method.named_parameters():
        assert torch.equal(p, before[name]) != name.startswith("predictor."), name


def test_a_step_is_captured_while_batches_are_read_ahead(monkeypatch):
    monkeypatch.setattr("onecrop.data.images.RESIDENT_SHARE", 0.0)
    _, step = make(True, compiled=False)
    reader = step.loader._reader
    gather = reader._gather
    # it waits for events and copies to the device all the time, in a thread of its own
    monkeypatch.setattr(reader, "_gather", lambda number: [gather(number) for _ in range(300)][-1])
    for number in range(WARM_UP + 4):
        step(number, 0.01, 0.5)
    assert step.graph is not None
    assert all(value.isfinite() for value in step.sums.values())


def test_muon_takes_a_gradient_of_zeros():
    torch.manual_seed(0)
    stack = torch.zeros(2, 128, 200, device=CUDA, dtype=torch.bfloat16)
    stack[1] = 1e-8 * torch.randn(128, 200, device=CUDA)
    for zeros, small in _orthogonalise_in_parallel([stack, stack.clone()]):
        assert not zeros.any()
        assert 0.7 < torch.linalg.svdvals(small.float()).median() < 1.3


@pytest.mark.parametrize(
    ("fast", "optimizer", "settings"),
    [*product([False, True], OPTIMIZERS, ["default"]), *product([False], ["muon"], SETTINGS)],
)
def test_a_step_never_waits_for_the_device(fast, optimizer, settings):
    _, step = make(fast, optimizer, **SETTINGS[settings])
    for number in range(WARM_UP + 1):
        step(number, 0.01, 0.5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(100, 140):  # beyond the end of an epoch: a new order is drawn on the device
            step(number, 0.01, 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(value.isfinite() for value in step.sums.values())
