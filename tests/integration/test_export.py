"""Backbones for other programs: the same features there, or a refusal by name."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from onecrop import UserError, evaluate, export, load_backbone, pretrain
from onecrop.cli import main
from onecrop.export import FORMATS, TIMM_TWINS, TORCHVISION, compare_features, pictures
from onecrop.nets import build_backbone, save_backbone
from onecrop.nets.weights import CLASSIFIERS
from onecrop.tensors import save_tensors

SIZE = 32


@pytest.fixture
def saved(tmp_path):
    """A network whose batch norms have seen something, as a run would leave it."""

    def make(name, stem="standard"):
        torch.manual_seed(0)
        net = build_backbone(name, stem, SIZE).train()
        with torch.no_grad():
            for _ in range(3):
                net(torch.randn(8, 3, SIZE, SIZE))
        facts = {"backbone": name, "stem": stem, "image_size": SIZE, "data": "shapes", "epoch": 0}
        save_backbone(tmp_path / "backbone.safetensors", net, facts)
        return tmp_path

    return make


def theirs(name):
    from torchvision.models import get_model

    return get_model(name, weights=None).eval()


def features_of(net, x):
    """Of a whole torchvision network, before its classifier."""
    seen = []
    last = net.fc if hasattr(net, "fc") else net.classifier
    handle = last.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    net(x)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", TORCHVISION)
def test_a_backbone_fills_torchvisions_own_network(saved, name):
    run, net, x = saved(name), theirs(name), pictures(SIZE)
    missing, unexpected = net.load_state_dict(load_file(run / "backbone.safetensors"), strict=False)
    assert not unexpected
    assert missing
    assert all(key.startswith(("fc.", "classifier.")) for key in missing)
    with torch.no_grad():
        assert torch.equal(features_of(net, x), load_backbone(run)(x))

    other = theirs(name)
    classifier = {key: value.clone() for key, value in other.state_dict().items() if key.startswith(CLASSIFIERS)}
    assert load_backbone(run, into=other) is other
    assert all(parameter.requires_grad for parameter in other.parameters())  # to be trained further
    for key, value in other.state_dict().items():
        assert torch.equal(value, classifier[key] if key in classifier else net.state_dict()[key]), key


@pytest.mark.parametrize("name", TORCHVISION)
def test_a_small_stem_does_not_load_into_torchvisions_network(saved, name):
    """Of the mobile nets every shape would fit: only the strides tell."""
    run, net = saved(name, "small"), theirs(name)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(UserError, match="was trained with the small stem"):
        load_backbone(run, into=net)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    for format in ("torchvision", "timm"):
        if format == "torchvision" or name in TIMM_TWINS:
            with pytest.raises(UserError, match="has the small stem"):
                export(run, format)
            assert [file.name for file in run.iterdir()] == ["backbone.safetensors"]


def test_another_network_is_refused_and_left_as_it_was(saved):
    run, net = saved("resnet18"), theirs("resnet50")
    before = net.conv1.weight.clone()
    with pytest.raises(UserError, match="other layers"):
        load_backbone(run, into=net)
    assert torch.equal(net.conv1.weight, before)
    state = load_file(run / "backbone.safetensors")
    state.pop("layer1.0.conv1.weight")
    facts = {"backbone": "resnet18", "stem": "standard", "image_size": SIZE}
    save_tensors(run / "backbone.safetensors", state, facts)
    with pytest.raises(UserError, match=r"does not fit resnet18 .*: layer1.0.conv1.weight is missing"):
        load_backbone(run)


@pytest.mark.parametrize("name", TORCHVISION)
@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
def test_torchvision_files(saved, capsys, name, ending):
    run = saved(name)
    out = run / f"mine{ending}"
    assert main(["export", str(run), "--format", "torchvision", "--out", str(out)]) == 0
    assert "largest difference 0 among features" in capsys.readouterr().out
    state = load_file(out) if ending == ".safetensors" else torch.load(out, weights_only=True)
    assert set(state) == {key for key in theirs(name).state_dict() if not key.startswith(("fc.", "classifier."))}


@pytest.mark.parametrize("name", TIMM_TWINS)
def test_timm_files_give_the_same_features_in_timm(saved, name):
    timm = pytest.importorskip("timm")
    run, x = saved(name), pictures(SIZE)
    model = timm.create_model(TIMM_TWINS[name], pretrained=False, num_classes=0).eval()
    model.load_state_dict(load_file(export(run, "timm")), strict=True)
    with torch.no_grad():
        assert torch.equal(model(x), load_backbone(run)(x))
    assert torch.equal(load_backbone(run / "timm.safetensors")(x), load_backbone(run)(x))


@pytest.mark.parametrize(
    ("name", "format", "words"),
    [
        (
            "mobilenet_v3_small",
            "timm",
            "same as mobilenet_v3_small in every layer: choose --format torch",
        ),
        ("tiny", "timm", "same as tiny in every layer: choose --format onnx"),
        ("tiny", "torchvision", "torchvision has no tiny: choose --format onnx"),
        ("tiny", "tochvision", "did you mean 'torchvision'"),
    ],
)
def test_what_has_no_such_form(saved, capsys, name, format, words):
    run = saved(name)
    assert main(["export", str(run), "--format", format]) == 1
    assert words in capsys.readouterr().err
    assert len(list(run.iterdir())) == 1


@pytest.mark.parametrize("runtime", [True, False])
@pytest.mark.parametrize(("name", "stem"), [("tiny", "small"), ("resnet18", "small")])
def test_onnx(saved, capsys, monkeypatch, name, stem, runtime):
    """By onnxruntime, and by ONNX' own evaluator where that is missing; any number of pictures at once."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    if runtime:
        pytest.importorskip("onnxruntime")
    else:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    run = saved(name, stem)
    assert main(["export", str(run), "--format", "onnx"]) == 0
    assert "read back, largest difference" in capsys.readouterr().out
    model = onnx.load(run / "backbone.onnx")
    facts = json.loads(next(prop.value for prop in model.metadata_props if prop.key == "onecrop"))
    assert facts["stem"] == stem
    assert facts["mean"][0] == 0.485
    assert sorted(file.name for file in run.iterdir()) == ["backbone.onnx", "backbone.safetensors"]


