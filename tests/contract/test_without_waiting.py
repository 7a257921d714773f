"""The step as a GPU runs it, on tensors that only pretend to lie there: no GPU is needed to see that it never waits.

Such a tensor has a shape, a type and a device, and no numbers: whatever asks for one, or mixes devices, raises.
"""

import sys
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import onecrop.losses
from onecrop import Recipe, muon
from onecrop.build import build_method
from onecrop.choices import resolve
from onecrop.data import Batch
from onecrop.data.images import ImageSet, Loader
from onecrop.losses import plain
from onecrop.methods import METHODS
from onecrop.methods.sid import Sid
from onecrop.optim import OPTIMIZERS, hold_learning_rate
from onecrop.recipe import hints
from onecrop.step import TrainStep
from tests.contract.test_methods import SMALL

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch was built without CUDA")
CUDA = torch.device("cuda", 0)
MIXED = {"update": "soft", "mixing": "image", "bank_momentum_end": 0.9, "relation": 0.5, "proximal_weight": 1.0}
CASES = [
    *({"method": method} for method in METHODS),
    *({"method": method, "backbone": "efficientnet_b0"} for method in ("simclr", "moco")),  # stochastic depth
    MIXED,
    {**MIXED, "precision": "float32", "cutmix": 0.0},
    {"sampled_rows": 20, "update": "soft", "kl": "none"},
    {"method": "npid", "objective": "softmax"},
    {"image_size": 80, "blur_probability": 0.5, "optimizer": "lars"},
]


class OnDevice(TorchDispatchMode):
    """Refuses copies between devices, and tensors made of Python's numbers: both would stop a capture."""

    def __torch_dispatch__(self, operation, types, given=(), named=None):
        out = operation(*given, **(named or {}))
        devices = {x.device.type for x in tree_leaves((given, named, out)) if isinstance(x, torch.Tensor)}
        name = operation.name()
        assert name != "aten::lift_fresh", "a tensor of Python's numbers, made inside the step"
        assert len(devices) < 2 or not name.startswith(("aten::_to_copy", "aten::copy_")), "a copy between devices"
        return out


@pytest.fixture
def pretended(monkeypatch):
    """No kernels, no streams, and a backward pass that leaves gradients of the right shape."""
    monkeypatch.setattr(onecrop.losses, "sweep", SimpleNamespace(takes=lambda *_: False), raising=False)
    monkeypatch.setitem(sys.modules, "onecrop.losses.kernels", plain)
    monkeypatch.setattr(muon, "_compiled", lambda function: function)
    monkeypatch.setattr(muon, "_orthogonalise_in_parallel", lambda stacks: [muon.orthogonalise(x) for x in stacks])
    monkeypatch.setattr("onecrop.data.images.fits", lambda size, device: True)
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)

    def make(method="sid", optimizer="muon", **changes):
        images = ImageSet("noise", np.zeros((50, 3, 32, 32), np.uint8))
        recipe = Recipe(data="noise", method=method, optimizer=optimizer, batch_size=8)
        known = hints(type(recipe.settings))
        small = {name: value for name, value in SMALL.items() if name in known}
        recipe = recipe.override({"backbone": "tiny", "precision": "bfloat16", **small, **changes})
        recipe = resolve(recipe, images, torch.device("cpu"))
        method = build_method(recipe, len(images)).to(memory_format=torch.channels_last)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        method._apply(lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA))
        loader = Loader(images, 8, CUDA, seed=0)
        method.prepare(loader)
        chosen = OPTIMIZERS[optimizer].build(method.parameters(), torch.tensor(0.1, device=CUDA), 0.9, 1e-4)
        hold_learning_rate(chosen, (p for part in method.undecayed for p in method.get_submodule(part).parameters()))

        def backward(objective):
            assert objective.dtype == torch.float32
            for p in method.parameters():
                p.grad = torch.empty_like(p) if p.requires_grad else None

        monkeypatch.setattr(torch.Tensor, "backward", backward)
        return TrainStep(method, chosen, loader, seed=0, fast=False)

    with ExitStack() as stack:
        yield make


def tensors(step):
    """All that outlives a step, which a captured one goes on writing to."""
    states = enumerate(step.optimizer.state.values())
    state = {f"{number}/{name}": x for number, kept in states for name, x in kept.items()}
    return dict(step.method.named_parameters()) | dict(step.method.named_buffers()) | step.sums | state


@pytest.mark.parametrize("changes", CASES, ids=lambda changes: "-".join(map(str, changes.values())))
def test_no_step_reads_from_the_device_or_puts_a_tensor_in_anothers_place(pretended, changes):
    step = pretended(**changes)
    with OnDevice():
        step(0, 0.1, 0.1)
        kept = tensors(step)
        step(1, 0.2, 0.2)
    assert {name: id(x) for name, x in tensors(step).items()} == {name: id(x) for name, x in kept.items()}
    assert {(x.dtype, x.device) for x in step.sums.values()} == {(torch.float32, CUDA)}


@pytest.mark.parametrize(
    "waiting",
    [
        lambda batch: float(batch.aspect[0]),
        lambda batch: batch.aspect[batch.aspect > 1],
        lambda batch: batch.images.cpu(),
        lambda batch: torch.tensor(1.0, device=CUDA),
        lambda batch: batch.aspect + torch.ones(8),
    ],
)
def test_what_would_wait_is_seen(pretended, monkeypatch, waiting):
    step, honest = pretended(), Sid.forward

    def forward(self, batch: Batch):
        waiting(batch)
        return honest(self, batch)

    monkeypatch.setattr(Sid, "forward", forward)
    seen = (DataDependentOutputException, DynamicOutputShapeException, AssertionError, RuntimeError)
    with OnDevice(), pytest.raises(seen):
        step(0, 0.1, 0.1)
