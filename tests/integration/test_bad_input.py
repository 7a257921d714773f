"""Bad input: one sentence that names the thing, a non-zero exit, no traceback, nothing lost."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from onecrop import pretrain
from onecrop.cli import main
from onecrop.errors import UserError
from onecrop.files import atomically, write_atomically
from onecrop.runs import Run
from onecrop.step import TrainStep

SMALL = "--backbone tiny --subset 128 --image-size 16 --batch-size 64 --dim 16 --hidden 32 --epochs 1".split()


@pytest.fixture
def refused(capsys):
    """Run a command that must fail and return its one sentence."""

    def call(*arguments):
        capsys.readouterr()
        assert main([str(a) for a in arguments]) != 0
        sentence = capsys.readouterr().err.strip().splitlines()[-1]
        assert sentence.startswith("onecrop: ")
        assert "Traceback" not in sentence
        return sentence

    return call


@pytest.fixture
def finished(small_recipe):
    return pretrain(small_recipe)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pretrian"], "did you mean 'pretrain'"),
        (["pretrain"], "say what to learn from"),
        (["pretrain", "cifar11", "--out", "x"], "did you mean 'cifar10'"),
        (["pretrain", "shapes", "--method", "sad"], "did you mean 'sid'"),
        (["pretrain", "shapes", "--backbone", "resnet19"], "did you mean 'resnet18'"),
        (["pretrain", "shapes", "--recipe", "papr"], "did you mean 'paper'"),
        (["pretrain", "CIFAR10", "--out", "x"], "did you mean 'cifar10'"),
        (["compare", "shapes", "--methods", "sid, mocoo", "--queue-size", "64"], "did you mean 'moco'"),
        (["compare", "shapes", "--methods", "sid", "--backbones", "module/Own"], "a module from Python"),
        (["pretrain", "shapes", "--epohcs", "3"], "did you mean --epochs"),
        (["pretrain", "shapes", "--epochs", "x"], "--epochs 'x' is not valid"),
        (["pretrain", "shapes", "--epochs"], "expected one argument"),
        (["pretrain", "shapes", "--subset", "0"], "--subset 0 is out of range"),
        (["pretrain", "shapes", "--device", "warp"], "unknown device 'warp': use auto, cpu, cuda or cuda:N"),
        (["pretrain", "shapes", "--subset", "20", "--batch-size", "64", "--out", "x"], "lower --batch-size"),
        (["evaluate", "nowhere"], "no backbone at"),
        (["list", "method"], "did you mean 'methods'"),
        (["pretrain", "--resume", "--out", "typo"], "nothing to resume in typo"),
        (["pretrain", "shapes", "--device", "meta"], "unknown device 'meta'"),
        (["pretrain", "", "--out", "x"], "the name of the data, or of --out, is empty"),
        (["scan", ""], "the name of the data, or of --out, is empty"),
        (["pretrain", "shapes", "--bank-momentum", "1"], "--bank-momentum 1.0 is out of range"),
    ],
)
def test_wrong_words(refused, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert words in refused(*arguments)
    assert not list(tmp_path.glob("x/*"))


@pytest.mark.parametrize("out", [["--out=~/run"], ["--out", "~/run"]])
def test_home_is_meant_where_the_shell_leaves_it(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert main(["pretrain", "shapes", *out, *SMALL]) == 0
    assert (tmp_path / "home" / "run" / "backbone.safetensors").exists()
    assert not (tmp_path / "~").exists()


def test_folders_without_usable_images(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no images found" in refused("pretrain", tmp_path / "empty", "--out", tmp_path / "run")
    (tmp_path / "empty" / "notes.txt").write_text("hello")
    assert "no images found" in refused("pretrain", tmp_path / "empty", "--out", tmp_path / "run")
    (tmp_path / "empty" / "a.jpg").write_bytes(b"")
    sentence = refused("pretrain", tmp_path / "empty", "--out", tmp_path / "run")
    assert "none of the 1 images" in sentence
    assert "a.jpg (the file is empty)" in sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("count", [1, 3])
def test_very_few_images(refused, tmp_path, count):
    """One image is refused; three train, in batches that batch norm can use, whatever moco's groups."""
    for i in range(count):
        (tmp_path / "few").mkdir(exist_ok=True)
        Image.fromarray(np.full((20, 20, 3), 40 * i, np.uint8)).save(tmp_path / "few" / f"{i}.png")
    small = ["--backbone", "tiny", "--image-size", "16", "--epochs", "1", "--out", tmp_path / "run"]
    if count == 1:
        for size in ([], ["--batch-size", "2"], ["--batch-size", "64"]):
            assert "few has one image" in refused("pretrain", tmp_path / "few", *small, *size)
        assert "--batch-size 1 is out of range" in refused("pretrain", tmp_path / "few", *small, "--batch-size", "1")
        assert not (tmp_path / "run").exists()
        return
    too_many = refused("pretrain", tmp_path / "few", *small, "--batch-size", "4")
    assert "larger than the 3 images: lower --batch-size" in too_many
    arguments = [tmp_path / "few", *small, "--batch-size", "3", "--method", "moco", "--norm-groups", "64"]
    assert main(["pretrain", *map(str, arguments)]) == 0