def test_a_network_that_torch_cannot_write_as_onnx(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")

    class Odd(torch.nn.Conv2d):
        def forward(self, x):
            x = super().forward(x)
            return (x + 1 if float(x.sum()) > 0 else x).mean((2, 3))

    facts = {"backbone": "module/Odd", "stem": None, "image_size": SIZE}
    save_backbone(tmp_path / "backbone.safetensors", Odd(3, 8, 3), facts)
    with pytest.raises(UserError, match="torch cannot write module/Odd as ONNX: Could not guard"):
        export(tmp_path, "onnx", backbone=Odd(3, 8, 3))
    assert [file.name for file in tmp_path.iterdir()] == ["backbone.safetensors"]


def test_without_onnx(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match=r"pip install 'onecrop\[onnx\]'"):
        export(saved("tiny"), "onnx")


def test_a_file_with_other_features_does_not_stay(saved, monkeypatch, capsys):
    run = saved("resnet18")
    usual, endings, honest = FORMATS["torchvision"]

    def off(net, facts, path, suffix):
        read_back = honest(net, facts, path, suffix)
        return lambda x: read_back(x) * 1.01

    monkeypatch.setitem(FORMATS, "torchvision", (usual, endings, off))
    assert main(["export", str(run), "--format", "torchvision"]) == 1
    assert "is not written" in capsys.readouterr().err
    assert [file.name for file in run.iterdir()] == ["backbone.safetensors"]
    assert compare_features(lambda x: x, lambda x: x + 1, torch.ones(2, 2)) == (1, 1)


def test_nothing_is_overwritten(saved):
    run = saved("resnet18")
    (run / "torchvision.safetensors").write_text("mine")
    with pytest.raises(UserError, match="exists and is not overwritten"):
        export(run, "torchvision")
    with pytest.raises(UserError, match=r"let it end in \.onnx"):
        export(run, "onnx", run / "model.bin")
    assert (run / "torchvision.safetensors").read_text() == "mine"


def test_three_lines_in_a_fresh_python(small_recipe):
    """As they stand on the run's card."""
    run = pretrain(small_recipe)
    block = (run / "card.md").read_text().split("```")[1].removeprefix("python\n")
    assert len(block.strip().splitlines()) == 3
    code = block + "assert features.shape == (1, 256); assert not features.requires_grad"
    subprocess.run([sys.executable, "-c", code], cwd=run.parent, check=True)


def test_the_card_says_what_it_is_and_keeps_up(small_recipe):
    run = pretrain(small_recipe)
    card = (run / "card.md").read_text()
    for words in (
        "# run",
        "tiny backbone",
        "shapes: 256 images",
        "| epochs | 2 |",
        "dim 32",
        "None yet",
        "small images",
    ):
        assert words in card, words
    evaluate(run, evaluations=("knn",), k=5)
    row = evaluate(run, evaluations=("knn",), k=20)[0]
    card = (run / "card.md").read_text()
    assert "None yet" not in card
    assert card.count("| pretrained | knn | shapes |") == 2  # two protocols
    assert f"| {row['accuracy']:.1f} | 2 epochs, k 20, T 0.1" in card
    evaluate(run, evaluations=("knn",), k=20)
    assert (run / "card.md").read_text().count("| pretrained | knn | shapes |") == 2


def test_a_card_that_cannot_be_written_loses_no_score(small_recipe, capsys):
    run = pretrain(small_recipe)
    (run / "provenance.json").write_text("{")
    assert evaluate(run, evaluations=("knn",))[0]["accuracy"] > 0
    assert "no model card" in capsys.readouterr().err
