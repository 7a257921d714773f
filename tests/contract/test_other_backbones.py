"""Backbones that are not ours: timm's, by name, and any module from Python."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from onecrop import UserError, evaluate, load_backbone, pretrain
from onecrop.cli import main
from onecrop.evaluate.finetune import Budget, finetune
from onecrop.nets import build_backbone
from onecrop.nets.backbones import feature_map
from onecrop.recipe import Recipe
from tests.contract.test_methods import build, objective

SMALL = "--subset 128 --image-size 16 --batch-size 64 --epochs 1".split()


@pytest.fixture
def timm():
    return pytest.importorskip("timm")


@pytest.mark.parametrize("name", ["resnet10t", "regnetx_002", "tf_efficientnet_b0"])
def test_timm_networks_keep_their_keys_and_their_resolution(timm, name):
    """Plain, with shortcuts that halve too, and with padding of its own: 32 px end as 4×4, not as 1×1."""
    theirs = timm.create_model(name, pretrained=False, num_classes=0)
    for stem, side in (("standard", 1), ("small", 4)):
        ours = build_backbone(f"timm/{name}", stem, 32).eval()
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        maps = feature_map(ours, torch.randn(2, 3, 32, 32))
        assert maps.shape == (2, ours.dim, side, side)
    x = torch.randn(2, 3, 64, 64)
    standard = build_backbone(f"timm/{name}", "standard")
    standard.load_state_dict(theirs.state_dict(), strict=True)
    assert torch.equal(standard.eval()(x), theirs.eval()(x))


def test_a_timm_network_trains_under_single_crop_and_patches(timm):
    """From the second step on every parameter: timm's residual branches begin at zero."""
    for method in ("sid", "jigclu"):
        made, loader = build(method, "timm/resnet10t")
        optimizer = torch.optim.SGD(made.parameters(), 0.1)
        for step in range(2):
            optimizer.zero_grad()
            objective(made, loader.batch(step)).backward()
            optimizer.step()
        assert all(parameter.grad.abs().sum() > 0 for parameter in made.parameters())


def test_networks_of_one_size_are_made_for_it(timm):
    backbone = build_backbone("timm/vit_tiny_patch16_224", "standard", 64).eval()
    assert backbone(torch.zeros(2, 3, 64, 64)).shape == (2, backbone.dim)
    with pytest.raises(UserError, match=r"has no small stem.*--stem standard"):
        build_backbone("timm/vit_tiny_patch16_224", "small", 64)
    with pytest.raises(UserError, match="takes no pictures of 32 px: choose another --image-size"):
        build_backbone("timm/inception_v3", "standard", 32)


def test_a_network_of_one_size_refuses_smaller_crops(small_recipe, tmp_path):
    def flat():
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8))

    with pytest.raises(UserError, match=r"--crop-resolution 0.75 does not go with this network: Sequential does not"):
        pretrain(small_recipe.override({"crop_resolution": 0.75}), backbone=flat())
    assert not (tmp_path / "run").exists()
    assert pretrain(small_recipe.override({"epochs": 1}), backbone=flat()).exists()


def test_a_network_whose_features_grow_with_the_picture_refuses_smaller_crops(small_recipe, tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Flatten())
    with pytest.raises(UserError, match=r"of 12 px it makes 36 features, of whole pictures 64"):
        pretrain(small_recipe.override({"crop_resolution": 0.75}), backbone=net)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "mobilenetv3_small_050"])
def test_jigclu_refuses_networks_without_a_map_of_their_features(timm, name):
    """Tokens, and a map whose channels grow after pooling."""
    with pytest.raises(UserError, match=r"crops of .* has no feature map"):
        build("jigclu", f"timm/{name}", image_size=64, stem="standard")


def test_a_misspelt_timm_name(timm):
    with pytest.raises(UserError, match="did you mean 'timm/resnet10t'") as caught:
        Recipe(backbone="timm/resnet10tt")
    assert len(str(caught.value)) < 300


def test_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"pip install 'onecrop\[timm\]'"):
        Recipe(backbone="timm/resnet10t")


