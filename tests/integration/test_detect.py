"""Detection from the command line on drawn pictures: train, detect, score, kill, resume, and every bad input."""

import json
import os
import signal
import sys

import pytest
import torch

from onecrop import Recipe
from onecrop.cli import main
from onecrop.detect import DetectRecipe, detect, infer, score_run
from onecrop.detect import model as model_module
from onecrop.detect.train import Training
from onecrop.errors import StoppedError, UserError
from onecrop.nets import build_backbone, save_backbone
from onecrop.tensors import load_tensors
from tests.drawn import SCENES, write_coco, write_voc, write_xml

STEPS = 4


@pytest.fixture(autouse=True)
def _few_proposals(monkeypatch):
    """A thousand crops a picture take a CPU half a minute."""
    monkeypatch.setattr(model_module, "KEPT", {"training": 50, "testing": 8})


@pytest.fixture
def small(tmp_path):
    """Four steps of two pictures of 48 to 80 px."""
    return DetectRecipe(
        data=str(write_voc(tmp_path)),
        set="voc07",
        out=str(tmp_path / "run"),
        backbone="resnet18",
        scale=STEPS / 24_000,
        size_scale=0.1,
        batch_size=2,
        crops=4,
        norm_steps=1,
        device="cpu",
        checkpoint_seconds=0,
    )


@pytest.fixture
def refused(capsys):
    """Run a command that must fail and return its one sentence."""

    def call(*arguments):
        capsys.readouterr()
        assert main(["detect", *map(str, arguments)]) == 1
        sentence = capsys.readouterr().err.strip().splitlines()[-1]
        assert sentence.startswith("onecrop: ")
        assert "Traceback" not in sentence
        return sentence

    return call


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def state_of(folder):
    """All that a run has computed: weights, optimiser, loss terms, detections."""
    tensors, facts = load_tensors(folder / "checkpoint" / "state.safetensors")
    metrics = [{k: v for k, v in row.items() if k != "seconds"} for row in rows_of(folder, "metrics.jsonl")]
    return tensors, facts, metrics, (folder / "detections.json").read_bytes()


def assert_same(one, two):
    assert one[0].keys() == two[0].keys()
    assert all(torch.equal(one[0][key], two[0][key]) for key in one[0])
    assert one[1:] == two[1:]


def test_mask_rcnn_from_a_pretrained_run(tmp_path, capsys):
    """COCO with masks by the command line; the files say what was loaded and how small the run was; scored again."""
    torch.manual_seed(0)
    facts = {"backbone": "resnet18", "stem": "standard", "image_size": 224, "method": "sid", "epoch": 3, "data": "x"}
    save_backbone(tmp_path / "pretrained" / "backbone.safetensors", build_backbone("resnet18", "standard"), facts)
    out = tmp_path / "run"
    shrunk = f"--scale {2 / 90_000} --size-scale 0.1 --batch-size 2 --crops 4 --norm-steps 1 --device cpu".split()
    arguments = [tmp_path / "pretrained", "--data", write_coco(tmp_path), "--set", "coco", "--out", out, *shrunk]
    assert main(["detect", *map(str, arguments)]) == 0
    said = capsys.readouterr().out
    assert "all 120 tensors of stem and stages 1–4" in said
    assert "1 pictures without objects left out of training" in said
    boxes, masks = rows_of(out, "results.jsonl")
    assert (boxes["evaluation"], masks["evaluation"]) == ("detection boxes", "detection masks")
    assert boxes.keys() >= {"AP", "AP50", "AP75"}
    assert (boxes["scale"], boxes["iterations"], boxes["size_scale"]) == (2 / 90_000, 2, 0.1)
    assert (boxes["of"], boxes["loaded_tensors"], boxes["pretraining"]) == ("pretrained", 120, facts)
    assert (boxes["num_train"], boxes["num_test"]) == (3, 4)
    assert rows_of(out, "metrics.jsonl")[-1].keys() >= {"objectness", "proposals", "classes", "boxes", "masks"}
    found = json.loads((out / "detections.json").read_text())
    assert {row["image_id"] for row in found} <= {int(stem) * 10 for stem in SCENES}
    assert all(row["category_id"] in (3, 18) and "segmentation" in row for row in found)
    for picture in (tmp_path / "coco").rglob("*.jpg"):
        picture.unlink()  # scoring needs the two files alone
    assert main(["detect", "--out", str(out), "--resume", "--metric", "voc07"]) == 0
    assert rows_of(out, "results.jsonl")[-1]["metric"] == "voc07"
    again = score_run(out)
    assert [row["AP"] for row in again] == [boxes["AP"], masks["AP"]]


