"""A comparison: resumable, one failed member does not lose the others, the table is made from the run folders."""

import csv
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from onecrop import Recipe, pretrain
from onecrop.cli import main
from onecrop.compare import compare, member, not_taken
from onecrop.errors import StoppedError, UserError
from onecrop.files import read_json_lines
from onecrop.methods import METHODS
from onecrop.report.comparison import add_to_plan, as_csv, cell, collect, latex, markdown
from tests.pictures import write_pictures

SMALL = "--backbones tiny --subset 128 --image-size 16 --batch-size 64 --epochs 1 --optimizer adamw --lr 0.001".split()


def table(folder):
    with (folder / "comparison.csv").open() as file:
        return list(csv.DictReader(file))


def test_compare_writes_one_table_and_goes_on_where_it_stopped(tmp_path, capsys):
    out = tmp_path / "c"
    arguments = ["compare", "shapes", "--methods", "pid,jigclu", "--seeds", "2", "--out", str(out), *SMALL]
    assert main(arguments) == 0
    rows = table(out)
    assert [row["method"] for row in rows] == ["jigclu", "pid"]
    assert all(row["seeds"] == "2" and float(row["knn std"]) >= 0 for row in rows)
    assert {row["crops"] for row in rows} == {"1"}
    for suffix in ("md", "tex", "png"):
        assert (out / f"comparison.{suffix}").stat().st_size > 100
    scores = [
        [r["accuracy"] for r in read_json_lines(run / "results.jsonl") if r["evaluation"] == "knn"]
        for run in sorted(out.glob("pid-*"))
    ]
    assert float(rows[1]["knn"]) == pytest.approx(sum(s[0] for s in scores) / 2)

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    (out / "pid-tiny-1" / "results.jsonl").unlink()  # as if killed before its evaluation
    capsys.readouterr()
    assert main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == before  # nothing trained again
    assert table(out) == rows
    assert "| pid |" in capsys.readouterr().out

    assert main(["results", str(out)]) == 0  # its folder is one of result files
    assert "| pid |" in (tmp_path / "c.md").read_text()

    capsys.readouterr()
    assert (
        main([*arguments, "--momentum", "0.8"]) == 1
    )  # other settings in the same folder: a mistake, not a failed member
    assert "--momentum 0.9, not 0.8" in capsys.readouterr().err
    assert table(out) == rows


