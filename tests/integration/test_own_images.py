"""`onecrop pretrain FOLDER --out RUN` with nothing else, and from weights that are already there."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from onecrop import UserError, pretrain
from onecrop.build import build_method
from onecrop.choices import resolve
from onecrop.cli import main
from onecrop.data import load
from onecrop.nets import build_backbone


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(20):
        Image.fromarray(rng.integers(0, 255, (60 + number, 80, 3), np.uint8)).save(folder / f"{number}.jpg")
    return folder


@pytest.fixture
def refused(capsys):
    def call(*arguments):
        assert main([str(a) for a in arguments]) == 1
        return capsys.readouterr().err.strip().splitlines()[-1]

    return call


def test_twenty_photographs_and_nothing_else(photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("onecrop.choices.CROPS", 100)  # five epochs: the test is of the choices
    run = tmp_path / "run"
    assert main(["pretrain", str(photos), "--out", str(run)]) == 0
    said = capsys.readouterr().out
    recipe = json.loads((run / "recipe.json").read_text())
    assert (recipe["image_size"], recipe["batch_size"], recipe["epochs"], recipe["backbone"]) == (64, 16, 5, "tiny")
    assert recipe["settings"]["dim"] == 128
    for flag in ("--image-size 64: ", "--batch-size 16: ", "--epochs 5: ", "--stem standard: ", "--optimizer muon: "):
        assert flag in said
        assert flag in (run / "log.txt").read_text()
    assert main(["pretrain", "--out", str(run), "--resume"]) == 0


def test_flags_win(photos, tmp_path, capsys):
    run = tmp_path / "run"
    flags = (
        "--image-size 24 --stem small --batch-size 5 --epochs 1 --hidden 16 --dim 8 --optimizer sgd --lr 0.1".split()
    )
    assert main(["pretrain", str(photos), "--out", str(run), *flags, "--backbone", "tiny"]) == 0
    recipe = json.loads((run / "recipe.json").read_text())
    assert (recipe["image_size"], recipe["stem"], recipe["batch_size"], recipe["lr"]) == (24, "small", 5, 0.1)
    assert "--batch-size 5:" not in capsys.readouterr().out


def test_a_run_goes_on_as_it_was_chosen(small_recipe, killed_at):
    """With the open recipe again, as a comparison passes it: even if today's choices would be others."""
    open_recipe = small_recipe.override({"epochs": None, "checkpoint_seconds": 0.0, "batch_size": None})
    with pytest.MonkeyPatch.context() as patched, killed_at(3):
        patched.setattr("onecrop.choices.CROPS", 5 * 256)
        patched.setattr("onecrop.choices.LEAST_STEPS", 2)
        pretrain(open_recipe)
    run = pretrain(open_recipe, resume=True)
    recipe = json.loads((run / "recipe.json").read_text())
    assert (recipe["epochs"], recipe["batch_size"]) == (5, 128)


def test_a_run_goes_on_where_its_photographs_lie_elsewhere(photos, tmp_path, killed_at, refused, monkeypatch):
    """Begun with a relative name, resumed from another folder: the images count, not what they are called."""
    monkeypatch.chdir(tmp_path)
    with killed_at(2):
        main(["pretrain", "photos", "--out", "run", "--epochs", "3", "--checkpoint-seconds", "0"])
    monkeypatch.chdir(photos)
    assert main(["pretrain", str(photos), "--out", str(tmp_path / "run"), "--resume"]) == 0
    (tmp_path / "run" / "backbone.safetensors").unlink()
    Image.new("RGB", (80, 80)).save(photos / "one-more.jpg")
    again = refused("pretrain", photos, "--out", tmp_path / "run", "--resume")
    assert f"was begun with other images than {photos} holds now" in again


def test_a_folder_that_is_taken_is_refused_before_any_photograph_is_decoded(photos, refused, monkeypatch):
    monkeypatch.setattr("onecrop.opening.load", lambda *_: pytest.fail("the photographs were read"))
    assert "exists and is not overwritten: choose another --out" in refused("pretrain", photos, "--out", photos)


@pytest.fixture
def trained(tmp_path):
    """A whole network of torchvision, with a classifier, as its users save it."""
    from torchvision.models import get_model

    def make(name="resnet18", ending=".pth"):
        torch.manual_seed(3)
        state = get_model(name, weights=None).state_dict()
        file = tmp_path / f"{name}{ending}"
        save_file(state, file) if ending == ".safetensors" else torch.save(state, file)
        return file, state

    return make


