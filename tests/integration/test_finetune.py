"""Few labels: the same budget from pretrained weights and from scratch, one table, row by row."""

import csv
import math

import numpy as np
import pytest
import torch
from PIL import Image

from onecrop import UserError, pretrain
from onecrop.cli import main
from onecrop.data import load
from onecrop.data.sources import Request
from onecrop.evaluate import finetune as module
from onecrop.evaluate.finetune import PROBE, SCRATCH, TUNED, Budget, finetune, labelled_share
from onecrop.evaluate.labels import load_with_labels
from onecrop.files import read_json_lines
from onecrop.nets import read_backbone
from onecrop.tensors import save_tensors
from tests.pictures import write_pictures

QUICK = "--epochs 1 --batch-size 32 --least-steps 8".split()


@pytest.fixture
def run(small_recipe):
    return pretrain(small_recipe)


@pytest.fixture
def coloured(tmp_path):
    """Class folders that colours tell apart, and the same as a CSV beside them."""
    rng = np.random.default_rng(0)
    lines = [("file", "label")]
    for channel, label in enumerate(("red", "green")):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 80, (24, 24, 3), np.uint8)
            pixels[..., channel] += 150
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{number}.png")
            lines.append((f"photos/{label}/{number}.png", label))
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return tmp_path


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 1.0])
def test_shares_are_balanced_nested_and_a_function_of_the_seed(share):
    images = load("shapes", request=Request(subset=500, image_size=8))
    index = labelled_share(images, share, seed=0)
    counts, whole = np.bincount(images.labels[index], minlength=10), np.bincount(images.labels, minlength=10)
    assert counts.tolist() == [max(1, round(share * n)) for n in whole]
    assert len(set(index)) == len(index)
    assert set(index) <= set(labelled_share(images, 1.0, seed=0))
    assert set(labelled_share(images, share / 2, seed=0)) <= set(index)
    assert (labelled_share(images, share, seed=0) == index).all()
    assert share == 1 or (labelled_share(images, share, seed=1) != index).any()


def test_a_budget_is_the_same_wherever_weights_start_and_never_too_short():
    budget = Budget(epochs=3, batch_size=32, least_steps=50)
    assert budget.steps(3200) == 300
    assert budget.steps(10) == 50
    assert budget.batch(10) == 10
    assert "batch 10, 50 steps" in budget.protocol(10)


def test_one_table_through_the_command_line(run, coloured, capsys):
    assert main(["fine-tune", str(run), str(coloured / "photos"), "--shares", "0.1,1", *QUICK]) == 0
    table = capsys.readouterr().out.strip().splitlines()[-4:]
    assert table[0] == "| labels | linear probe | fine-tuned | from scratch |"
    assert table[2].startswith("| 10 % (4) |")
    assert table[3].startswith("| 100 % (32) |")
    rows = read_json_lines(run / "finetune.jsonl")
    assert [(row["of"], row["share"]) for row in rows] == [(w, s) for s in (0.1, 1) for w in (PROBE, TUNED, SCRATCH)]
    assert all(row["protocol"] and row["split"] and row["num_test"] == 8 and "seed" in row for row in rows)
    assert rows[1]["protocol"] == rows[2]["protocol"]  # one budget
    assert rows[1]["accuracy"] is not None


def test_a_csv_means_the_same_as_class_folders(run, coloured):
    budget = Budget(epochs=1, batch_size=32, least_steps=8)
    by_folder = finetune(run, str(coloured / "photos"), shares=[1.0], budget=budget)
    by_csv = finetune(run, str(coloured / "labels.csv"), shares=[1.0], budget=budget)
    assert [row["accuracy"] for row in by_folder] == [row["accuracy"] for row in by_csv]
    assert by_csv[0]["num_labels"] == 32


def test_training_separates_what_colours_tell_apart(run, coloured):
    rows = finetune(run, str(coloured / "labels.csv"), shares=[1.0], budget=Budget(1, 32, 1e-3, least_steps=40))
    assert {row["of"]: row["accuracy"] for row in rows} == {PROBE: 100, TUNED: 100, SCRATCH: 100}


