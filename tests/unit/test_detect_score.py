"""Scores of detections: VOC07's against a sum done by hand, COCO's against pycocotools on the same detections."""

import contextlib
import copy
import io

import numpy as np
import pytest

from onecrop.detect.coco import draw_outlines, load_coco, run_lengths
from onecrop.detect.score import coco_scores, eleven_points, overlaps, voc07_scores
from onecrop.errors import UserError
from tests.drawn import write_coco


def an_object(picture, box, ignored=0, category=1):
    return {"image_id": picture, "category_id": category, "bbox": box, "iscrowd": ignored}


def a_find(picture, box, score, category=1):
    return {"image_id": picture, "category_id": category, "bbox": box, "score": score}


# three objects to find in three pictures, and a difficult one
OBJECTS = [
    an_object(1, [0, 0, 10, 10]),
    an_object(1, [20, 20, 10, 10], ignored=1),
    an_object(2, [0, 0, 10, 10]),
    an_object(3, [0, 0, 10, 10]),
]
FOUND = [
    a_find(3, [50, 50, 10, 10], 0.5),  # a miss
    a_find(1, [0, 0, 10, 10], 0.9),  # a hit
    a_find(1, [0, 0, 10, 10], 0.7),  # the same object again: a miss
    a_find(1, [20, 20, 10, 10], 0.8),  # difficult: not counted
    a_find(2, [0, 0, 10, 8.2], 0.6),  # a hit up to an overlap of .82
]


def test_voc07_by_hand():
    # hit, miss, hit, miss: recall 1/3, 1/3, 2/3, 2/3; precision 1, 1/2, 2/3, 1/2. Of the eleven recalls 0 to .3 have a
    # best precision of 1, .4 to .6 one of 2/3, and the rest none
    assert eleven_points(OBJECTS, FOUND, 0.5) == pytest.approx((4 * 1 + 3 * 2 / 3) / 11)
    assert eleven_points(OBJECTS, FOUND, 0.85) == pytest.approx(4 / 11)
    truth = {"annotations": [*OBJECTS, an_object(1, [0, 0, 5, 5], category=2), an_object(1, [0, 0, 5, 5], 1, 3)]}
    scores = voc07_scores(truth, [*FOUND, a_find(1, [0, 0, 5, 5], 0.1, category=2), a_find(1, [0, 0, 5, 5], 1.0, 4)])
    # category 2 is found whole, 3 has only a difficult object and 4 none: the mean is over 1 and 2
    assert scores["AP50"] == pytest.approx(100 * (6 / 11 + 1) / 2)
    assert scores["AP75"] == pytest.approx(100 * (6 / 11 + 1) / 2)
    assert scores["AP"] == pytest.approx(100 * ((7 * 6 + 3 * 4) / 110 + 1) / 2)


def test_voc07_without_detections_or_objects():
    assert voc07_scores({"annotations": OBJECTS}, []) == {"AP": 0, "AP50": 0, "AP75": 0}
    with pytest.raises(UserError, match="no object to find"):
        voc07_scores({"annotations": OBJECTS[1:2]}, FOUND)


def test_overlap_of_boxes_counts_whole_pixels_as_voc_does():
    """VOC adds 1 to sides because its pixels are inclusive; in edges of pixels the same overlap needs no such term."""
    one, two = (3, 4, 12, 20), (5, 2, 14, 15)  # 1-based and inclusive
    common = (12 - 5 + 1) * (15 - 4 + 1)
    union = (12 - 3 + 1) * (20 - 4 + 1) + (14 - 5 + 1) * (15 - 2 + 1) - common
    first, second = (np.array([left - 1, top - 1, right, bottom], float) for left, top, right, bottom in (one, two))
    assert overlaps(first, second[None])[0] == pytest.approx(common / union)


def jittered(pictures, seed):
    """Detections near the truth and some far from it, with boxes and masks, and scores that mean little."""
    random = np.random.default_rng(seed)
    ids = [number for number, _ in pictures.categories]
    rows = []
    for picture in pictures.pictures:
        drawn = draw_outlines(picture.outlines, picture.height, picture.width)
        for box, label, mask in zip(picture.boxes, picture.labels, drawn, strict=True):
            for spread in (0, 2, 6, 20):
                shift = random.integers(-spread, spread + 1, 2)
                moved = box + np.tile(shift, 2) + random.normal(0, spread / 3, 4)
                moved[2:] = np.maximum(moved[2:], moved[:2] + 1)
                left, top, right, bottom = map(float, moved)
                category = ids[label - 1] if random.random() < 0.8 else int(random.choice(ids))
                rows.append(
                    {
                        "image_id": picture.id,
                        "category_id": category,
                        "bbox": [left, top, right - left, bottom - top],
                        "score": float(random.random()),
                        "segmentation": run_lengths(np.roll(mask, shift, (1, 0))),
                    }
                )
    return rows


def by_pycocotools(truth, rows, kind):
    coco = pytest.importorskip("pycocotools.coco")
    evaluation = pytest.importorskip("pycocotools.cocoeval")
    with contextlib.redirect_stdout(io.StringIO()):
        known = coco.COCO()
        known.dataset = copy.deepcopy(truth) | {"info": {}}
        known.createIndex()
        if kind == "segm":
            rows = [{name: row[name] for name in row if name != "bbox"} for row in rows]
        scorer = evaluation.COCOeval(known, known.loadRes(copy.deepcopy(rows)), kind)
        scorer.evaluate()
        scorer.accumulate()
        scorer.summarize()
    return [100 * value for value in scorer.stats[:3]]


def compare_with_pycocotools(pictures):
    """-> AP of boxes and of masks, which are pycocotools' own."""
    rows = jittered(pictures, seed=0)
    before, found = copy.deepcopy((pictures.truth, rows)), []
    for kind, theirs in (("boxes", "bbox"), ("masks", "segm")):
        ours = list(coco_scores(pictures.truth, rows, kind).values())
        found.append(ours[0])
        assert ours == pytest.approx(by_pycocotools(pictures.truth, rows, theirs), abs=1e-9)
    assert (pictures.truth, rows) == before
    return found


def test_coco_score_equals_pycocotools(tmp_path):
    boxes, masks = compare_with_pycocotools(load_coco(write_coco(tmp_path), "val2017", masks=True))
    assert 1 < boxes < 99  # jittered: neither all right nor all wrong
    assert 1 < masks < 99


def test_coco_score_at_its_limits(tmp_path):
    pictures = load_coco(write_coco(tmp_path), "val2017", masks=True)
    perfect = [
        {**{name: row[name] for name in ("image_id", "category_id", "bbox")}, "score": 1.0}
        for row in pictures.truth["annotations"]
    ]
    assert coco_scores(pictures.truth, perfect) == pytest.approx({"AP": 100, "AP50": 100, "AP75": 100})
    assert coco_scores(pictures.truth, []) == {"AP": 0, "AP50": 0, "AP75": 0}