def test_jigclu_says_what_it_cannot_cut(refused, tmp_path):
    run = ["--method", "jigclu", "--out", tmp_path / "run", "--subset", "64", "--batch-size", "8"]
    assert "17 px must be even" in refused("pretrain", "shapes", *run, "--image-size", "17")
    coarse = ["--backbone", "resnet18", "--stem", "standard", "--image-size", "32"]
    assert "no feature map of at least 2×2" in refused("pretrain", "shapes", *run, *coarse)
    assert not (tmp_path / "run").exists()


def test_labels_missing_where_they_are_needed(refused, tmp_path, finished):
    for i in range(64):
        Image.fromarray(np.full((20, 20, 3), i, np.uint8)).save(tmp_path / f"{i}.png")
    assert "has no labels" in refused("evaluate", finished, "--data", tmp_path, "--with", "knn")
    probing = ["--probe-every", "1", "--out", tmp_path / "r"]
    assert "has no labels" in refused("pretrain", tmp_path, *SMALL, "--subset", "64", *probing)


def test_a_run_is_never_overwritten(refused, finished):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert "exists and is not overwritten" in refused("pretrain", "shapes", "--out", finished, *SMALL)
    changed = refused("pretrain", "--out", unfinish(finished), "--resume", "--kl-weight", "5")
    assert "--kl-weight 20.0, not 5.0" in changed
    after = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert {k: v for k, v in before.items() if k.name != "backbone.safetensors"} == after


def unfinish(run):
    (run / "backbone.safetensors").unlink(missing_ok=True)
    return run


def test_resuming_a_finished_run_changes_nothing(finished, capsys):
    before = (finished / "backbone.safetensors").read_bytes()
    assert main(["pretrain", "--out", str(finished), "--resume"]) == 0
    assert "finished" in capsys.readouterr().out
    assert (finished / "backbone.safetensors").read_bytes() == before


def test_resuming_a_finished_run_with_another_recipe_is_refused(refused, finished):
    assert "--epochs 2, not 9" in refused("pretrain", "--out", finished, "--resume", "--epochs", "9")


def test_two_processes_cannot_write_one_run(refused, finished):
    with Run(unfinish(finished)).exclusively():
        assert "another process is writing" in refused("pretrain", "--out", finished, "--resume")
    assert main(["pretrain", "--out", str(finished), "--resume"]) == 0
    fresh = finished.with_name("fresh")
    with Run(fresh).exclusively():  # begun a moment ago, nothing written yet
        assert "another process is writing" in refused("pretrain", "shapes", "--out", fresh, *SMALL)
        assert [file.name for file in fresh.iterdir()] == [".lock"]
    assert main(["pretrain", "shapes", "--out", str(fresh), *SMALL]) == 0


def test_a_kill_before_the_recipe_was_written_loses_nothing(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "provenance.json").write_text("{}")
    assert main(["pretrain", "shapes", "--out", str(tmp_path / "run"), *SMALL, "--resume"]) == 0


def test_the_demo_deletes_only_a_demo(tmp_path, finished, refused):
    (tmp_path / "demo").mkdir()
    finished.rename(tmp_path / "demo" / "run")
    assert "exists and is not overwritten" in refused("demo", "--out", tmp_path / "demo")
    assert (tmp_path / "demo" / "run" / "backbone.safetensors").exists()


@pytest.mark.parametrize("reader", ["| true", "2>&1 | true", ">&- 2>&-"])
def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path, reader):
    arguments = ["pretrain", "shapes", "--out", str(tmp_path / "run"), *SMALL]
    piped = f"{sys.executable} -m onecrop {' '.join(arguments)} {reader}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "backbone.safetensors").exists()