SMALL = {"subset": 64, "image_size": 32, "epochs": 1, "batch_size": 32, "dim": 8, "hidden": 16, "stem": "standard"}


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
@pytest.mark.parametrize("method", ["sid", "moco"])
def test_a_run_starts_from_a_file(small_recipe, trained, method, ending):
    """Every network of the method: moco's second one is a copy of the first."""
    file, state = trained(ending=ending)
    recipe = small_recipe.override({**SMALL, "method": method, "backbone": "resnet18", "weights": str(file)})
    recipe = recipe.override({"dim": 8, "hidden": 16})
    images = load("shapes", "train", recipe.request())
    made = build_method(resolve(recipe, images, torch.device("cpu")), len(images))
    nets = [module for name, module in made.named_children() if "backbone" in name]
    assert len(nets) == made.networks
    for net in nets:
        for key, value in net.state_dict().items():
            assert torch.equal(value, state[key]), key


def test_the_weights_are_recorded_and_guarded(small_recipe, trained, killed_at):
    file, _ = trained("mobilenet_v3_small")
    recipe = small_recipe.override({**SMALL, "backbone": "mobilenet_v3_small", "weights": str(file)})
    with killed_at(0):  # before the first checkpoint: the weights are needed again
        pretrain(recipe)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert json.loads((Path(recipe.out) / "provenance.json").read_text())["weights_sha256"] == digest
    whole = file.read_bytes()
    state = torch.load(file, weights_only=True)
    state["features.0.0.weight"] += 1
    torch.save(state, file)
    with pytest.raises(UserError, match="was begun with other weights"):
        pretrain(recipe, resume=True)
    file.write_bytes(whole)
    with killed_at(1):
        pretrain(recipe.override({"checkpoint_seconds": 0.0}), resume=True)
    file.unlink()  # a checkpoint has all of it
    run = pretrain(recipe, resume=True)
    assert load_file(run / "backbone.safetensors").keys() < state.keys()
    assert f"begun from the weights {file}, SHA-256 {digest}" in (run / "card.md").read_text()


def test_weights_that_do_not_fit(refused, trained, tmp_path):
    base = ["pretrain", "shapes", "--subset", "64", "--epochs", "1", "--out", tmp_path / "run", "--dim", "8"]
    for name in ("resnet18", "mobilenet_v2"):  # of the second every shape would fit
        file, _ = trained(name)
        sentence = refused(*base, "--backbone", name, "--stem", "small", "--weights", file)
        assert "are for the standard stem, and this" in sentence
        assert "pass --stem standard" in sentence
    file, state = trained("resnet18")
    standard = [*base, "--stem", "standard", "--weights", file]
    assert "does not fit mobilenet_v2" in refused(*standard, "--backbone", "mobilenet_v2")
    del state["layer1.0.conv1.weight"]
    torch.save(state, file)
    assert "layer1.0.conv1.weight is missing" in refused(*standard, "--backbone", "resnet18")
    assert not (tmp_path / "run").exists()


def test_files_that_are_no_weights(refused, tmp_path):
    base = ["pretrain", "shapes", "--subset", "64", "--stem", "standard", "--backbone", "resnet18"]
    base += ["--out", tmp_path / "run", "--dim", "8", "--hidden", "8", "--weights"]
    assert "is not there" in refused(*base, tmp_path / "none.pth")
    file = tmp_path / "weights.pth"
    file.write_bytes(b"rubbish")
    assert "cannot be read as weights" in refused(*base, file)
    torch.save({"state_dict": {}, "epoch": 3}, file)
    assert "plain state dict" in refused(*base, file)

    class Bad:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").write_text, ("x",))

    torch.save({"conv1.weight": Bad()}, file)
    assert "cannot be read as weights" in refused(*base, file)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()


def test_torchvisions_own_weights(refused, tmp_path, monkeypatch, small_recipe):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))

    def offline(*arguments, **more):
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    base = ["pretrain", "shapes", "--stem", "standard", "--out", tmp_path / "run", "--weights", "torchvision"]
    sentence = refused(*base, "--backbone", "resnet18")
    assert "cannot be downloaded (no network)" in sentence
    assert "--weights FILE" in sentence
    assert "torchvision has no weights for tiny" in refused(*base, "--backbone", "tiny")

    def download(url, path, hash_prefix, progress):
        assert hash_prefix in url
        torch.manual_seed(5)
        torch.save(build_backbone("mobilenet_v3_small", "standard").state_dict(), path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    recipe = {**SMALL, "backbone": "mobilenet_v3_small", "weights": "torchvision"}
    run = pretrain(small_recipe.override(recipe))
    assert len(json.loads((run / "provenance.json").read_text())["weights_sha256"]) == 64
