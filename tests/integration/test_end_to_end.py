"""Through the command line, as a user would."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import onecrop
from onecrop.cli import main
from onecrop.files import read_json_lines
from onecrop.methods.sid import Sid
from onecrop.step import TrainStep
from onecrop.train import pretrain

SMALL = "--backbone tiny --subset 256 --image-size 16 --batch-size 64 --dim 32 --hidden 64 --cutmix 0.5".split()


def command(*arguments, **more):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "onecrop", *map(str, arguments)], env=environment, **more)


def same_tensors(a, b):
    one, other = load_file(a), load_file(b)
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), key


def test_pretrain_evaluate_reload(tmp_path, capsys):
    """A run learns: its kNN is well above raw pixels and the untrained net."""
    run = tmp_path / "run"
    settings = "--backbone tiny --subset 1500 --image-size 24 --batch-size 64 --dim 64 --hidden 128".split()
    learning = "--epochs 8 --cutmix 0 --update plain --bank-momentum 0.2 --probe-every 4".split()
    assert main(["pretrain", "shapes", "--out", str(run), *settings, *learning]) == 0
    metrics = read_json_lines(run / "metrics.jsonl")
    assert [row["epoch"] for row in metrics] == list(range(1, 9))
    assert metrics[-1]["cross_entropy"] < metrics[0]["cross_entropy"]
    assert metrics[-1]["accuracy"] > metrics[0]["accuracy"]
    assert metrics[-1]["spread"] > 0.5
    assert [row["epoch"] for row in read_json_lines(run / "results.jsonl")] == [4, 8]
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["num_images"] == 1500
    assert {"seed", "commit", "versions", "data_fingerprint", "device"} <= provenance.keys()

    capsys.readouterr()
    assert main(["evaluate", str(run), "--with", "knn,linear-fast", "--baselines", "--k", "20"]) == 0
    table = capsys.readouterr().out
    assert "pretrained" in table
    rows = read_json_lines(run / "results.jsonl")[2:]
    score = {(row["of"], row["evaluation"]): row["accuracy"] for row in rows}
    assert len(score) == 6
    assert score["pretrained", "knn"] > max(score["pixels", "knn"], score["untrained", "knn"]) + 10
    assert all(row["protocol"] and row["split"] and "seed" in row for row in rows)
    assert {row["epoch"] for row in rows if row["of"] == "pretrained"} == {8}

    backbone = onecrop.load_backbone(run)
    assert not backbone.training
    assert backbone(torch.zeros(1, 3, 24, 24)).shape == (1, backbone.dim)


def test_python_and_command_line_are_the_same_thing(tmp_path, small_recipe):
    run = onecrop.pretrain(small_recipe)
    other = tmp_path / "other"
    assert main(["pretrain", "shapes", "--out", str(other), "--epochs", "2", *SMALL]) == 0
    same_tensors(run / "backbone.safetensors", other / "backbone.safetensors")
    same_tensors(run / "checkpoint" / "state.safetensors", other / "checkpoint" / "state.safetensors")
    assert "bank.weight" in str(load_file(run / "checkpoint" / "state.safetensors").keys())


def test_the_loop_warms_up_cools_down_and_says_how_far_it_is(small_recipe, monkeypatch):
    """Four steps an epoch: one epoch up, then half a cosine down to nothing after the last step."""
    honest, seen = TrainStep.__call__, []

    def noted(self, step, lr, progress):
        seen.append((step, lr, progress))
        honest(self, step, lr, progress)

    monkeypatch.setattr(TrainStep, "__call__", noted)
    run = onecrop.pretrain(small_recipe.override({"epochs": 3, "warmup_epochs": 1.0, "lr": 0.04}))
    steps, rates, progress = zip(*seen, strict=True)
    assert steps == tuple(range(12))
    falling = [0.02 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert rates == pytest.approx([0.01, 0.02, 0.03, 0.04, *falling])
    assert progress == pytest.approx([(step + 1) / 12 for step in range(12)])
    rows = read_json_lines(run / "metrics.jsonl")
    assert [row["lr"] for row in rows] == [rates[3], rates[7], rates[11]]
    assert [row["step"] for row in rows] == [4, 8, 12]


def kill_while_training(tmp_path, arguments, delays):
    """A run killed so many seconds after its process began to write: the same bits and rows as if undisturbed."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = [*arguments, *SMALL, "--checkpoint-seconds", "0", "--lr", "0.02"]
    assert command("pretrain", *arguments, "--out", whole, stderr=subprocess.DEVNULL).wait() == 0
    kills = 0
    for delay in delays:
        process = command("pretrain", *arguments, "--out", killed, "--resume", stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not (killed / "recipe.json").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(delay)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    if not (killed / "backbone.safetensors").exists():
        assert command("pretrain", "--out", killed, "--resume", stderr=subprocess.DEVNULL).wait() == 0
    same_tensors(whole / "backbone.safetensors", killed / "backbone.safetensors")
    same_tensors(whole / "checkpoint" / "state.safetensors", killed / "checkpoint" / "state.safetensors")
    timing = {"seconds", "images_per_second", "data_wait", "date"}
    for file in ("metrics.jsonl", "results.jsonl"):
        one, other = (read_json_lines(run / file) for run in (whole, killed))
        for row in (*one, *other):
            for key in timing & row.keys():
                del row[key]
        assert one == other
    assert not list(killed.rglob("*.part"))
    return kills


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_killed_at_any_moment_and_resumed_ends_with_the_same_bits(tmp_path, optimizer):
    arguments = ["shapes", "--epochs", "6", "--optimizer", optimizer, "--probe-every", "3"]
    # after the folder appears: before, between and inside checkpoints
    assert kill_while_training(tmp_path, arguments, (2.0, 0.15, 0.4, 0.7)) >= 1


def test_an_epoch_counts_its_preparation_and_what_ran_before_a_resume(small_recipe, killed_at, monkeypatch):
    honest = Sid.prepare
    monkeypatch.setattr(Sid, "prepare", lambda self, loader: (time.sleep(0.5), honest(self, loader))[1])
    recipe = replace(small_recipe, checkpoint_seconds=0)
    with killed_at(6):  # in the second epoch of four steps
        pretrain(recipe)
    rows = read_json_lines(pretrain(recipe, resume=True) / "metrics.jsonl")
    beside_steps = [row["seconds"] - 256 / row["images_per_second"] for row in rows]
    assert beside_steps[0] >= 0.5
    assert beside_steps[1] == pytest.approx(0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_resume(tmp_path, number):
    """As does a scheduler's wish to have the machine back."""
    run = tmp_path / "run"
    process = command("pretrain", "shapes", "--epochs", "500", *SMALL, "--out", run, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"onecrop pretrain --out {run} --resume" in errors
    assert "Traceback" not in errors
    assert (run / "checkpoint" / "state.safetensors").exists()


def test_a_digit_run_on_real_data(tmp_path):
    pytest.importorskip("sklearn")
    run = tmp_path / "run"
    tiny = "--backbone tiny --image-size 16 --batch-size 128 --dim 32 --hidden 64 --epochs 1 --subset 512".split()
    assert main(["pretrain", "digits", "--out", str(run), *tiny]) == 0
    assert main(["evaluate", str(run), "--with", "knn"]) == 0
    assert read_json_lines(run / "results.jsonl")[0]["accuracy"] > 50


def test_progress_stays_readable_in_a_file(tmp_path):
    arguments = ["shapes", "--epochs", "2", *SMALL, "--out", tmp_path / "run"]
    _, errors = command("pretrain", *arguments, stderr=subprocess.PIPE, text=True).communicate()
    lines = errors.strip().splitlines()
    assert "\r" not in errors
    assert "\x1b" not in errors
    for word in ("epoch 2/2", "images/s", "left", "cross_entropy", "sqrt_kl", "accuracy", "spread"):
        assert word in lines[-1]
    assert "epoch 1/2" in (tmp_path / "run" / "log.txt").read_text()


def test_a_folder_that_was_moved_still_resumes(tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    assert main(["pretrain", "shapes", "--out", str(run), "--epochs", "1", *SMALL]) == 0
    (run / "backbone.safetensors").unlink()  # as if killed just before the end
    shutil.move(run, moved)
    assert main(["pretrain", "--out", str(moved), "--resume"]) == 0
    assert (moved / "backbone.safetensors").exists()


@pytest.mark.parametrize("drawn", [True, False])
def test_the_demo_with_and_without_pictures(small_recipe, tmp_path, monkeypatch, capsys, drawn):
    if drawn:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("onecrop.demo.named", lambda name: small_recipe)
    monkeypatch.setattr("onecrop.demo.evaluate", lambda run, **more: onecrop.evaluate(run, None, ("knn",), subset=50))
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    said = capsys.readouterr()
    assert "backbone: " in said.out
    assert all((tmp_path / "demo" / f"{name}.png").exists() == drawn for name in ("curves", "neighbours"))
    assert ("pip install 'onecrop[plots]'" in said.err) != drawn
