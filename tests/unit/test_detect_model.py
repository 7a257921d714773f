"""The detector: where weights go, what the C4 layout is, what the heads are taught."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchvision.models import get_model
from torchvision.ops import FrozenBatchNorm2d

from onecrop.detect.batches import Sample
from onecrop.detect.model import Detector, mask_targets, pad
from onecrop.detect.recipe import SCHEDULES, DetectRecipe
from onecrop.detect.train import Training, parameter_groups
from onecrop.detect.weights import load_start
from onecrop.errors import UserError
from onecrop.nets import build_backbone, save_backbone

FACTS = {"backbone": "resnet18", "stem": "standard", "image_size": 224, "data": "drawn", "method": "sid", "epoch": 1}


def backbone_file(folder, name="resnet18", stem="standard", change=None):
    torch.manual_seed(3)
    net = build_backbone(name, stem)
    for module in net.modules():  # statistics and gains that no fresh network has
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight)
            nn.init.uniform_(module.running_mean)
            module.num_batches_tracked += 7
    if change:
        change(net)
    save_backbone(folder / "backbone.safetensors", net, {**FACTS, "backbone": name, "stem": stem})
    return folder


@pytest.mark.parametrize(("name", "count"), [("resnet18", 120), ("resnet50", 318)])
@pytest.mark.parametrize("frozen", [False, True])
def test_every_tensor_of_the_backbone_is_in_the_detector(tmp_path, name, count, frozen):
    """Strict count: ResNet-18 has 120 tensors without its classifier, ResNet-50 318."""
    torch.manual_seed(3)
    start = load_start(str(backbone_file(tmp_path, name)), None, seed=0)
    given = {key: value.clone() for key, value in start.net.state_dict().items()}
    assert (start.loaded, start.backbone, start.of) == (count, name, "pretrained") == (len(given), name, "pretrained")
    assert start.pretraining["method"] == "sid"
    state = Detector(start.net, 20, masks=True, frozen_norm=frozen).state_dict()
    places = {key: f"heads.box_head.{key}" if key.startswith("layer4") else f"trunk.{key}" for key in given}
    if frozen:
        places = {key: place for key, place in places.items() if not key.endswith("num_batches_tracked")}
    for key, place in places.items():
        assert torch.equal(state[place], given[key]), key
    new = state.keys() - set(places.values())
    assert {key.split(".")[0] + "." + key.split(".")[1] for key in new} == {
        *("proposals.head", "heads.box_head", "heads.box_predictor", "heads.mask_branch")
    }
    assert {key for key in new if "box_head" in key} >= {"heads.box_head.norm.weight", "heads.box_head.norm.bias"}


def drop(net):
    del net.layer3[1].bn2


def widen(net):
    net.layer4[1].conv2 = nn.Conv2d(512, 512, 1, bias=False)


def add(net):
    net.extra = nn.Linear(2, 2)


def poison(net):
    net.layer1[0].conv1.weight.data[0] = float("nan")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop, r"layer3.1.bn2.weight is missing, and 3 more like that"),
        (widen, r"layer4.1.conv2.weight is \[512, 512, 1, 1\], not \[512, 512, 3, 3\]"),
        (add, "extra.bias is not one of its keys, and 1 more"),
        (poison, "not finite, in layer1.0.conv1.weight"),
    ],
)
def test_a_backbone_that_does_not_fit_is_refused(tmp_path, change, words):
    with pytest.raises(UserError, match=words):
        load_start(str(backbone_file(tmp_path, change=change)), None, seed=0)


def test_other_networks_and_stems_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="--stem standard"):
        load_start(str(backbone_file(tmp_path, stem="small")), None, seed=0)
    with pytest.raises(UserError, match="holds mobilenet_v2: detection with the C4 layout takes resnet18 or resnet50"):
        load_start(str(backbone_file(tmp_path, "mobilenet_v2")), None, seed=0)
    with pytest.raises(UserError, match="holds resnet18, not resnet50"):
        load_start(str(backbone_file(tmp_path)), "resnet50", seed=0)
    with pytest.raises(UserError, match="no backbone at"):
        load_start(str(tmp_path / "nowhere"), None, seed=0)


class Harmful:
    def __reduce__(self):
        return (print, ("executed",))


def test_weights_of_torchvision_are_loaded_and_never_executed(tmp_path, capsys):
    file, state = tmp_path / "resnet18.pth", get_model("resnet18", weights=None).state_dict()
    torch.save(state, file)
    start = load_start(str(file), "resnet18", seed=0)
    assert (start.loaded, start.of) == (120, "torchvision")
    assert torch.equal(start.net.state_dict()["layer4.1.bn2.weight"], state["layer4.1.bn2.weight"])
    old = {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}
    torch.save(old, file)  # as torchvision's oldest files are
    assert load_start(str(file), "resnet18", seed=0).loaded == 100
    for content, words in (
        ({"state_dict": state}, "does not hold a plain state dict"),
        ({**old, "conv1.weight": old["conv1.weight"][:, :1]}, r"conv1.weight is \[64, 1, 7, 7\], not"),
    ):
        torch.save(content, file)
        with pytest.raises(UserError, match=words):
            load_start(str(file), "resnet18", seed=0)
    for raw in (b"", b"junk", pickle.dumps(Harmful())):
        file.write_bytes(raw)
        with pytest.raises(UserError, match="is damaged, or holds more"):
            load_start(str(file), "resnet18", seed=0)
    torch.save({"a": Harmful()}, file)
    with pytest.raises(UserError, match="is damaged, or holds more"):
        load_start(str(file), "resnet18", seed=0)
    assert "executed" not in capsys.readouterr().out
    with pytest.raises(UserError, match="no file"):
        load_start(str(tmp_path / "none.pth"), "resnet18", seed=0)
    with pytest.raises(UserError, match="--backbone resnet18 or"):
        load_start("scratch", None, seed=0)


def test_the_layout_is_c4():
    model = Detector(build_backbone("resnet50", "standard"), 80, masks=True).eval()
    x = torch.zeros(1, 3, 64, 96)
    with torch.no_grad():
        features = model.trunk(x)
        assert features.shape == (1, 1024, 4, 6)  # stride 16
        seen = model.heads._features(features, [torch.tensor([[0.0, 0.0, 32.0, 32.0]])])
        assert seen.shape == (1, 2048, 7, 7)
        assert model.heads.mask_branch(seen).shape == (1, 81, 14, 14)
    anchors = model.proposals.anchor_generator(pad([torch.zeros(3, 64, 96, dtype=torch.uint8)]), [features])[0]
    assert len(anchors) == 4 * 6 * 15
    sides = ((anchors[:15, 2] - anchors[:15, 0]) * (anchors[:15, 3] - anchors[:15, 1])).sqrt()
    assert sorted(sides.tolist()) == pytest.approx([size for size in (32, 64, 128, 256, 512) for _ in range(3)], abs=1)


def test_norms_do_not_decay_and_frozen_ones_do_not_learn():
    net = build_backbone("resnet18", "standard")
    model = Detector(net, 20)
    weights, norms = parameter_groups(model, 0.1)
    num_norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert num_norms == 20 + 1  # ResNet-18's and the extra one
    assert (norms["weight_decay"], len(norms["params"])) == (0.0, 2 * num_norms)
    assert len(weights["params"]) + len(norms["params"]) == len(list(model.parameters()))
    frozen = Detector(build_backbone("resnet18", "standard"), 20, frozen_norm=True)
    assert sum(isinstance(module, FrozenBatchNorm2d) for module in frozen.modules()) == num_norms
    assert parameter_groups(frozen, 0.1)[1]["params"] == []


def test_mask_targets_are_what_lies_under_the_box():
    masks = torch.zeros(2, 40, 40, dtype=torch.uint8)
    masks[1, 10:20, 10:30] = 1  # 20 wide and 10 high, in the pixels of the file
    sample = Sample(torch.zeros(3, 80, 80), torch.zeros(2, 4), torch.ones(2), masks, torch.full((4,), 2.0))
    boxes = torch.tensor([[20.0, 20.0, 60.0, 40.0], [20.0, 20.0, 60.0, 60.0], [0.0, 0.0, 16.0, 16.0]])  # twice as large
    whole, upper, nothing = mask_targets(sample, boxes, torch.tensor([1, 1, 1]))
    assert whole.eq(1).all()
    assert upper[:7].eq(1).all()
    assert upper[7:].eq(0).all()
    assert nothing.eq(0).all()


def test_bfloat16_is_for_the_convolutions_alone():
    """Losses agree with those of float32, and boxes stay float32: in bfloat16 they would be off by whole pixels."""
    torch.manual_seed(0)
    masks = torch.zeros(1, 64, 96, dtype=torch.uint8)
    masks[0, 8:56, 16:80] = 1
    image = torch.randint(0, 256, (3, 64, 96), dtype=torch.uint8)
    sample = Sample(image, torch.tensor([[16.0, 8.0, 80.0, 56.0]]), torch.tensor([2]), masks, torch.ones(4))
    model = Detector(build_backbone("resnet18", "standard"), 4, masks=True, size_scale=0.2, num_crops=8)
    terms = {}
    for dtype in (torch.float32, torch.bfloat16):
        model.dtype = dtype
        torch.manual_seed(1)
        losses = model.train()([sample])
        assert all(value.dtype == torch.float32 for value in losses.values())
        sum(losses.values()).backward()
        terms[dtype] = [value.item() for value in losses.values()]
    assert terms[torch.bfloat16] == pytest.approx(terms[torch.float32], rel=0.1, abs=0.02)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    with torch.no_grad():
        found = model.eval()([sample])[0]
    assert {name: value.dtype for name, value in found.items()} == {
        **dict.fromkeys(("boxes", "scores", "masks"), torch.float32),
        "labels": torch.int64,
    }


def test_padding_is_zero_after_normalisation():
    images = [torch.full((3, 20, 30), 255, dtype=torch.uint8), torch.zeros(3, 33, 10, dtype=torch.uint8)]
    batch = pad(images)
    assert batch.tensors.shape == (2, 3, 48, 32)
    assert batch.image_sizes == [(20, 30), (33, 10)]
    assert batch.tensors[0, :, 20:].eq(0).all()
    assert batch.tensors[0, 0, 0, 0] == pytest.approx((1 - 0.485) / 0.229)


def test_schedules_shrink_as_a_whole():
    assert SCHEDULES["24k"].scaled(0.01) == (240, (180, 220), 1)
    assert DetectRecipe(set="coco", schedule="2x", scale=0.001).steps() == (180, (120, 160), 1)
    whole = DetectRecipe(set="voc0712").steps()
    assert [whole.share(step) for step in (0, 50, 100, 17_999, 18_000, 22_000)] == pytest.approx(
        [0.001, 0.5005, 1, 1, 0.1, 0.01]
    )
    sizes = DetectRecipe(set="voc07", size_scale=0.25).sizes()
    assert (sizes.train[0], sizes.train[-1], len(sizes.train), sizes.test, sizes.longest) == (120, 200, 11, 200, 333)
    assert DetectRecipe(set="coco").sizes().train == (640, 672, 704, 736, 768, 800)


def test_recipes_survive_json_and_refuse_what_cannot_be():
    recipe = DetectRecipe(set="coco", scale=0.5, masks=False).resolved()
    assert DetectRecipe.from_json(recipe.to_json()) == recipe
    assert recipe.changed(DetectRecipe(set="coco", scale=0.25, metric="voc07")) == {"scale": (0.5, 0.25)}
    for changes, words in (
        ({"masks": True}, "boxes alone"),
        ({"norm": "frozen"}, "use --norm batch"),
        ({"scale": 0}, "--scale 0.0 is out of range"),
        ({"size_scale": 0.01}, "--size-scale 0.01 is out of range"),
        ({"set": "voc12"}, "it takes voc07"),
        ({"scales": 1}, "did you mean 'scale'"),
    ):
        with pytest.raises(UserError, match=words):
            DetectRecipe().override(changes)


def test_norms_are_measured_anew_as_plain_means_over_batches():
    """By two batches after the last step, whatever the running means were before."""
    norm, said = nn.BatchNorm2d(3), []
    norm.running_mean.fill_(100.0)
    norm.num_batches_tracked.fill_(4)  # in training
    batches = [torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    training = SimpleNamespace(
        model=nn.Sequential(nn.Identity(), norm).eval(),
        recipe=SimpleNamespace(norm_steps=2, seed=0),
        steps=SimpleNamespace(iterations=4),
        batches=SimpleNamespace(at=lambda step: batches[step]),
        run=SimpleNamespace(say=said.append),
        device=torch.device("cpu"),
    )
    training.model.register_forward_pre_hook(lambda module, inputs: torch.stack(inputs[0]))
    Training._measure_norms(training, [])
    torch.testing.assert_close(norm.running_mean, (batches[4].mean((0, 2, 3)) + batches[5].mean((0, 2, 3))) / 2)
    variances = [batch.transpose(0, 1).flatten(1).var(1) for batch in batches[4:]]
    torch.testing.assert_close(norm.running_var, sum(variances) / 2)
    assert norm.momentum == 0.1
    assert said == ["batch norm's statistics measured over 2 batches"]
