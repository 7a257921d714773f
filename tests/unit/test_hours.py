"""The arithmetic of a plan's hours."""

import inspect

import pytest

from onecrop.detect.recipe import DetectRecipe
from onecrop.evaluate import EVALUATIONS
from onecrop.forecast import forecast_seconds
from onecrop.report.reproduction import plan_text
from onecrop.reproduce.catalogue import find_table
from onecrop.reproduce.hours import PASSES, detection_steps, images_probed
from onecrop.reproduce.needed import DataThere
from onecrop.reproduce.options import Options
from onecrop.reproduce.plan import make_plan
from onecrop.reproduce.tables import Measure

NOTHING = DataThere({}, {})  # not here: as large as the official sets


def test_work_is_told_from_smaller_work_as_far_as_it_is_quick():
    asked = []

    def seconds(size):
        asked.append(size)
        return 0.5 + 0.01 * size

    taken, largest = forecast_seconds(seconds, 2, 1024, longest=1.0)
    assert taken == pytest.approx(0.5 + 0.01 * 1024)
    assert asked == [2, 2, 8, 32]  # the first one warms up; 128 things would take more than a second
    assert largest == 32
    assert forecast_seconds(seconds, 2, 100, longest=100.0) == (pytest.approx(1.5), 100)
    assert forecast_seconds(seconds, 2, 2, longest=1.0) == (pytest.approx(0.52), 2)


def test_passes_are_those_of_the_probes():
    assert PASSES.keys() == EVALUATIONS.keys()
    for name, argument in (("linear", "epochs"), ("linear-fast", "views")):
        assert PASSES[name] == inspect.signature(EVALUATIONS[name]).parameters[argument].default


@pytest.mark.parametrize(
    ("probe", "limit", "images"),
    [
        ("linear", None, 100 * 50_000 + 10_000),
        ("linear", 2000, 100 * 2000 + 10_000),
        ("linear-fast", None, 5 * 50_000 + 10_000),
        ("knn", 2000, 2000 + 10_000),
    ],
)
def test_images_of_a_probe(probe, limit, images):
    step = make_plan(find_table("table8")[1], Options(probe=probe, images=limit))[0]
    assert images_probed(step, NOTHING) == images


def test_images_of_probes_on_other_data_and_along_the_training():
    step = make_plan(find_table("table2")[1], Options(methods=("sid",)))[0]
    assert images_probed(step, NOTHING) == 100 * 100_000 + 10_000  # tiny-imagenet; hours and detection are no probes
    assert images_probed(step._replace(measures=(Measure("hours"),)), NOTHING) == 0
    imagenet = step._replace(measures=(Measure("knn", "imagenet"),))
    assert images_probed(imagenet, NOTHING) == 1_281_167 + 50_000
    assert images_probed(imagenet, DataThere({"imagenet": 100}, {})) == 100 + 20
    elsewhere = Options(use={"tiny-imagenet": "nowhere"})
    assert images_probed(make_plan(find_table("table2")[1], elsewhere)[0], NOTHING) is None
    watched = make_plan(find_table("figure3")[1], Options(scale=0.25))[0]  # every 5 of 100 epochs
    assert images_probed(watched, NOTHING) == 100 * 50_000 + 10_000 + 20 * (5 * 50_000 + 10_000)


def test_steps_of_detection():
    assert detection_steps(DetectRecipe(set="voc07")) == pytest.approx(24_000 + 200 / 3)
    assert detection_steps(DetectRecipe(set="coco", scale=0.001)) == pytest.approx(90 + 90 / 3)
    assert detection_steps(DetectRecipe(set="coco", scale=0.001, norm="frozen", weights="run")) == 90


def test_a_plan_adds_up_and_cuts_long_names():
    common = {"data": "cifar10", "images": 50_000, "epochs": 400}
    end = "-batch_size=64-optimizer=muon-lr=0.02-weight_decay=0.05"
    rows = [
        {"run": f"sid-kl=l1{end}", **common, "state": "to do", "hours": {"pretraining": 2.0, "probes": 0.5}},
        {"run": f"sid-kl=l2{end}", **common, "state": "to do", "hours": {"pretraining": None, "probes": 0.25}},
        {"run": f"sid{end}", **common, "state": "finished", "hours": {}},
    ]
    lines = plan_text(rows, [], "cpu").splitlines()
    assert lines == [
        "run          data     images  epochs  pretrain h  probes h  state",
        "sid-kl=l1-…  cifar10  50,000     400         2.0       0.5  to do",
        "sid-kl=l2-…  cifar10  50,000     400           ?      0.25  to do",
        "sid-…        cifar10  50,000     400           –         –  finished",
        "2 runs to do, 1 of them not forecast in full: 2.8 hours on cpu, from a few steps of each kind: "
        "2.0 of pretraining + 0.75 of probes",
    ]
    assert plan_text(rows[2:], [], "cpu").splitlines()[1:] == [
        f"sid{end}  cifar10  50,000     400  finished",
        "0 runs to do",
    ]
