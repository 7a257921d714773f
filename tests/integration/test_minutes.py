"""`--minutes`: as many epochs as fit, found by a trial that leaves no trace in the run."""

import json

import pytest
import torch
from safetensors.torch import load_file

from onecrop import Recipe, UserError, pretrain
from onecrop.cli import main
from onecrop.compare import compare
from onecrop.pace import LEAST_TRIED, TRIED_STEPS, epochs_within
from onecrop.survey import forecast

HALF_A_SECOND = 0.5


@pytest.fixture
def tried(monkeypatch):
    """Every step of a trial takes half a second by the clock -> the steps that trials made."""
    steps = []

    def timed(work, device):
        work()
        steps.append(HALF_A_SECOND)
        return HALF_A_SECOND

    monkeypatch.setattr("onecrop.pace.timed", timed)
    return steps


def epochs_of(run):
    return json.loads((run / "recipe.json").read_text())["epochs"]


def test_the_run_is_the_one_that_its_epochs_say(small_recipe, tried, tmp_path, capsys):
    """Four steps an epoch: two seconds, of which the bank's calibration takes a third once."""
    run = pretrain(small_recipe.override({"epochs": None, "minutes": 0.2}))
    assert epochs_of(run) == 5  # 12 s / 2 s − 1/3
    assert "--epochs 5: what fits into 0.2 minutes at 128 images/s" in capsys.readouterr().out
    said = pretrain(small_recipe.override({"epochs": 5, "out": str(tmp_path / "said")}))
    one, other = (load_file(folder / "checkpoint" / "state.safetensors") for folder in (run, said))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_epochs_bound_the_minutes(small_recipe, tried, capsys):
    assert epochs_of(pretrain(small_recipe.override({"epochs": 2, "minutes": 10}))) == 2
    assert "--epochs" not in capsys.readouterr().out


def test_a_trial_is_short(small_recipe, tried):
    """A few seconds of a run of minutes; of a short one only so many steps as a median needs."""
    pretrain(small_recipe.override({"epochs": 1, "minutes": 60}))
    assert len(tried) == TRIED_STEPS
    tried.clear()
    pretrain(small_recipe.override({"epochs": 1, "minutes": 0.1, "out": small_recipe.out + "2"}))
    assert len(tried) == LEAST_TRIED


@pytest.mark.parametrize("epochs", [None, 40])
def test_a_killed_run_keeps_its_epochs(small_recipe, tried, killed_at, monkeypatch, epochs):
    recipe = small_recipe.override({"epochs": epochs, "minutes": 0.1, "checkpoint_seconds": 0.0})
    with killed_at(5):  # the trial's three steps count from 0, too
        pretrain(recipe)
    monkeypatch.setattr("onecrop.pace.timed", None)  # never called again
    assert epochs_of(pretrain(recipe, resume=True)) == 2
    with pytest.raises(UserError, match=r"was begun with --minutes 0\.1, not 7"):
        pretrain(recipe.override({"minutes": 7}), resume=True)


def test_a_comparison_at_equal_cost(small_recipe, tried, tmp_path):
    """By this clock all steps are as long: equal minutes, equal epochs, but for a calibration that SimCLR has not."""
    overrides = {"minutes": 0.1, "batch_size": 64, "dim": 16}
    base = Recipe(data="shapes", subset=256, image_size=16)
    table = compare(base, ["sid", "simclr"], ["tiny"], 1, tmp_path / "all", ("knn",), overrides)
    assert epochs_of(tmp_path / "all" / "sid-tiny-0") == 2
    assert epochs_of(tmp_path / "all" / "simclr-tiny-0") == 3
    assert "failed" not in table.read_text()
    compare(base, ["sid", "simclr"], ["tiny"], 1, tmp_path / "all", ("knn",), overrides)  # again: nothing is refused


def test_the_forecast_fits_too(small_recipe, monkeypatch):
    monkeypatch.setattr("onecrop.survey._seconds_a_step", lambda *arguments: (HALF_A_SECOND, "by hand"))
    said = forecast(small_recipe.override({"epochs": None, "minutes": 0.2}), 256)
    assert (said["epochs"], said["seconds"]) == (5, 10.0)
    assert forecast(small_recipe.override({"minutes": 0.2}), 256)["epochs"] == 2


def test_at_least_one_epoch(small_recipe):
    assert epochs_within(0.001, 60.0, small_recipe.settings) == 1
    assert epochs_within(1.0, 20.0, None) == 3


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "ten"])
def test_minutes_that_are_none(minutes, tmp_path, capsys):
    assert main(["pretrain", "shapes", "--minutes", minutes, "--out", str(tmp_path / "run")]) == 1
    assert "--minutes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
