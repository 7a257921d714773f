"""Detection on real photographs, where compact copies of VOC and COCO lie beside the checkout; skipped elsewhere."""

import pytest

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
    compare_with_pycocotools(val)
