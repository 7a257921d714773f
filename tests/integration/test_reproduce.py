"""`onecrop reproduce`: a plan with hours, missing data said at once, resumable runs, a table beside the paper's."""

import csv
import json
import re
import shutil

import pytest

from onecrop.cli import main
from onecrop.compare import not_taken
from onecrop.detect import model as model_module
from onecrop.errors import StoppedError, UserError
from onecrop.report import plots
from onecrop.reproduce import TABLES
from onecrop.reproduce import hours as hours_module
from onecrop.reproduce import measure as measure_module
from onecrop.reproduce import run as run_module
from onecrop.reproduce.options import Options
from onecrop.reproduce.plan import make_plan
from tests.drawn import write_coco, write_voc
from tests.pictures import write_pictures

SMALL = (
    "--use cifar10=digits --use resnet18=tiny --images 64 --scale 0.005 --with knn --change image_size=16 "
    "--change dim=16 --device cpu"
).split()


def cells_of(out, name):
    with (out / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def trained(out):
    return {file: file.stat().st_mtime_ns for file in out.rglob("backbone.safetensors")}


def test_a_table_is_made_resumed_and_set_beside_the_papers(tmp_path, capsys):
    out = tmp_path / "r"
    arguments = ["reproduce", "8", *SMALL, "--out", str(out)]
    assert main([*arguments, "--plan"]) == 0
    planned = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("4 runs to do: "))
    assert " hours on cpu" in planned
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert planned in said  # timed once
    assert "- scale 0.005: epochs and detection steps multiplied by it" in said
    assert "- digits stands for cifar10" in said
    cells = cells_of(out, "table8")
    assert [float(cell["paper"]) for cell in cells] == [88.8, 90.7, 89.8, 91.1]
    assert all(0 < float(cell["ours"]) < 100 and cell["scale"] == "0.005" for cell in cells)
    assert {cell["difference"] for cell in cells} == {""}  # digits are not CIFAR-10
    assert {(cell["epochs"], cell["paper_epochs"], cell["images"]) for cell in cells} == {("2", "400", "64")}
    assert {cell["resize"] for cell in cells} == {"stored at 8 px; the central square, enlarged to 16 px, linear"}
    page = (out / "table8.md").read_text()
    assert "| SqrtKL = L1 + L2 |" in page
    assert json.loads((out / "table8.json").read_text())["scale"] == 0.005

    assert main(["results", str(out), "--out", str(tmp_path / "results.md")]) == 0
    results = (tmp_path / "results.md").read_text()
    assert "| SqrtKL = L1 + L2 |" in results
    assert "Not as in the paper: scale 0.005: epochs and detection steps multiplied by it; at most 64" in results

    assert main(["claims", str(out)]) == 0
    claims = (tmp_path / "claims.md").read_text()
    assert "| SqrtKL = L1 + L2 | L1 = Σ p log p | cifar10 A |" in claims
    assert (
        "- **A** table8: Parts of SqrtKL, ResNet-18 (digits for cifar10, tiny for resnet18), recipe paper: 2 epochs"
        in claims
    )

    before = trained(out)
    assert len(before) == 4
    gone = next(folder for folder in (out / "runs").iterdir() if "kl=l1" in folder.name)
    (gone / "results.jsonl").unlink()  # as if killed before its probe
    record = (out / "found.jsonl").read_text().splitlines()
    assert [line for line in record if "kl=l1" in line] == record[1:2]
    (out / "found.jsonl").write_text("\n".join([*record[:1], *record[2:]]) + "\n")
    assert main(["reproduce", "table6", *SMALL, "--use", "tiny-imagenet=shapes", "--out", str(out), "--plan"]) == 0
    plan = capsys.readouterr().out
    assert plan.count(" finished\n") == 2  # shared with Table 8
    assert main(arguments) == 0
    assert trained(out) == before
    assert [cell["ours"] for cell in cells_of(out, "table8")] == [cell["ours"] for cell in cells]


