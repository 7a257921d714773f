"""A backbone pretrained on one data set, scored on another, at an input size of its own."""

import pytest

from onecrop import UserError, evaluate, pretrain
from onecrop.augment import describe_central_crop
from onecrop.cli import main
from onecrop.compare import run_all
from onecrop.files import read_json_lines
from tests.pictures import write_pictures


def test_a_transfer_says_size_and_resizing_in_its_rows(small_recipe, capsys):
    run = pretrain(small_recipe)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--data", "digits", "--with", "knn,linear-fast", "--baselines"]) == 0
    out = capsys.readouterr().out
    assert "shapes → digits: 16 px (stored at 8 px; the central square, enlarged to 16 px" in out
    rows = read_json_lines(run / "results.jsonl")
    assert {(row["data"], row["image_size"]) for row in rows} == {("digits", 16)}
    assert all(row["pretraining"]["data"] == "shapes" and "enlarged to 16 px" in row["resize"] for row in rows)
    trained = {row["evaluation"]: row["accuracy"] for row in rows if row["of"] == "pretrained"}
    assert min(trained.values()) > 30  # a tenth by chance

    larger = evaluate(run, "digits", ("knn",), image_size=24)
    assert larger[0]["image_size"] == 24
    assert larger[0]["accuracy"] != trained["knn"]
    card = (run / "card.md").read_text()
    assert "; 16 px, stored at 8 px" in card
    assert "; 24 px, stored at 8 px" in card


def test_only_the_runs_own_data_lose_their_duplicates(small_recipe, tmp_path):
    """Two runs that are scored on another set are scored on the same images of it."""
    for name in ("own", "other"):
        for label in ("a", "b"):
            first = 100 * (name == "other") + 10 * (label == "b")
            folder = write_pictures(tmp_path / name / label, 6, first)
            (folder / "copy.jpg").write_bytes((folder / f"{first:05d}.jpg").read_bytes())
    changes = {"data": str(tmp_path / "own"), "subset": None, "batch_size": 6, "epochs": 1, "drop_duplicates": True}
    run = pretrain(small_recipe.override(changes))
    for data, images in ((None, 12), (str(tmp_path / "other"), 14)):
        (row,) = evaluate(run, data, ("knn",))
        assert row["num_train"] + row["num_test"] == images


def test_a_score_at_another_size_or_with_fewer_labels_is_not_the_runs_own(small_recipe, tmp_path):
    members = {"a": small_recipe.override({"epochs": 1})}
    run_all(members, tmp_path / "c", ["knn"])
    own = (tmp_path / "c" / "comparison.csv").read_text()
    evaluate(tmp_path / "c" / "a", None, ("knn",), image_size=32)
    few = evaluate(tmp_path / "c" / "a", None, ("knn",), subset=50)
    assert few[0]["num_train"] == 50
    run_all(members, tmp_path / "c", ["knn"])
    assert (tmp_path / "c" / "comparison.csv").read_text() == own


def test_an_input_size_that_does_not_do_is_refused(small_recipe):
    run = pretrain(small_recipe.override({"epochs": 1}))
    with pytest.raises(UserError, match="--image-size 4 is out of range"):
        evaluate(run, "digits", ("knn",), image_size=4)


def test_what_is_said_of_a_central_crop():
    assert describe_central_crop(32, 32) == "stored at 32 px; the central square, as it is"
    assert "7/8 of the central square, enlarged to 224 px" in describe_central_crop(32, 224)
    assert "7/8 of the central square, as it is" in describe_central_crop(256, 224)
    assert "the central square, reduced to 32 px" in describe_central_crop(64, 32)
