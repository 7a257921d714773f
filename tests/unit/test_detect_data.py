"""Readers of VOC and COCO, and the batches made of them."""

import json

import numpy as np
import pytest
import torch

from onecrop.detect.batches import Batches, Sizes, read_sample, resized
from onecrop.detect.coco import draw_outlines, load_coco, run_lengths
from onecrop.detect.sets import CLIPPED
from onecrop.detect.voc import CLASSES, load_voc
from onecrop.errors import UserError
from tests.drawn import SCENES, coco_content, plain_runs, write_coco, write_voc, write_xml

NO_AREA = "boxes without area in the picture skipped"
NO_OBJECTS = "pictures without objects left out of training"


def test_voc_counts_pixels_from_one_and_trains_on_difficult_objects(tmp_path):
    found = load_voc(write_voc(tmp_path), (2007,), "trainval")
    assert [len(picture.labels) for picture in found.pictures] == [2, 2, 1, 0]
    first, second = found.pictures[:2]
    assert first.boxes.tolist() == [[10, 10, 50, 60], [60, 20, 90, 70]]
    assert [CLASSES[label - 1] for label in first.labels] == ["dog", "car"]
    rows = [row for row in found.truth["annotations"] if row["image_id"] == second.id]
    assert [row["iscrowd"] for row in rows] == [0, 1]
    assert rows[0]["bbox"] == [20, 30, 50, 50]
    assert load_voc(tmp_path, (2007,), "test").fingerprint == found.fingerprint  # also from the folder above


def test_pictures_without_objects_are_tested_on_but_not_trained_on(tmp_path):
    found = load_voc(write_voc(tmp_path), (2007,), "trainval")
    trained = found.with_objects()
    assert len(found) == 4
    assert len(trained) == 3
    assert trained.notes == {NO_OBJECTS: 1}


def test_two_years_are_one_set(tmp_path):
    write_voc(tmp_path)
    write_voc(tmp_path, 2012)
    both = load_voc(tmp_path, (2007, 2012), "trainval")
    assert len(both) == 2 * len(SCENES)
    assert len({picture.id for picture in both.pictures}) == 2 * len(SCENES)


def test_coco_leaves_crowds_out_of_training_but_not_out_of_the_truth(tmp_path):
    found = load_coco(write_coco(tmp_path), "train2017", masks=True)
    assert found.categories == ((3, "car"), (18, "dog"))
    assert found.pictures[0].labels.tolist() == [2, 1]
    assert found.pictures[1].labels.tolist() == [1]
    assert [row["iscrowd"] for row in found.truth["annotations"]].count(1) == 1
    assert found.truth["annotations"][0]["bbox"] == [10, 10, 40, 50]


def test_outlines_are_drawn_and_packed(tmp_path):
    found = load_coco(write_coco(tmp_path), "train2017", masks=True)
    picture = found.pictures[0]
    drawn = draw_outlines(picture.outlines, picture.height, picture.width)
    wanted = np.zeros((2, 80, 100), np.uint8)
    wanted[0, 10:60, 10:50] = wanted[1, 20:70, 60:90] = 1
    assert (drawn == wanted).all()
    packed = run_lengths(wanted[0])
    plain = {"size": [80, 100], "counts": plain_runs(wanted[0])}
    assert isinstance(json.loads(json.dumps(packed))["counts"], str)
    assert (draw_outlines((packed, plain), 80, 100) == wanted[0]).all()


def test_odd_boxes_are_clipped_or_skipped_and_counted(tmp_path):
    root = write_voc(tmp_path)
    objects = [
        ("dog", -20, 10, 50, 60, False),  # over the left edge
        ("dog", 10, 10, 10, 60, False),  # no width
        ("car", 150, 10, 190, 60, False),  # beside the picture
        ("car", 60, 50, 40, 20, False),  # corners the wrong way round
    ]
    write_xml(root / "VOC2007" / "Annotations" / "000001.xml", (100, 80), objects)
    found = load_voc(root, (2007,), "trainval")
    assert found.pictures[0].boxes.tolist() == [[0, 10, 50, 60]]
    assert found.notes == {CLIPPED: 1, NO_AREA: 3}
    assert len([row for row in found.truth["annotations"] if row["image_id"] == 1]) == 1


