"""Detection on real photographs, where compact copies of VOC and COCO lie beside the checkout; skipped elsewhere."""

import json

import pytest
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from onecrop.detect import DetectRecipe, detect
from onecrop.detect import model as model_module
from onecrop.detect import weights as weights_module
from onecrop.detect.batches import Batches
from onecrop.detect.coco import draw_outlines, load_coco
from onecrop.detect.voc import load_voc
from tests.conftest import DATA
from tests.integration.test_real_data import unpack
from tests.unit.test_detect_score import compare_with_pycocotools

pytestmark = pytest.mark.skipif(not (DATA / "unpack.py").exists(), reason="no real data beside the checkout")


def test_voc(tmp_path):
    unpack("voc-mini", tmp_path)
    train, val = (load_voc(tmp_path, (2007,), part) for part in ("train", "val"))
    assert (len(train), len(val)) == (320, 160)
    for part in (train, val):
        assert part.notes == {}
        assert {label for picture in part.pictures for label in picture.labels.tolist()} == set(range(1, 21))
        easy = [row for row in part.truth["annotations"] if not row["iscrowd"]]
        assert 0 < len(easy) < len(part.truth["annotations"])
    assert len(train.truth["annotations"]) == 1100
    assert len(val.truth["annotations"]) == 540


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools under NumPy 2
def test_coco(tmp_path):
    unpack("coco-mini", tmp_path)
    train, val = (load_coco(tmp_path / "coco-mini", f"{part}2017", masks=True) for part in ("train", "val"))
    assert (len(train), len(val), len(train.categories)) == (100, 100, 80)
    assert (len(train.truth["annotations"]), len(val.truth["annotations"])) == (746, 712)
    assert train.with_objects().notes == {"pictures without objects left out of training": 2}
    theirs = pytest.importorskip("pycocotools.mask")
    for picture in val.pictures[:20]:
        drawn = draw_outlines(picture.outlines, picture.height, picture.width)
        for outline, mask in zip(picture.outlines, drawn, strict=True):
            runs = theirs.merge(theirs.frPyObjects(outline, picture.height, picture.width))
            assert (theirs.decode(runs) == mask).all()
    assert all(1 < score < 99 for score in compare_with_pycocotools(val))


def learn_by_heart(folder, monkeypatch, photographs, **changes):
    """`onecrop detect` on a few photographs of COCO, every step seeing all of them in the size they are tested in."""
    unpack("coco-mini", folder)
    root = folder / "coco-mini"
    content = json.loads((root / "annotations" / "instances_train2017.json").read_text())
    content["images"] = [row for row in content["images"] if row["id"] in photographs]
    content["annotations"] = [row for row in content["annotations"] if row["image_id"] in photographs]
    (root / "annotations" / "instances_few.json").write_text(json.dumps(content))
    (root / "train2017").rename(root / "few")
    recipe = DetectRecipe(
        data=str(root), set="coco", train_part="few", test_part="few", out=str(folder / "run"), backbone="resnet18"
    ).override({"batch_size": len(photographs), "norm_steps": 10, **changes})
    sizes = recipe.sizes()
    monkeypatch.setattr(
        Batches, "_plan", lambda self, step: [(p, sizes.test, sizes.longest, False, self.masks) for p in self.pictures]
    )
    return detect(recipe)


def thin_resnet(*_):
    """A ResNet of a quarter of the width and half of the depth, so that a CPU learns in a minute."""
    net = ResNet(BasicBlock, [1, 1, 1, 1])
    net.conv1, net.bn1, net.fc = nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(16), nn.Identity()
    net.inplanes, net.dim = 16, 128
    for stage, stride in ((1, 1), (2, 2), (3, 2), (4, 2)):
        setattr(net, f"layer{stage}", net._make_layer(BasicBlock, 8 * 2**stage, 1, stride))
    return net


def test_one_batch_of_photographs_is_learned_by_heart(tmp_path, monkeypatch):
    """Boxes to an AP above .9 from scratch; masks of 14×14 are found too, though not to the last pixel."""
    monkeypatch.setattr(weights_module, "build_backbone", thin_resnet)
    monkeypatch.setattr(model_module, "KEPT", {"training": 2_000, "testing": 100})
    zebra, dog, aeroplane, bear = 34, 42, 81, 502
    shrunk = {"scale": 160 / 90_000, "size_scale": 0.16, "crops": 32, "device": "cpu"}
    boxes, masks = learn_by_heart(tmp_path, monkeypatch, (zebra, dog, aeroplane, bear), **shrunk)
    assert (boxes["iterations"], boxes["num_train"]) == (160, 4)
    assert boxes["AP"] > 90
    assert masks["AP50"] > 90
    assert masks["AP"] > 60