def test_the_learning_rate_falls_along_a_cosine(run, coloured, monkeypatch):
    honest, rates = torch.optim.AdamW.step, []

    def noted(self, closure=None):
        rates.append(self.param_groups[0]["lr"])
        return honest(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    finetune(run, str(coloured / "photos"), shares=[1.0], budget=Budget(1, 32, 1e-3, least_steps=4))
    falling = [5e-4 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert rates == pytest.approx(falling * 2)  # fine-tuned, and from scratch


def test_it_goes_on_row_by_row(run, coloured, monkeypatch):
    budget = Budget(epochs=1, batch_size=32, least_steps=4)
    honest, taken = module.train_all, []

    def dying(start, *rest):
        taken.append(start)
        if len(taken) == 2:
            raise KeyboardInterrupt
        return honest(start, *rest)

    monkeypatch.setattr(module, "train_all", dying)
    with pytest.raises(KeyboardInterrupt):
        finetune(run, str(coloured / "photos"), shares=[1.0], budget=budget)
    half = (run / "finetune.jsonl").read_text()
    assert len(half.splitlines()) == 2
    rows = finetune(run, str(coloured / "photos"), shares=[1.0], budget=budget)
    assert (run / "finetune.jsonl").read_text().startswith(half)
    assert len(taken) == 3  # only the row that was missing
    again = finetune(run, str(coloured / "photos"), shares=[1.0], budget=budget)
    assert again == rows
    assert len(taken) == 3
    finetune(run, str(coloured / "photos"), shares=[1.0], budget=budget, seed=1)
    assert len(taken) == 5


def test_figures_come_back_where_they_cannot_be_written(run, coloured, monkeypatch, capsys):
    def full(path, row):
        raise UserError(f"cannot write {path}: no space")

    monkeypatch.setattr(module, "append_json_line", full)
    rows = finetune(run, str(coloured / "photos"), shares=[1.0], budget=Budget(1, 32, 1e-3, least_steps=4))
    assert len([row["accuracy"] for row in rows]) == 3
    assert capsys.readouterr().err.count("onecrop: cannot write") == 3


def test_two_backbones_in_one_folder_have_rows_of_their_own(run, coloured, tmp_path):
    state, facts = read_backbone(run)
    for number in range(2):
        moved = {key: value + number for key, value in state.items()}
        save_tensors(tmp_path / f"{number}.safetensors", moved, facts)
    budget = Budget(epochs=1, batch_size=32, least_steps=4)
    for number in range(2):
        rows = finetune(tmp_path / f"{number}.safetensors", str(coloured / "photos"), shares=[1.0], budget=budget)
        assert len(read_json_lines(tmp_path / "finetune.jsonl")) == 3 * (number + 1)
        assert rows == read_json_lines(tmp_path / "finetune.jsonl")[3 * number :]


def test_same_seed_same_accuracy_and_the_run_stays_as_it_was(run, coloured):
    before = (run / "backbone.safetensors").read_bytes()
    budget = Budget(epochs=1, batch_size=8, least_steps=4)
    one = finetune(run, str(coloured / "photos"), shares=[0.5], budget=budget)
    (run / "finetune.jsonl").unlink()
    torch.manual_seed(99)
    other = finetune(run, str(coloured / "photos"), shares=[0.5], budget=budget)
    assert [row["accuracy"] for row in one] == [row["accuracy"] for row in other]
    assert (run / "backbone.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("name,class\na,b\n", "file and label"),
        ("", "file and label"),
        ("file;label\nphotos/red/0.png;a\n", "with a comma between them; it reads 'file;label'"),
        ("file,label\nphotos/none.png,a\nphotos/no.png,a\n", "none.png and 1 more; paths are taken"),
        ("file,label\n", "holds no labels"),
        ("file,label\nphotos/red/0.png,\n", "line 2: a file and a label are needed"),
        ("file,label\nphotos/none.png,a\n", "lists what is not there: "),
        ("file,label\nphotos/red/0.png,a\nphotos/red/0.png,b\n", "line 3: photos/red/0.png has two labels"),
        ("file,label\nphotos/red/0.png,a\nphotos/red/1.png,a\n", "has 1 label on images"),
        ("file,label\nphotos/red/0.png,a\nphotos/red/1.png,b\n", "label a has one image"),
    ],
)
def test_csv_files_with_mistakes(coloured, content, words):
    (coloured / "labels.csv").write_text(content)
    with pytest.raises(UserError, match=words):
        load_with_labels(str(coloured / "labels.csv"), Request(image_size=16))


def test_absolute_paths_and_files_that_are_no_images(coloured, capsys):
    (coloured / "photos" / "notes.txt").write_text("hello")
    with (coloured / "labels.csv").open("a") as file:
        file.write(f"photos/notes.txt,red\n{coloured}/photos/red/0.png,red\n")
    sets = load_with_labels(str(coloured / "labels.csv"), Request(image_size=16))
    assert (len(sets.train), len(sets.test)) == (32, 8)
    assert "left out, since it cannot be used as an image: " in capsys.readouterr().out
    assert not set(sets.train.files) & set(sets.test.files)


def test_a_csv_may_name_files_of_train_and_test_folders(tmp_path, capsys):
    lines = ["file,label"]
    for number, part in enumerate(("train", "test")):
        write_pictures(tmp_path / part, 4, first=4 * number)
        lines += [f"{part}/{path.name},{'ab'[i % 2]}" for i, path in enumerate(sorted((tmp_path / part).iterdir()))]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    sets = load_with_labels(str(tmp_path / "labels.csv"), Request(image_size=16))
    assert len(sets.train) + len(sets.test) == 8
    assert "left out" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shares", "0"], "--shares 0.0 is out of range"),
        (["--shares", "x"], "--shares 'x' is not valid"),
        (["--epochs", "0"], "--epochs takes 1 or more"),
        (["--lr", "nan"], "--lr a number above 0"),
    ],
)
def test_wrong_words(run, capsys, arguments, words):
    assert main(["fine-tune", str(run), "shapes", *arguments]) == 1
    assert words in capsys.readouterr().err
    assert not (run / "finetune.jsonl").exists()