def test_objects_without_outline_are_skipped_only_where_outlines_are_needed(tmp_path):
    content = coco_content()
    content["annotations"][0]["segmentation"] = [[1, 2, 3, 4]]  # two corners
    del content["annotations"][1]["segmentation"]
    root = write_coco(tmp_path, content)
    assert load_coco(root, "train2017", masks=True).notes == {"objects without an outline skipped": 2}
    assert load_coco(root, "train2017", masks=False).notes == {}


@pytest.mark.parametrize(
    "outline",
    [
        [[1e12, 1, 2, 1e12, 3, 3]],  # drawn, it would take the machine's memory
        [[float("nan")] * 6],
        {"size": [10, 10], "counts": [50, 50]},  # of another picture
        {"size": [80, 100], "counts": [50, 50]},  # too few pixels
        {"size": [80, 100], "counts": "zzz"},
        {"size": [80, 100], "counts": None},
    ],
)
def test_outlines_that_cannot_be_drawn_are_said_or_skipped_and_counted(tmp_path, outline):
    content = coco_content()
    content["annotations"][0]["segmentation"] = outline
    root = write_coco(tmp_path, content)
    with pytest.raises(UserError, match=r"000001\.jpg in COCO train2017 has an object whose outline .* 100×80 pixels"):
        load_coco(root, "train2017", masks=True)
    found = load_coco(root, "train2017", masks=True, skip_broken=True)
    assert found.notes == {"objects skipped as broken": 1}
    assert found.pictures[0].labels.tolist() == [1]
    assert load_coco(root, "train2017", masks=False).notes == {}


def test_outlines_may_reach_over_the_edge_and_their_area_is_the_files(tmp_path):
    content = coco_content()
    content["annotations"][0] |= {"segmentation": [[-40, -9, 150, -9, 150, 95]], "area": 1234.5}
    del content["annotations"][1]["area"]
    found = load_coco(write_coco(tmp_path, content), "train2017", masks=True)
    assert found.notes == {}
    assert [row["area"] for row in found.truth["annotations"][:2]] == [1234.5, 30 * 50]


def break_missing(root):
    (root / "VOC2007" / "JPEGImages" / "000002.jpg").unlink()


def break_header(root):
    (root / "VOC2007" / "JPEGImages" / "000002.jpg").write_bytes(b"not a picture")


def break_size(root):
    write_xml(root / "VOC2007" / "Annotations" / "000002.xml", (90, 100), [])


def break_category(root):
    write_xml(root / "VOC2007" / "Annotations" / "000002.xml", (80, 100), [("dog", 1, 1, 9, 9, False)])
    file = root / "VOC2007" / "Annotations" / "000002.xml"
    file.write_text(file.read_text().replace("dog", "unicorn"))


def break_xml(root):
    (root / "VOC2007" / "Annotations" / "000002.xml").write_text("<annotation><size>")


def break_encoding(root):
    file = root / "VOC2007" / "Annotations" / "000002.xml"
    file.write_text('<?xml version="1.0" encoding="klingon"?>' + file.read_text())


def break_list(root):
    (root / "VOC2007" / "Annotations" / "000002.xml").unlink()


def break_box(root):
    file = root / "VOC2007" / "Annotations" / "000002.xml"
    file.write_text(file.read_text().replace("<xmin>21</xmin>", "<xmin>nan</xmin>"))


@pytest.mark.parametrize(
    ("breaking", "words", "left", "note"),
    [
        (break_missing, "000002.jpg is missing", 3, {"pictures skipped as broken": 1}),
        (break_list, "000002.xml is missing", 3, {"annotations skipped as broken": 1}),
        (break_header, "cannot be read as a picture", 3, {"pictures skipped as broken": 1}),
        (break_size, "has 80×100 pixels, and its annotation says 90×100", 3, {"pictures skipped as broken": 1}),
        (break_category, "unknown category 'unicorn'", 4, {"objects skipped as broken": 1}),
        (break_xml, "000002.xml is not a VOC annotation", 3, {"annotations skipped as broken": 1}),
        (break_encoding, "000002.xml is not a VOC annotation", 3, {"annotations skipped as broken": 1}),
        (break_box, "000002.xml is not a VOC annotation", 3, {"annotations skipped as broken": 1}),
    ],
)
def test_broken_sets_are_said_or_skipped_and_counted(tmp_path, breaking, words, left, note):
    root = write_voc(tmp_path)
    breaking(root)
    with pytest.raises(UserError, match="--skip-broken true") as caught:
        load_voc(root, (2007,), "trainval")
    assert words in str(caught.value)
    found = load_voc(root, (2007,), "trainval", skip_broken=True)
    assert len(found) == len(found.truth["images"]) == left
    assert found.notes == note