def test_killed_and_resumed_equals_uninterrupted(small, tmp_path, monkeypatch):
    """Killed twice, the first time before there is a checkpoint. Of four steps the last is behind a drop."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    honest, rates = Training._take_step, []

    def noted(self):
        honest(self)
        rates.append([group["lr"] for group in self.optimizer.param_groups])

    with monkeypatch.context() as patched:
        patched.setattr(Training, "_take_step", noted)
        detect(small.override({"out": str(whole)}))
    assert rates == [[0.02] * 2] * 3 + [[pytest.approx(0.002)] * 2]

    for last in (0, 2):

        def dying(self, last=last):
            if self.step == last:
                raise MemoryError
            honest(self)

        with monkeypatch.context() as patched:
            patched.setattr(Training, "_take_step", dying)
            with pytest.raises(MemoryError):
                detect(small.override({"out": str(broken)}), resume=True)
        assert not (broken / "detections.json").exists()
        assert (broken / "checkpoint").exists() == bool(last)
        torch.manual_seed(99)  # another process has other random numbers
    detect(small.override({"out": str(broken)}), resume=True)
    assert_same(state_of(whole), state_of(broken))


def test_control_c_saves_and_says_how_to_go_on(small, monkeypatch, tmp_path):
    honest = Training._take_step

    def interrupted(self):
        honest(self)
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Training, "_take_step", interrupted)
    with pytest.raises(
        UserError, match=r"stopped at step 2 of 4; saved: continue with `onecrop detect --out .* --resume"
    ):
        detect(small.override({"checkpoint_seconds": 1000}))
    assert load_tensors(tmp_path / "run" / "checkpoint" / "state.safetensors")[1]["step"] == 2
    monkeypatch.undo()
    monkeypatch.setattr(model_module, "KEPT", {"training": 50, "testing": 8})
    assert main(["detect", "--out", str(tmp_path / "run"), "--resume"]) == 0


@pytest.mark.parametrize(
    ("place", "name", "what"), [(infer, "_rows", "testing"), (Training, "_measure_norms", "norms")]
)
def test_control_c_after_the_last_step_loses_none(small, monkeypatch, tmp_path, place, name, what):
    honest = getattr(place, name)

    def interrupted(*given):
        os.kill(os.getpid(), signal.SIGTERM)
        return honest(*given)

    monkeypatch.setattr(place, name, interrupted)
    with pytest.raises(StoppedError, match=rf"{what}, with all steps taken and saved: continue with `onecrop detect"):
        detect(small.override({"norm_steps": 2}))
    assert not (tmp_path / "run" / "detections.json").exists()
    monkeypatch.setattr(place, name, honest)
    monkeypatch.setattr(Training, "_take_step", lambda self: pytest.fail("a step was taken again"))
    assert detect(small.override({"norm_steps": 2}), resume=True)


def test_what_was_learned_is_kept_when_a_picture_breaks(small, tmp_path, monkeypatch):
    """A header may be whole and the rest not: that shows only when the picture is read, here before the fourth step."""
    honest = Training._take_step

    def breaking(self):
        honest(self)
        if self.step == 1:
            for futures in self.batches.pending.values():  # what is being read ahead, for the second and third
                assert all(future.result() for future in futures)
            for picture in (tmp_path / "VOCdevkit").rglob("*.jpg"):
                picture.write_bytes(picture.read_bytes()[:700])

    monkeypatch.setattr(Training, "_take_step", breaking)
    with pytest.raises(UserError, match=r"\.jpg cannot be decoded"):
        detect(small.override({"checkpoint_seconds": 1000}))
    assert load_tensors(tmp_path / "run" / "checkpoint" / "state.safetensors")[1]["step"] == 3


def test_a_loss_that_is_no_number_ends_the_run_with_a_sentence(small, tmp_path):
    with pytest.raises(UserError, match=r"not (a )?finite.* lower --lr"):
        detect(small.override({"lr": 1e30}))
    kept, _ = load_tensors(tmp_path / "run" / "checkpoint" / "state.safetensors")
    assert all(value.isfinite().all() for value in kept.values())


def test_frozen_norms_stay_as_they_were(small, tmp_path):
    file = tmp_path / "weights.pth"
    torch.manual_seed(1)
    torch.save(build_backbone("resnet18", "standard").state_dict(), file)
    detect(small.override({"weights": str(file), "norm": "frozen", "scale": 2 / 24_000}))
    tensors, _ = load_tensors(tmp_path / "run" / "checkpoint" / "state.safetensors")
    assert tensors["model.trunk.bn1.running_mean"].eq(0).all()
    assert tensors["model.trunk.bn1.weight"].eq(1).all()
    assert rows_of(tmp_path / "run", "results.jsonl")[0]["of"] == "torchvision"


def test_bad_input_is_one_sentence_before_anything_is_trained(refused, tmp_path):
    voc, coco, out = write_voc(tmp_path), write_coco(tmp_path), tmp_path / "run"
    base = ["scratch", "--backbone", "resnet18", "--out", out]
    assert "say what to start from" in refused("--data", voc)
    assert "no folder" in refused(*base, "--data", tmp_path / "nowhere", "--set", "voc07")
    assert "no VOC2007 in" in refused(*base, "--data", coco, "--set", "voc07")
    assert "VOC2012/ImageSets" in refused(*base, "--data", voc, "--set", "voc0712").replace(os.sep, "/")
    assert "it has test, trainval: choose with" in refused(*base, "--data", voc, "--set", "voc07", "--test-part", "val")
    assert "cannot be read; --data is the folder" in refused(*base, "--data", voc, "--set", "coco")
    assert "did you mean --size-scale" in refused(*base, "--size-scal", "1")
    assert "no backbone at" in refused(tmp_path / "typo", "--data", voc, "--set", "voc07")
    assert "unknown device 'warp'" in refused(*base, "--data", voc, "--set", "voc07", "--device", "warp")
    assert "is not a detection run" in refused("--out", tmp_path / "typo", "--resume")
    pretraining = tmp_path / "pretraining"
    pretraining.mkdir()
    (pretraining / "recipe.json").write_text(json.dumps(Recipe().to_json()))
    assert "is not a detection run of this verb" in refused("--out", pretraining, "--resume")
    (voc / "VOC2007" / "JPEGImages" / "000002.jpg").unlink()
    assert "000002.jpg is missing" in refused(*base, "--data", voc, "--set", "voc07")
    assert not out.exists()


def test_sets_with_nothing_in_them(refused, tmp_path):
    voc = write_voc(tmp_path)
    base = ["scratch", "--backbone", "resnet18", "--out", tmp_path / "run", "--data", voc, "--set", "voc07"]
    lists = voc / "VOC2007" / "ImageSets" / "Main"
    (lists / "test.txt").write_text("000004\n")
    assert "VOC2007 test has no object to find" in refused(*base)
    (lists / "trainval.txt").write_text("000004\n")
    (lists / "test.txt").write_text("000001\n")
    assert "nothing to train on" in refused(*base)
    (lists / "trainval.txt").write_text("\n")
    assert "names no picture" in refused(*base)


def test_runs_are_not_overwritten_nor_continued_with_another_recipe(small, refused, tmp_path):
    detect(small.override({"scale": 1 / 24_000}))
    out = tmp_path / "run"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "log.txt"}
    with pytest.raises(UserError, match="exists and is not overwritten"):
        detect(small)
    assert "was begun with --lr 0.02, not 0.5" in refused("--out", out, "--resume", "--lr", "0.5")
    assert {path: path.read_bytes() for path in before} == before
    (out / "detections.json").write_text("{")
    assert "detections.json cannot be read" in refused("--out", out, "--resume")
    (out / "detections.json").unlink()
    with pytest.raises(UserError, match="has no detections yet"):
        score_run(out)
    write_xml(tmp_path / "VOCdevkit/VOC2007/Annotations/000003.xml", (100, 80), [("car", 1, 2, 30, 40, False)])
    assert "was begun with other images" in refused("--out", out, "--resume")


def test_a_missing_extra_is_named_before_training(small, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(UserError, match=r"pip install 'onecrop\[detection\]'"):
        detect(small.override({"metric": "coco"}))
    assert not (tmp_path / "run").exists()
    detect(small.override({"scale": 1 / 24_000}))  # boxes of VOC need nothing more
    assert rows_of(tmp_path / "run", "results.jsonl")[0]["metric"] == "voc07"