def test_damaged_and_foreign_checkpoints(refused, finished, tmp_path):
    state = unfinish(finished) / "checkpoint" / "state.safetensors"
    whole = state.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"rubbish" * 100):
        state.write_bytes(content)
        assert "state.safetensors is damaged" in refused("pretrain", "--out", finished, "--resume")
    save_file({"x": torch.zeros(1)}, state)
    assert "not a checkpoint of onecrop" in refused("pretrain", "--out", finished, "--resume")
    other = tmp_path / "other"
    wider = [*SMALL, "--hidden", "48"]
    assert main(["pretrain", "shapes", "--out", str(other), *wider]) == 0
    state.write_bytes((other / "checkpoint" / "state.safetensors").read_bytes())
    assert "belongs to another run" in refused("pretrain", "--out", finished, "--resume")


def test_damaged_backbones_and_recipes(refused, finished, tmp_path):
    weights = finished / "backbone.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    assert "damaged" in refused("evaluate", finished, "--with", "knn")
    save_file({"conv1.weight": torch.zeros(1)}, weights)
    assert "not written by onecrop" in refused("evaluate", finished, "--with", "knn")
    (finished / "recipe.json").write_text("{")
    assert "recipe.json cannot be read" in refused("pretrain", "--out", unfinish(finished), "--resume")
    (finished / "recipe.json").write_text('{"epoch": 3}')
    assert "did you mean 'epochs'" in refused("pretrain", "--out", finished, "--resume")


def test_changed_images_are_refused_on_resume(refused, tmp_path):
    for i in range(64):
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.fromarray(np.full((20, 20, 3), i, np.uint8)).save(tmp_path / "photos" / f"{i}.png")
    small = [a for a in SMALL if a not in ("--subset", "128")]
    run = tmp_path / "run"
    assert main(["pretrain", str(tmp_path / "photos"), "--out", str(run), *small]) == 0
    (tmp_path / "photos" / "0.png").unlink()
    Image.fromarray(np.full((20, 20, 3), 200, np.uint8)).save(tmp_path / "photos" / "new.png")
    assert "other images" in refused("pretrain", "--out", unfinish(run), "--resume")


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(tmp_path, small_recipe, monkeypatch):
    recipe = small_recipe.override({"epochs": 4, "checkpoint_seconds": 0.0})
    honest = TrainStep.__call__
    good = {}

    def poisoned(self, step, lr, progress):
        if step == 6:
            good["state"] = (tmp_path / "run" / "checkpoint" / "state.safetensors").read_bytes()
            with torch.no_grad():
                self.method.head[0].weight.fill_(float("nan"))
        honest(self, step, lr, progress)

    monkeypatch.setattr(TrainStep, "__call__", poisoned)
    with pytest.raises(UserError, match="not a finite number at step 7"):
        pretrain(recipe)
    run = tmp_path / "run"
    assert (run / "checkpoint" / "state.safetensors").read_bytes() == good["state"]
    assert not (run / "backbone.safetensors").exists()


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
def test_every_file_of_a_run_is_as_open_to_others_as_the_user_wants(finished):
    (finished / "usual").touch()
    files = [file for file in finished.rglob("*") if file.is_file()]
    assert {file.stat().st_mode for file in files} == {(finished / "usual").stat().st_mode}, files


def test_a_failed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "file"
    write_atomically(target, b"good")

    def fail():
        with atomically(target) as temporary:
            temporary.write_bytes(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"cannot write .*file: No space left on device; what was there before"):
        fail()
    assert target.read_bytes() == b"good"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_a_full_disk_is_one_sentence(unbuffered):
    command = [sys.executable, "-m", "onecrop", "list", "methods"]
    place = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=place)
    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == ["onecrop: No space left on device"]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_disk_without_room_for_checkpoints_is_said_before_the_first_step(
    tmp_path, small_recipe, monkeypatch, optimizer
):
    recipe = small_recipe.override({"optimizer": optimizer, "epochs": 1})
    size = (pretrain(recipe) / "checkpoint" / "state.safetensors").stat().st_size
    for free, enough in ((1.9 * size, False), (2.1 * size, True)):
        usage = shutil.disk_usage(tmp_path)._replace(free=int(free))
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        other = recipe.override({"out": str(tmp_path / f"{enough}" / "run")})
        if enough:
            assert pretrain(other).exists()
        else:
            with pytest.raises(UserError, match="for a moment there are two of them"):
                pretrain(other)
            assert not os.path.exists(other.out)


@pytest.mark.skipif(os.name != "posix", reason="needs a file size limit")
def test_a_disk_that_fills_up_while_saving(tmp_path):
    """A limit on the size of a file stands in for a full disk: the checkpoint cannot be written."""
    run = tmp_path / "run"
    code = (
        "import resource, signal, sys; from onecrop.cli import main;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["pretrain", "shapes", "--out", str(run), *SMALL]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 1
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(run.rglob("*.part"))
    assert main(["pretrain", "--out", str(run), "--resume"]) == 0  # with room again, it goes on