def test_pictures_cut_short_are_found_where_they_are_to_be_skipped(tmp_path):
    root = write_voc(tmp_path)
    picture = root / "VOC2007" / "JPEGImages" / "000002.jpg"
    picture.write_bytes(picture.read_bytes()[:700])
    assert len(load_voc(root, (2007,), "trainval")) == 4  # the header is whole, and more is not looked at
    assert load_voc(root, (2007,), "trainval", skip_broken=True).notes == {"pictures skipped as broken": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"segmentation": [["a"] * 6]},
        {"segmentation": [[[1, 2]] * 6]},
        {"bbox": [1, 2]},
        {"bbox": None},
        {"category_id": None},
        {"area": "large"},
    ],
)
def test_one_object_of_coco_that_cannot_be_read_is_named_or_skipped(tmp_path, change):
    root, content = write_coco(tmp_path), coco_content()
    file = root / "annotations" / "instances_train2017.json"
    whole = load_coco(root, "train2017", masks=True)
    content["annotations"][0] |= change
    file.write_text(json.dumps(content))
    number = content["annotations"][0]["id"]
    with pytest.raises(
        UserError, match=f"the object {number} of .*jpg in COCO train2017 cannot be read.*--skip-broken"
    ):
        load_coco(root, "train2017", masks=True)
    found = load_coco(root, "train2017", masks=True, skip_broken=True)
    assert found.notes["objects skipped as broken"] == 1
    assert len(found.truth["annotations"]) == len(whole.truth["annotations"]) - 1


def test_coco_files_that_are_none(tmp_path):
    root = write_coco(tmp_path)
    file = root / "annotations" / "instances_train2017.json"
    with pytest.raises(UserError, match="there are train2017, val2017"):
        load_coco(root, "train2014", masks=False)
    for text, words in (
        ("{", "is not JSON"),
        ("[]", "holds no dictionary"),
        ('{"images": []}', "KeyError"),
        (json.dumps({**coco_content(), "images": []}), "that it does not list"),
        (json.dumps({"images": [], "annotations": [], "categories": []}), "no usable picture"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            load_coco(root, "train2017", masks=False)
    content = coco_content()
    content["annotations"][0]["image_id"] = float("inf")
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="is not a COCO annotation file"):
        load_coco(root, "train2017", masks=True)
    content = coco_content()
    content["annotations"][0]["category_id"] = 99
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="unknown category 99"):
        load_coco(root, "train2017", masks=False)
    assert load_coco(root, "train2017", masks=False, skip_broken=True).notes == {"objects skipped as broken": 1}


def test_sizes_are_those_of_detectron2():
    assert resized(500, 375, 800, 1333) == (1067, 800)
    assert resized(1000, 200, 800, 1333) == (1333, 267)


def test_mirroring_moves_pixels_boxes_and_masks_together(tmp_path):
    picture = load_coco(write_coco(tmp_path), "train2017", masks=True).pictures[0]
    sample = read_sample(picture, 160, 400, True, True)
    assert sample.image.shape == (3, 160, 200)
    assert sample.boxes.tolist() == [[100, 20, 180, 120], [20, 40, 80, 140]]
    assert sample.image[:, 70, 140].tolist() == pytest.approx([200, 40, 40], abs=12)  # the dog is red
    rows, columns = sample.masks[0].nonzero(as_tuple=True)
    assert (columns.min(), columns.max() + 1, rows.min(), rows.max() + 1) == (50, 90, 10, 60)


def test_batches_are_a_function_of_seed_and_step(tmp_path):
    pictures = load_voc(write_voc(tmp_path), (2007,), "trainval").with_objects()
    sizes = Sizes((40, 48, 56, 64), 64, 128)

    def batches(seed):
        return Batches(pictures, 2, sizes, masks=False, seed=seed)

    straight, jumped, other = batches(1), batches(1), batches(2)
    seen = [straight.at(step) for step in range(8)]
    for one, two in zip(seen[5], jumped.at(5), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True) if a is not None)
    shapes = [[sample.image.shape for sample in batch] for batch in seen]
    assert shapes != [[sample.image.shape for sample in other.at(step)] for step in range(8)]
    assert len({shape for batch in shapes for shape in batch}) > 4  # sizes differ
    for made in (straight, jumped, other):
        made.close()
        for epoch in range(3):
            assert set(made._order(epoch).reshape(-1).tolist()) == {0, 1, 2}