def test_a_timm_run_is_compared_saved_loaded_and_evaluated(timm, tmp_path, capsys):
    out = tmp_path / "c"
    choice = ["--methods", "npid", "--backbones", "timm/resnet10t", "--with", "knn", "--stem", "standard"]
    assert main(["compare", "shapes", *choice, *SMALL, "--out", str(out)]) == 0
    assert "| npid | timm/resnet10t |" in capsys.readouterr().out
    run = out / "npid-timm-resnet10t-0"
    assert "timm" in json.loads((run / "provenance.json").read_text())["versions"]
    backbone = load_backbone(run)
    for name, value in load_file(run / "backbone.safetensors").items():
        assert torch.equal(backbone.state_dict()[name], value)
    assert main(["evaluate", str(run), "--with", "knn", "--baselines"]) == 0


class Own(nn.Module):
    """Not one of ours: batch norm, dropout, keys of its own."""

    def __init__(self, width=8, pooled=True):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, 2), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.2))
        self.pooled = pooled

    def forward(self, x):
        x = self.body(x)
        return x.mean((2, 3)) if self.pooled else x


@pytest.fixture
def own():
    torch.manual_seed(1)
    return Own()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_module_from_python(own, small_recipe, capsys):
    given = {name: value.clone() for name, value in own.state_dict().items()}
    run = pretrain(small_recipe, backbone=own)
    assert "module/Own, its own stem" in capsys.readouterr().out
    assert same(own.state_dict(), given)  # the caller's own stays as it was
    assert json.loads((run / "recipe.json").read_text())["backbone"] == "module/Own"
    saved = load_file(run / "backbone.safetensors")
    assert saved.keys() == given.keys()
    assert not same(saved, given)

    with pytest.raises(UserError, match=r"module/Own is a module from Python.*into=module"):
        load_backbone(run)
    assert main(["evaluate", str(run), "--with", "knn"]) == 1
    assert "into=module" in capsys.readouterr().err
    with pytest.raises(UserError, match="does not fit Own"):
        load_backbone(run, into=Own(width=9))
    rows = evaluate(run, evaluations=("knn",), baselines=True, backbone=own)
    assert [row["of"] for row in rows] == ["pixels", "untrained", "pretrained"]
    rows = finetune(run, "shapes", shares=[0.01], budget=Budget(1, 32, 1e-3, least_steps=2), backbone=own)
    assert [row["of"] for row in rows] == ["linear probe", "fine-tuned", "from scratch"]
    assert same(own.state_dict(), given)
    assert load_backbone(run, into=own) is own
    assert same(own.state_dict(), saved)
    assert not own.training


@pytest.mark.parametrize("stopped", [0, 3])
def test_a_module_resumes_to_the_same_bits(own, small_recipe, tmp_path, killed_at, stopped):
    """Also where the kill came before the first checkpoint."""
    whole = pretrain(small_recipe.override({"out": str(tmp_path / "whole")}), backbone=own)
    recipe = small_recipe.override({"checkpoint_seconds": 0.0})
    with killed_at(stopped):
        pretrain(recipe, backbone=own)
    assert main(["pretrain", "--out", recipe.out, "--resume"]) == 1  # the command line has no object to give
    with pytest.raises(UserError, match="--backbone module/Own, not tiny"):
        pretrain(recipe, resume=True)
    run = pretrain(recipe, backbone=own, resume=True)
    for file in ("backbone.safetensors", "checkpoint/state.safetensors"):
        assert same(load_file(run / file), load_file(whole / file))


def test_modules_that_are_no_backbones(small_recipe):
    for module, words in (
        (Own(pooled=False), r"Own makes \[2, 8, 7, 7\] of two pictures, not \[2, dim\]"),
        (nn.Linear(4, 4), r"Linear does not take pictures of \[2, 3, 16, 16\]"),
    ):
        with pytest.raises(UserError, match=words):
            pretrain(small_recipe, backbone=module)
    own = Own()
    own.dim = 5
    with pytest.raises(UserError, match=r"Own\.dim is not the 8 of its features"):
        pretrain(small_recipe, backbone=own)
    with pytest.raises(UserError, match="--stem small does not go with module/Own"):
        pretrain(small_recipe.override({"stem": "small"}), backbone=Own())
    with pytest.raises(UserError, match="does not show the map that it pools"):
        build("jigclu", "module/Own", given=Own())