def test_two_processes_share_a_table(tmp_path, capsys):
    out = tmp_path / "r"
    arguments = ["reproduce", "table8", *SMALL, "--out", str(out)]
    name = "sid-tiny-digits-2e-at-most-64-kl=l1-image_size=16-dim=16"
    other = not_taken([name], out)
    next(other)
    assert main(arguments) == 0
    assert f"[2/4] {name}\nanother process is at it" in capsys.readouterr().out
    assert [cell["ours"] != "" for cell in cells_of(out, "table8")] == [True, False, True, True]
    row = {"of": f"{name}: knn on digits, at most 64 labels", "value": 12.5}  # which the other measures and leaves
    with (out / "found.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert list(other) == []
    assert main(arguments) == 0
    assert [cell["ours"] for cell in cells_of(out, "table8")][1] == "12.5"
    assert len(trained(out)) == 3


def test_what_another_process_ends_meanwhile_is_taken_in(tmp_path, capsys, monkeypatch):
    out = tmp_path / "r"
    name = "sid-tiny-digits-2e-at-most-64-kl=l1-image_size=16-dim=16"
    other, made = not_taken([name], out), []
    next(other)

    def work(step, record, make=run_module._train_and_measure):
        made.append(step.name)
        if len(made) == 3:  # the last of those that are ours: the other process ends its own, for another table
            list(other)
        make(step, record)

    monkeypatch.setattr(run_module, "_train_and_measure", work)
    assert main(["reproduce", "table8", *SMALL, "--out", str(out)]) == 0
    assert (len(made), made[-1]) == (4, name)
    assert all(cell["ours"] for cell in cells_of(out, "table8"))
    assert "begun again" not in capsys.readouterr().out


def test_what_takes_long_is_measured_last(tmp_path, monkeypatch):
    order = []

    def measure(record, step, what, make=measure_module.Record.measure):
        order.append(what.kind)
        make(record, step, what)

    monkeypatch.setattr(measure_module.Record, "measure", measure)
    arguments = [*SMALL, "--change", "hidden=16", "--methods", "sid", "--out", str(tmp_path / "r")]
    assert main(["reproduce", "rivals", *arguments]) == 0
    assert order == 3 * ["hours", "memory", "knn", "linear-fast", "linear"]
    first = json.loads((tmp_path / "r" / "found.jsonl").read_text().splitlines()[0])
    assert first["of"].endswith(": hours")


def test_a_score_that_was_tried_by_hand_is_not_the_table_s(tmp_path):
    out = tmp_path / "r"
    arguments = ["reproduce", "table8", *SMALL, "--out", str(out)]
    assert main(arguments) == 0
    before = [cell["ours"] for cell in cells_of(out, "table8")]
    (out / "found.jsonl").unlink()
    for run in (out / "runs").iterdir():
        tried = ["--data", "digits", "--image-size", "8", "--subset", "64", "--with", "knn", "--device", "cpu"]
        assert main(["evaluate", str(run), *tried]) == 0
    assert main(arguments) == 0
    assert [cell["ours"] for cell in cells_of(out, "table8")] == before
    assert {cell["image_size"] for cell in cells_of(out, "table8")} == {"16"}


def test_what_was_measured_outlives_the_runs(tmp_path, capsys, monkeypatch):
    out, arguments = tmp_path / "r", ["reproduce", "table8", *SMALL, "--out", str(tmp_path / "r")]
    assert main(arguments) == 0
    assert "4 runs to do; --plan times a few steps of each kind" in capsys.readouterr().out
    assert not (out / "plan").exists()  # nothing was timed that nobody asked for
    made = (out / "table8.md").read_text()
    shutil.rmtree(out / "runs")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(out / "found.jsonl", elsewhere)
    monkeypatch.setattr(run_module, "pretrain", lambda *_, **__: pytest.fail("trained again"))
    capsys.readouterr()
    again = [str(elsewhere) if value == str(out) else value for value in arguments]
    assert main([*again, "--data-dir", str(tmp_path / "no data")]) == 0
    plan = capsys.readouterr().out
    assert "0 runs to do" in plan
    assert len(re.findall(r" digits +64 +2 .*finished", plan)) == 4
    assert (elsewhere / "table8.md").read_text().splitlines()[-8:] == made.splitlines()[-8:]
    assert json.loads((elsewhere / "table8.json").read_text())["device"].startswith("cpu")


def test_a_plan_tells_the_hours_of_training_probes_and_detection(tmp_path, capsys, monkeypatch):
    """Of Table 2's smallest rows: of an untrained network too, whose detector is trained as the others' are."""
    monkeypatch.setattr(hours_module, "UNTRAINED_SIZE", 48)
    table = TABLES["table2"]()
    rows = [("resnet18", "random init.", "0", "0"), ("resnet18", "sid (the paper's)", "10,000", "200")]
    monkeypatch.setitem(TABLES, "table2", lambda: table._replace(cells=tuple(c for c in table.cells if c.row in rows)))
    out = tmp_path / "r"
    arguments = (
        "reproduce table2 --plan --use imagenet=digits --use tiny-imagenet=digits --images 64 --scale 0.001 "
        "--change image_size=32 --change dim=16 --change hidden=16 --detect size_scale=0.1 --detect batch_size=2 "
        f"--detect crops=4 --device cpu --data-dir {tmp_path} --out {out}"
    ).split()
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == "run data images epochs pretrain h probes h detect h state".split()
    untrained, trained = (line.split() for line in lines[3:5])
    assert untrained[:5] == ["untrained-resnet18", "–", "–", "–", "–"]
    assert untrained[7:] == ["to", "do"]
    assert trained[1:4] == ["digits", "64", "1"]
    hours = [float(value) for value in (*untrained[5:7], *trained[4:7])]
    assert all(value > 0 for value in hours)
    assert lines[5].startswith("2 runs to do: ")
    assert [part.split()[1:] for part in lines[5].rpartition(": ")[2].split(" + ")] == [
        ["of", "pretraining"],
        ["of", "probes"],
        ["of", "detection"],
    ]
    assert float(lines[5].split()[4]) == pytest.approx(sum(hours), rel=0.1)
    assert max(map(len, lines[2:6])) <= 140
    kept = (out / "plan" / "forecasts.json").read_text()
    assert len(json.loads(kept)) == 5  # a training step, views of two sizes, a detector's step and its test
    assert main(arguments) == 0
    assert (out / "plan" / "forecasts.json").read_text() == kept  # timed once
    assert capsys.readouterr().out.splitlines() == lines
    assert main([*arguments, "--change", "dim=8"]) == 0
    assert len(json.loads((out / "plan" / "forecasts.json").read_text())) == 6  # another head: another step


def test_a_plan_says_what_is_finished_though_its_data_is_gone(tmp_path, capsys):
    out, gone = tmp_path / "r", str(tmp_path / "gone")
    arguments = ["reproduce", "table8", *SMALL, "--out", str(out)]
    write_pictures(tmp_path / "gone" / "a", 4)
    write_pictures(tmp_path / "gone" / "b", 4, first=10)
    arguments[arguments.index("cifar10=digits")] = f"cifar10={gone}"
    assert main(arguments) == 0
    record = (out / "found.jsonl").read_text().splitlines()
    (out / "found.jsonl").write_text("\n".join(record[1:]) + "\n")
    shutil.rmtree(gone)
    shutil.rmtree(out / "runs")
    capsys.readouterr()
    assert main([*arguments, "--plan"]) == 0
    said = capsys.readouterr().out
    assert said.count(" finished\n") == 3
    assert said.count(" data missing\n") == 1
    assert "1 runs to do" in said


def test_rows_have_several_seeds_and_another_recipe(tmp_path):
    out = tmp_path / "r"
    wide = ["reproduce", "relation", *SMALL, "--change", "hidden=16", "--recipe", "sid-small", "--out", str(out)]
    assert main([*wide, "--seeds", "2"]) == 0
    cells = [cell for cell in cells_of(out, "relation-sid-small") if cell["column"] == "knn"]
    assert [cell["share of neighbours"] for cell in cells] == ["0", "0.5", "growing to 0.9"]
    assert {cell["seeds"] for cell in cells} == {"2"}
    found = [json.loads(line) for line in (out / "found.jsonl").read_text().splitlines()]
    first = [row["value"] for row in found if row["evaluation"] == "knn" and "relation=" not in row["of"]]
    assert len(first) == 2  # the recipe's own run, twice
    assert float(cells[0]["ours"]) == pytest.approx(sum(first) / 2)
    assert float(cells[0]["std"]) == pytest.approx(abs(first[0] - first[1]) / 2**0.5)
    assert {row["optimizer"] for row in found} == {"muon"}
    assert "- the recipe sid-small for the paper's method" in (out / "relation-sid-small.md").read_text()
    assert sorted(run.name for run in (out / "runs").iterdir() if "seed1" not in run.name) == [
        f"sid-sid-small-tiny-digits-2e-at-most-64-{change}image_size=16-dim=16-hidden=16"
        for change in ("", "relation=0.5-relation_rise=0.1-", "relation=0.9-relation_rise=0.95-")
    ]


def test_missing_data_is_said_before_anything_starts(tmp_path, capsys):
    out, empty = tmp_path / "r", tmp_path / "data"
    arguments = ["reproduce", "table2", "--data-dir", str(empty), "--use", "tiny-imagenet=digits", "--out", str(out)]
    assert main([*arguments, "--backbones", "resnet18"]) == 1
    caught = capsys.readouterr()
    assert "missing: imagenet: imagenet cannot be downloaded: put its images as" in caught.out
    assert "missing: voc0712: " in caught.out
    assert "unpack PASCAL VOC's VOCdevkit there" in caught.out
    assert "nothing was started" in caught.err
    assert not (out / "runs").exists()


def test_rows_whose_data_is_there_can_be_made_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure_module, "UNTRAINED_SIZE", 32)
    table = TABLES["table2"]()
    cells = tuple(cell for cell in table.cells if cell.column == "tiny-imagenet" and cell.row[0] == "resnet18")
    monkeypatch.setitem(TABLES, "table2", lambda: table._replace(cells=cells))
    out = tmp_path / "r"
    arguments = f"reproduce table2 --data-dir {tmp_path} --use tiny-imagenet=digits --images 16 --with knn --out {out}"
    assert main([*arguments.split(), "--device", "cpu", "--skip-missing"]) == 0
    assert "missing: imagenet: " in capsys.readouterr().out
    made = [cell["method"] for cell in cells_of(out, "table2") if cell["ours"]]
    assert made == ["random init."]
    assert "| resnet18 | sid (the paper's) | 10,000 | 200 | – (19.4) |" in (out / "table2.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("table99", "unknown table 'table99'"),
        ("table8 --scale 2", "--scale 2 is out of range"),
        ("table8 --images 1", "--images 1 is too few"),
        ("table8 --use cifra10=shapes", "did you mean 'cifar10'?"),
        ("table8 --use cifar10", "--use takes name=value"),
        ("table8 --change dims=3", "unknown field 'dims': did you mean 'dim'?"),
        ("rivals --methods pid --change dim=3", "unknown field 'dim'"),
        ("table8 --detect scale=0.1", "the table decides it"),
        ("table8 --change data=digits", "--change data=… is not for the command line"),
        ("table8 --change kl=none", "--change kl=… is not for this table: it is what its rows differ in"),
        ("rivals --change lr=0.1", "--change lr=… is not for this table"),
        ("table8 --change seed=3 --seeds 2", "--change seed=… is not for the command line"),
        ("table8 --change out=elsewhere", "--change out=… is not for the command line"),
        ("table8 --methods moco", "no row of this table is left to run"),
        ("table8 --recipe moco-small", "is not one of the paper's method: use one of demo, paper, sid, sid-small"),
        ("table8 --with probing", "unknown evaluation 'probing'"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, tmp_path, capsys):
    assert main(["reproduce", *arguments.split(), "--out", str(tmp_path / "r")]) == 1
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_a_change_is_made_where_a_method_has_the_field(tmp_path):
    """PID has no head; all others of the table have one, and all have a batch size."""
    change = {"hidden": "24", "batch_size": "16"}
    options = Options(out=str(tmp_path), recipe="sid-small", change=change)
    steps = make_plan(TABLES["rivals"](), options)
    assert {step.recipe.batch_size for step in steps} == {16}
    assert {step.recipe.method for step in steps if "hidden=24" not in step.name} == {"pid", "npid"}
    for step in steps:
        assert step.recipe.flat().get("hidden", 24) == 24
    assert options.differences()[-2:] == [
        "hidden 24 in every run of a method that has it",
        "batch_size 16 in every run",
    ]
    assert len(steps) == 16  # sid's own optimiser is Muon, and it has a longer run as well


def test_a_smaller_copy_of_a_data_set_is_said(tmp_path, monkeypatch):
    """A Tiny-ImageNet with six pictures of two classes, laid out as the official one."""
    root = tmp_path / "data" / "tiny-imagenet-200"
    for part, count in (("train/n1/images", 3), ("train/n2/images", 3), ("val/images", 2)):
        write_pictures(root / part, count, first=10 * len(part))
    names = sorted(file.name for file in (root / "val" / "images").iterdir())
    (root / "val" / "val_annotations.txt").write_text(
        "".join(f"{n}\tn{i}\t0\t0\t1\t1\n" for i, n in enumerate(names, 1))
    )
    (root / "wnids.txt").write_text("n1\nn2\n")
    table = TABLES["table6"]()
    cells = tuple(cell for cell in table.cells if cell.column == "tiny-imagenet" and cell.row == ("yes", "yes", "yes"))
    monkeypatch.setitem(TABLES, "table6", lambda: table._replace(cells=cells))
    out, small = tmp_path / "r", [value for value in SMALL if value != "--images" and value != "64"]
    assert main(["reproduce", "table6", *small, "--data-dir", str(root.parent), "--out", str(out)]) == 0
    assert "- tiny-imagenet has 6 training images here, not 100,000" in (out / "table6.md").read_text()
    arguments = [*small, "--change", "subset=4", "--data-dir", str(root.parent), "--out", str(tmp_path / "s")]
    assert main(["reproduce", "table6", *arguments]) == 0  # fewer than there are, for they were asked for
    page = (tmp_path / "s" / "table6.md").read_text()
    assert "- subset 4 in every run" in page
    assert "training images here" not in page


def test_one_failed_row_does_not_lose_the_others_and_a_stop_is_no_failure(tmp_path, capsys, monkeypatch):
    out = tmp_path / "r"
    arguments = ["reproduce", "table8", *SMALL, "--out", str(out)]
    honest = run_module.pretrain

    def failing(recipe, resume):
        if recipe.settings.kl == "l1":
            raise UserError("not on this machine")
        return honest(recipe, resume=resume)

    monkeypatch.setattr(run_module, "pretrain", failing)
    assert main(arguments) == 0
    cells = cells_of(out, "table8")
    assert [cell["failure"] for cell in cells] == ["", "not on this machine", "", ""]
    assert [bool(cell["ours"]) for cell in cells] == [True, False, True, True]
    assert "| L1 = Σ p log p | failed (90.7) |" in (out / "table8.md").read_text()

    def stopping(recipe, resume):
        raise StoppedError("stopped at step 3")

    monkeypatch.setattr(run_module, "pretrain", stopping)
    capsys.readouterr()
    assert main(arguments) == 130
    assert "stopped at step 3" in capsys.readouterr().err
    assert "stopped" not in (out / "table8.md").read_text()


def test_transfer_and_detection_from_subsets(tmp_path, monkeypatch):
    """Two rows of Table 2, the untrained network and a pretrained one: both detect, and are probed elsewhere."""
    monkeypatch.setattr(model_module, "KEPT", {"training": 50, "testing": 8})
    monkeypatch.setattr(measure_module, "UNTRAINED_SIZE", 64)
    table = TABLES["table2"]()
    rows = [("resnet18", "random init.", "0", "0"), ("resnet18", "sid (the paper's)", "10,000", "200")]
    monkeypatch.setitem(TABLES, "table2", lambda: table._replace(cells=tuple(c for c in table.cells if c.row in rows)))
    out, voc = tmp_path / "r", write_voc(tmp_path)
    shutil.copytree(voc / "VOC2007", voc / "VOC2012")
    arguments = (
        "reproduce table2 --images 16 --scale 0.0001 --with knn --use imagenet=digits --use tiny-imagenet=digits "
        "--change image_size=32 "
        "--change dim=16 --change hidden=16 --detect size_scale=0.1 --detect batch_size=2 --detect crops=4 "
        f"--detect norm_steps=1 --device cpu --out {out} --use voc={voc}"
    ).split()
    assert main(arguments) == 0
    made = [cell for cell in cells_of(out, "table2") if cell["ours"]]
    assert {cell["column"] for cell in made} == {
        "hours",
        *(f"VOC 07+12 {ap}" for ap in ("AP50", "AP", "AP75")),
        "tiny-imagenet",
    }
    assert {cell["method"] for cell in made} == {"random init.", "sid (the paper's)"}
    assert {cell["iterations"] for cell in made if cell["column"].startswith("VOC")} == {"2"}
    sizes = {(cell["method"], cell["image_size"]) for cell in made if cell["column"] == "tiny-imagenet"}
    assert sizes == {("random init.", "64"), ("sid (the paper's)", "32")}
    before = {file: file.stat().st_mtime_ns for file in (*out.rglob("*.safetensors"), *out.rglob("detections.json"))}
    first = cells_of(out, "table2")
    assert main(arguments) == 0  # all is there: nothing is trained or measured again
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert cells_of(out, "table2") == first


def test_coco_rows_quote_what_the_paper_quotes(tmp_path, monkeypatch):
    pytest.importorskip("faster_coco_eval")
    monkeypatch.setattr(model_module, "KEPT", {"training": 50, "testing": 8})
    out, coco = tmp_path / "r", write_coco(tmp_path)
    arguments = (
        "reproduce table5 --images 16 --scale 0.00002 --use imagenet=digits --change image_size=32 "
        "--change dim=16 --change hidden=16 --detect size_scale=0.1 --detect batch_size=2 "
        f"--detect crops=4 --detect norm_steps=1 --device cpu --out {out} --use coco={coco}"
    ).split()
    assert main(arguments) == 0
    page = (out / "table5.md").read_text()
    assert "| SEED, taught by R-50 | 54.2 † | 35.3 † |" in page
    ours = [cell for cell in cells_of(out, "table5") if cell["quoted"] == "False"]
    assert len(ours) == 6
    assert all(cell["ours"] for cell in ours)


def test_what_detectors_cannot_use_is_said_before_anything_is_pretrained(tmp_path, capsys):
    pytest.importorskip("faster_coco_eval")
    out, coco = tmp_path / "r", write_coco(tmp_path)
    arguments = f"reproduce table5 --images 16 --scale 0.00002 --device cpu --out {out} --use coco={coco}"
    arguments = [*arguments.split(), "--use", "imagenet=digits"]
    assert main([*arguments, "--use", "resnet18=tiny"]) == 1
    assert "detection takes resnet18 or resnet50, not tiny" in capsys.readouterr().err
    next((coco / "train2017").glob("*.jpg")).unlink()
    assert main(arguments) == 1
    assert "is missing; mend it" in capsys.readouterr().err
    assert not list(out.rglob("recipe.json"))


def test_a_table_of_which_nothing_came_to_its_end_is_a_failure(tmp_path, monkeypatch, capsys):
    def failing(*_, **__):
        raise UserError("the remedy stands at the end of " + "a long sentence " * 30 + ": here")

    monkeypatch.setattr(run_module, "pretrain", failing)
    assert main(["reproduce", "table8", *SMALL, "--out", str(tmp_path / "r")]) == 1
    said = capsys.readouterr().err
    assert "no run of this table came to its end: the remedy stands" in said
    assert said.rstrip().endswith(": here")


def test_cells_are_made_by_the_data_that_is_there(tmp_path, monkeypatch):
    """Table 4 has one row that is run, on VOC and on COCO: whoever has COCO alone gets its columns."""
    pytest.importorskip("faster_coco_eval")
    monkeypatch.setattr(model_module, "KEPT", {"training": 50, "testing": 8})
    table = TABLES["table4"]()  # by the smaller network
    cells = (c._replace(training=c.training and c.training._replace(backbone="resnet18")) for c in table.cells)
    table = table._replace(cells=tuple(cells))
    monkeypatch.setitem(TABLES, "table4", lambda: table)
    out, coco = tmp_path / "r", write_coco(tmp_path)
    arguments = (
        f"reproduce table4 --images 16 --scale 0.00001 --use imagenet=digits --data-dir {tmp_path / 'none'} "
        "--change image_size=32 --change dim=16 --change hidden=16 --detect size_scale=0.1 "
        f"--detect batch_size=2 --detect crops=4 --detect norm_steps=1 --device cpu --out {out} --use coco={coco}"
    ).split()
    assert main(arguments) == 1
    assert not (out / "runs").exists()
    assert main([*arguments, "--skip-missing"]) == 0
    ours = {cell["column"]: bool(cell["ours"]) for cell in cells_of(out, "table4") if cell["quoted"] == "False"}
    assert len(ours) == 12
    assert all(made == column.startswith("coco") for column, made in ours.items())


def test_nothing_is_trained_for_its_hours_alone(tmp_path, capsys):
    """Table 3 without CIFAR-100: its other column would be there, at the price of all its runs."""
    arguments = (
        f"reproduce table3 --use imagenet=digits --data-dir {tmp_path} --backbones resnet18 --out {tmp_path / 'r'}"
    )
    assert main([*arguments.split(), "--use", f"cifar100={tmp_path / 'none'}", "--skip-missing"]) == 0
    assert "0 runs to do" in capsys.readouterr().out
    assert not (tmp_path / "r" / "runs").exists()


def test_figures_are_drawn(tmp_path):
    out = tmp_path / "r"
    assert main(["reproduce", "figure4", *SMALL, "--out", str(out)]) == 0
    assert (out / "figure4.png").stat().st_size > 5000
    assert [cell["m"] for cell in cells_of(out, "figure4")] == ["0", "0.1", "0.3", "0.5", "0.7", "0.9"]
    for method in ("sid", "simsiam"):  # one after the other: the second call's page and table hold both
        rows = ["--backbones", "resnet18", "--methods", method]
        assert main(["reproduce", "figure6", *SMALL, *rows, "--out", str(out)]) == 0
    page = (out / "figure6.html").read_text()
    assert page.count('class="graph" id="map') == 2
    shares = [float(cell["ours"]) for cell in cells_of(out, "figure6") if cell["ours"]]
    assert len(shares) == 2
    assert all(0 < share < 100 for share in shares)
    assert main(["reproduce", "figure3", *SMALL, "--out", str(out)]) == 0
    assert "<h3>linear-fast, %</h3>" in (out / "figure3.html").read_text()
    told = [float(cell["ours"]) for cell in cells_of(out, "figure3") if cell["column"] == "instance accuracy"]
    watched = sorted(out.glob("runs/*probe_every*/metrics.jsonl"))
    last = [100 * json.loads(file.read_text().splitlines()[-1])["accuracy"] for file in watched]
    assert sorted(told) == pytest.approx(sorted(last))
    assert len(told) == 2
    maps = [json.loads(file.read_text())["asked"]["points"] for file in out.glob("runs/*/map/*.json")]
    assert maps == [5000, 5000]  # whatever --images says of training


def test_the_paper_s_points_are_drawn_where_ours_can_be_compared_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "_save", lambda figure, path: figure)
    for difference, drawn in ((None, ["ours"]), (-30.0, ["ours", "paper"])):
        cells = [
            {"row": [m], "column": "cifar10", "ours": 60.0, "paper": 90.0, "difference": difference, "std": None}
            for m in ("0", "0.5")
        ]
        (axis,) = plots.plot_reproduction(cells, "line", "m", "a title", tmp_path / "drawn.png").axes
        assert axis.get_legend_handles_labels()[1] == drawn
        assert axis.get_xlabel() == "m"