def test_the_same_command_begun_twice_shares_the_work(tmp_path):
    out = tmp_path / "c"
    choice = ["--methods", "pid,jigclu", "--with", "knn", "--out", str(out), "--seeds", "2"]
    command = [sys.executable, "-m", "onecrop", "compare", "shapes", *choice, *SMALL]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both = [subprocess.Popen(command, **streams, env={**os.environ, "OMP_NUM_THREADS": "1"}) for _ in range(2)]
    said = [one.communicate()[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    made = [set(re.findall(r"finished: .*/([^/]+)/backbone", text)) for text in said]
    assert made[0].isdisjoint(made[1])
    assert len(made[0] | made[1]) == 4
    assert [(row["method"], row["seeds"]) for row in table(out)] == [("jigclu", "2"), ("pid", "2")]
    for run in out.glob("*/metrics.jsonl"):
        assert [row["epoch"] for row in read_json_lines(run)] == [1]  # once
        assert len(read_json_lines(run.with_name("results.jsonl"))) == 1
    assert not list(out.glob("*/failure.txt"))


def test_what_another_process_is_at_is_passed_over(tmp_path, capsys):
    other = not_taken(["a", "b"], tmp_path)
    assert next(other) == "a"
    assert list(not_taken(["a", "b"], tmp_path)) == ["b"]
    assert "[1/2] a\nanother process is at it\n" in capsys.readouterr().out
    assert list(other) == ["b"]  # which the other has left
    assert list(not_taken(["a", "b"], tmp_path)) == ["a", "b"]


def test_members_keep_their_recipes_batch_unless_one_is_given(tmp_path):
    base = Recipe(data="shapes")
    own = {method: member(base, method).batch_size for method in METHODS}
    assert own == dict.fromkeys(METHODS, 512) | {"moco": 256, "npid": 128, "jigclu": 256}
    assert {member(base, method).override({"batch_size": "64"}).batch_size for method in METHODS} == {64}

    out = tmp_path / "c"
    without = [a for a in SMALL if a not in ("--batch-size", "64", "--subset", "128")]
    arguments = ["compare", "shapes", "--methods", "npid,jigclu", "--subset", "256", "--out", str(out), *without]
    assert main([*arguments, "--with", "knn"]) == 0
    rows = table(out)
    assert {row["method"]: row["batch_size"] for row in rows} == {"npid": "128", "jigclu": "256"}
    assert "| batch size |" in (out / "comparison.md").read_text()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    assert main([*arguments, "--with", "knn"]) == 0  # the same call goes on where it was
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == before
    assert table(out) == rows


def test_a_method_without_a_recipe_of_its_own_is_compared_by_its_defaults(monkeypatch):
    """One file and one line in one table are all that a method takes."""
    monkeypatch.setitem(METHODS, "mine", METHODS["simclr"])
    recipe = member(Recipe(data="digits", epochs=3), "mine").override({"lr": 0.5})
    assert (recipe.method, recipe.data, recipe.epochs, recipe.lr) == ("mine", "digits", 3, 0.5)
    assert recipe.settings == METHODS["simclr"].Settings()


def test_a_stop_is_not_the_failure_of_a_member(tmp_path, capsys, monkeypatch):
    def stopping(recipe, resume):
        raise StoppedError("stopped at step 3")

    monkeypatch.setattr("onecrop.compare.pretrain", stopping)
    assert main(["compare", "shapes", "--methods", "pid,jigclu", "--out", str(tmp_path / "c"), *SMALL]) == 130
    caught = capsys.readouterr()
    assert "stopped at step 3" in caught.err
    assert "[2/2]" not in caught.out
    assert not list(tmp_path.rglob("failure.txt"))


def test_a_timm_member_that_never_began_keeps_its_name(tmp_path):
    recipe = Recipe(backbone="timm/vit_tiny_patch16_224") if find_spec("timm") else Recipe(backbone="tiny")
    name = f"sid-{recipe.backbone.replace('/', '-')}-0"
    add_to_plan(tmp_path, {name: recipe.to_json()})
    (tmp_path / name).mkdir()
    (tmp_path / name / "failure.txt").write_text("no small stem")
    assert collect(tmp_path) == [{"method": "sid", "backbone": recipe.backbone, "seeds": 0, "failure": "no small stem"}]


def test_a_sweep_has_a_column_for_what_was_varied(tmp_path, capsys):
    out = tmp_path / "s"
    small = "--subset 128 --image-size 16 --batch-size 64 --epochs 1 --dim 16 --hidden 32".split()
    arguments = ["sweep", "shapes", "--out", str(out), *small, "--with", "knn", "--holdout", "100"]
    assert main([*arguments, "--try", "", "--try", "kl-weight=0 lr=0.01"]) == 0
    rows = table(out)
    assert [(row["kl_weight"], row["lr"]) for row in rows] == [("20.0", "0.02"), ("0.0", "0.01")]
    assert all(float(row["knn"]) > 0 for row in rows)
    (result,) = read_json_lines(out / "unchanged-0" / "results.jsonl")
    assert (result["split"], result["num_train"], result["num_test"]) == ("100 training images held out", 3900, 100)
    assert main([*arguments, "--try", "temperature=0.1"]) == 0  # a later try joins the table
    assert len(table(out)) == 3

    capsys.readouterr()
    wrong = {"lr": "field=value", "learning=1": "did you mean", "lr=-1": "--lr -1", "seed=3": "--seeds"}
    for changes, words in wrong.items():
        assert main([*arguments, "--try", changes]) == 1
        assert words in capsys.readouterr().err
    assert main([*arguments, "--try", "", "--try", "dim=16"]) == 1  # one run counted as two seeds
    assert '--try "dim=16" makes the same run as another --try' in capsys.readouterr().err

    results = tmp_path / "results"
    results.mkdir()
    assert main(["results", str(results)]) == 1
    assert "no result files" in capsys.readouterr().err
    (results / "a.json").write_bytes((out / "comparison.json").read_bytes())
    assert main(["results", str(results)]) == 0
    page = (tmp_path / "results.md").read_text()
    assert "torch" in page
    assert "knn (shapes, 100 training images held out): k " in page
    assert "| kl weight |" in page
    assert f"{float(rows[0]['knn']):.1f}" in page
    (results / "b.json").write_text("{}")
    assert main(["results", str(results)]) == 1
    assert "b.json is not a result file" in capsys.readouterr().err


def test_a_failed_member_says_why_and_the_others_go_on(tmp_path):
    small = [a if a != "16" else "17" for a in SMALL]  # an odd size: jigclu cannot
    out = tmp_path / "c"
    assert main(["compare", "shapes", "--methods", "jigclu,pid", "--out", str(out), *small]) == 0
    rows = {row["method"]: row for row in table(out)}
    assert "must be even" in rows["jigclu"]["failure"]
    assert float(rows["pid"]["knn"]) > 0
    assert "must be even" in (out / "comparison.md").read_text()


def test_a_damaged_member_says_so_and_the_others_go_on(tmp_path):
    out = tmp_path / "c"
    arguments = ["compare", "shapes", "--with", "knn", "--out", str(out), *SMALL, "--methods"]
    assert main([*arguments, "pid"]) == 0
    (out / "pid-tiny-0" / "provenance.json").write_text("{")
    assert main([*arguments, "pid,jigclu"]) == 0
    rows = {row["method"]: row for row in table(out)}
    assert "provenance.json is missing or damaged: delete the folder" in rows["pid"]["failure"]
    assert float(rows["jigclu"]["knn"]) > 0


def test_a_member_that_could_not_begin_is_tried_again(tmp_path, monkeypatch):
    """Its folder holds nothing but why it failed: no reason to refuse it."""
    out = tmp_path / "c"
    arguments = ["compare", "shapes", "--methods", "pid,jigclu", "--with", "knn", "--out", str(out), *SMALL]
    with monkeypatch.context() as patched:
        patched.setattr("onecrop.forecast.free_memory", lambda device: 1000)  # pid needs a classifier
        patched.setattr("onecrop.train.need_step", lambda *_: None)  # which every method's batch would not fit either
        assert main(arguments) == 0
        for _ in range(2):  # the second time for the same reason, not because of what the first one left
            failed = {row["method"]: row["failure"] for row in table(out)}
            assert "are free on cpu" in failed["pid"]
            assert not failed["jigclu"]
            assert main(arguments) == 0
    assert main(arguments) == 0
    assert all(float(row["knn"]) > 0 and not row.get("failure") for row in table(out))


@pytest.mark.parametrize("error", [TypeError("got an\n unexpected thing"), RuntimeError("out of memory")])
def test_whatever_a_member_raises_the_others_go_on(tmp_path, monkeypatch, error):
    def failing(recipe, resume):
        if recipe.method == "pid":
            raise error
        return pretrain(recipe, resume=resume)

    monkeypatch.setattr("onecrop.compare.pretrain", failing)
    out = tmp_path / "c"
    assert main(["compare", "shapes", "--methods", "pid,jigclu", "--with", "knn", "--out", str(out), *SMALL]) == 0
    rows = {row["method"]: row for row in table(out)}
    kind = "TypeError: " * isinstance(error, TypeError)
    assert rows["pid"]["failure"] == kind + " ".join(str(error).split())
    assert float(rows["jigclu"]["knn"]) > 0


def test_a_comparison_without_any_result_ends_as_an_error(tmp_path, capsys):
    arguments = ["compare", "shapes", "--methods", "pid,simclr", "--out", str(tmp_path / "c"), *SMALL]
    assert main([*arguments, "--weights", "nowhere.pth"]) == 1
    assert "no run of this comparison came to its end: --weights nowhere.pth" in capsys.readouterr().err
    assert [row["seeds"] for row in table(tmp_path / "c")] == ["0", "0"]


def test_data_that_cannot_be_scored_on_is_refused_before_anything_is_trained(tmp_path, capsys):
    write_pictures(tmp_path / "photos", 6)
    for verb in ("compare", "sweep"):
        for data, words in (("shape", "did you mean 'shapes'"), (str(tmp_path / "photos"), "no labels")):
            out = tmp_path / "c"
            assert main([verb, data, "--out", str(out)]) == 1
            assert words in capsys.readouterr().err
            assert not out.exists()


def test_other_settings_than_a_member_was_begun_with_are_refused_before_anything_is_trained(tmp_path, capsys):
    out = tmp_path / "c"
    arguments = ["compare", "shapes", "--with", "knn", "--out", str(out), *SMALL]
    assert main([*arguments, "--methods", "pid"]) == 0
    plan, rows = (out / "plan.json").read_text(), table(out)
    assert main([*arguments, "--methods", "jigclu,pid", "--lr", "0.002"]) == 1
    assert "--lr 0.001, not 0.002" in capsys.readouterr().err
    assert not (out / "jigclu-tiny-0").exists()
    assert ((out / "plan.json").read_text(), table(out)) == (plan, rows)


def test_members_are_scored_where_the_call_says_the_data_lies(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("onecrop.compare.evaluate", lambda run, **how: seen.append(how))
    for place in ("here", "there"):
        more = ["--data-dir", place, "--device", "cpu", "--with", "knn"]
        assert main(["compare", "shapes", "--methods", "pid", "--out", str(tmp_path / "c"), *SMALL, *more]) == 0
    assert seen == [{"evaluations": ("knn",), "data_dir": place, "device": "cpu"} for place in ("here", "there")]


def test_wrong_names_are_refused_before_anything_is_trained(tmp_path, capsys):
    for arguments, words in (
        (["--methods", "sid,simclear"], "did you mean 'simclr'"),
        (["--with", "kn"], "did you mean 'knn'"),
        (["--seeds", "0"], "--seeds: 0 is not"),
        (["--epochs", "0"], "--epochs 0"),
    ):
        assert main(["compare", "shapes", "--out", str(tmp_path / "c"), *arguments]) == 1
        assert words in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_cells_and_tables():
    rows = [
        {"method": "a_b", "backbone": "x", "knn": (50.0, 1.25), "minutes": 1234.5, "memory_gb": None, "seeds": 2},
        {"method": "c", "backbone": "x", "failure": "50 % | broke", "seeds": 0},
    ]
    assert cell((50.0, None)) == "50.0"
    assert "50.0 ± 1.2" in markdown(rows)
    lines = markdown(rows).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert r"a\_b" in latex(rows)
    assert r"50.0 $\pm$ 1.2" in latex(rows)
    assert r"50 \%" in latex(rows)
    for text, wanted in (
        (r"C:\x {a} $5 ~b ^2", r"C:\textbackslash{}x \{a\} \$5 \textasciitilde{}b \textasciicircum{}2"),
        ("2×2 of 3 PM, −1 & #4", r"2$\times$2 of 3 PM, $-$1 \& \#4"),
    ):
        assert f"& {wanted} \\\\" in latex([{"method": "c", "backbone": "x", "failure": text}])
    parsed = list(csv.DictReader(as_csv(rows).splitlines()))
    assert parsed[0]["knn std"] == "1.25"
    assert json.loads(parsed[0]["minutes"]) == 1234.5


def test_settings_go_to_the_methods_that_have_them(tmp_path, capsys):
    """A head for a laptop, in one word for all; a queue, which one of them has."""
    arguments = ["compare", "shapes", "--methods", "sid,moco", "--with", "knn", "--out", str(tmp_path), *SMALL]
    assert main([*arguments, "--hidden", "24", "--queue-size", "64"]) == 0
    sid, moco = (
        json.loads((tmp_path / f"{name}-tiny-0" / "recipe.json").read_text())["settings"] for name in ("sid", "moco")
    )
    assert (sid["hidden"], moco["hidden"], moco["queue_size"]) == (24, 24, 64)
    assert "queue_size" not in sid
    capsys.readouterr()
    assert main([*arguments, "--bottleneck", "64"]) == 1  # SimSiam's, which is not among them
    assert "unknown argument --bottleneck" in capsys.readouterr().err
    with pytest.raises(UserError, match="unknown field 'bottleneck'"):
        compare(Recipe(data="shapes"), ["sid"], ["tiny"], 1, tmp_path / "other", overrides={"bottleneck": 64})
