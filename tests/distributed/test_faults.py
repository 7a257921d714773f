"""A process that dies, is stopped or sees no data ends all of them with one sentence, and the run can go on."""

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from onecrop.cli import main
from tests.distributed.launch import torchrun
from tests.pictures import write_pictures

pytestmark = pytest.mark.xdist_group("distributed")
MISHAPS = str(Path(__file__).with_name("mishaps.py"))
FLAGS = "--image-size 16 --backbone tiny --epochs 3 --batch-size 14 --dim 16 --hidden 32 --optimizer sgd --lr 0.01"
FLAGS += " --checkpoint-seconds 0 --device cpu --precision float32"
# After nine steps in float32: sums over parts round otherwise than sums over the whole. Weights and bank of two and
# three processes differ from those of one by up to 1.5e-4, as do those of one process with two threads instead of one.
TOLERANCE = 1e-3


def onecrop(size, arguments, options=(), **mishap):
    """-> exit status, onecrop's own sentences, all output."""
    process = torchrun(size, [MISHAPS, *arguments], options, env={k: str(v) for k, v in mishap.items()})
    output, _ = process.communicate(timeout=200)
    return process.returncode, [line for line in output.splitlines() if line.startswith("onecrop: ")], output


def saved(run):
    """-> step and tensors of the last checkpoint."""
    file = run / "checkpoint" / "state.safetensors"
    with safe_open(file, framework="pt") as opened:
        return json.loads(opened.metadata()["onecrop"])["step"], load_file(file)


def test_stopped_killed_and_restarted_a_run_ends_as_one_process_would_have_ended_it(tmp_path, monkeypatch):
    run = tmp_path / "run"
    arguments = ["pretrain", "shapes", "--subset", "43", *FLAGS.split(), "--out", str(run)]

    # Ctrl-C reaches one of two: both stop after the same step
    status, said, output = onecrop(2, arguments, STOP_RANK=1, AT_STEP=1)
    assert status != 0
    assert len(said) == 1, output
    assert said[0].startswith("onecrop: stopped at step 2 of 9; saved: continue with `onecrop pretrain --out ")
    assert saved(run)[0] == 2

    # and so they do when the system wants the machine back; one of them does not see the run's folder
    monkeypatch.chdir(tmp_path)
    resume = "pretrain --out run --resume --checkpoint-seconds 60".split()
    status, said, output = onecrop(2, resume, TERM_RANK=0, AT_STEP=2, BLIND_RANK=1)
    assert status != 0
    assert len(said) == 1, output
    assert said[0].startswith("onecrop: stopped at step 3 of 9; saved: ")
    assert saved(run)[0] == 3

    # one of three is killed: the others name it within seconds
    status, said, output = onecrop(3, [*arguments, "--resume"], KILL_RANK=1, AT_STEP=5)
    assert status != 0
    assert [line.partition(" (")[0] for line in said] == ["onecrop: rank 1 of 3 is gone"], output
    assert time.time() - (run / "checkpoint" / "state.safetensors").stat().st_mtime < 15
    assert saved(run)[0] == 5

    # torchrun starts the processes again, and they resume by themselves
    again = [*arguments, "--resume"]
    status, said, output = onecrop(2, again, ["--max-restarts=1"], KILL_RANK=0, AT_STEP=7)
    assert status == 0, output
    assert len(said) == 1, output
    assert "rank 0 of 2 is gone" in said[0]
    assert (run / "backbone.safetensors").exists()
    assert [json.loads(line)["epoch"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]

    assert main([*arguments[:-1], str(tmp_path / "alone")]) == 0
    (step, state), (expected_step, expected) = saved(run), saved(tmp_path / "alone")
    assert step == expected_step
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        if not name.startswith("method."):
            continue
        torch.testing.assert_close(
            state[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_loss_that_is_no_number_is_said_by_whoever_looks_first(tmp_path):
    """The others are told, and do not take it for dead."""
    arguments = ["pretrain", "shapes", "--subset", "430", *FLAGS.split(), "--out", str(tmp_path / "run")]
    status, said, output = onecrop(2, [*arguments, "--checkpoint-seconds", "60"], BROKEN_RANK=1, AT_STEP=2)
    assert status != 0
    assert len(said) == 1, output
    assert said[0].startswith("onecrop: rank 1 of 2: cross_entropy is not a finite number at step 3")


def test_a_process_without_the_data_is_named(tmp_path, monkeypatch):
    """As a node on which the disk with the photographs is not mounted."""
    write_pictures(tmp_path / "photos", 6)
    monkeypatch.chdir(tmp_path)
    arguments = ["pretrain", "photos", "--image-size", "16", "--out", str(tmp_path / "run")]
    status, said, output = onecrop(2, arguments, BLIND_RANK=1)
    assert status != 0
    assert len(said) == 1, output
    assert said[0].startswith("onecrop: rank 1 of 2: unknown data set (and no such folder) 'photos'")
    assert not (tmp_path / "run").exists()
