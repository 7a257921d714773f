"""Shared by all tests: small recipes, a private cache, and where the real data lies when it is there."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from onecrop import Recipe
from onecrop.methods.sid import SidSettings
from onecrop.step import TrainStep

DATA = Path(os.environ.get("ONECROP_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONECROP_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _two_threads():
    """Several workers share the machine; bits must not depend on how many."""
    torch.set_num_threads(1)


@pytest.fixture
def small_recipe(tmp_path):
    """Seconds on one core: 256 shapes of 16 px, the tiny net."""
    return Recipe(
        data="shapes",
        out=str(tmp_path / "run"),
        subset=256,
        image_size=16,
        backbone="tiny",
        epochs=2,
        batch_size=64,
        settings=SidSettings(dim=32, hidden=64, cutmix=0.5),
    )


@pytest.fixture
def killed_at(monkeypatch):
    """`with killed_at(3): pretrain(...)` dies before step 3, as by a signal: nothing is saved on the way out."""

    @contextmanager
    def dying_at(last):
        honest = TrainStep.__call__

        def dying(self, step, lr, progress):
            if step == last:
                raise ZeroDivisionError
            honest(self, step, lr, progress)

        with monkeypatch.context() as patched:
            patched.setattr(TrainStep, "__call__", dying)
            with pytest.raises(ZeroDivisionError):
                yield

    return dying_at


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
