"""Our copy of the paper's numbers: against its source where that lies beside the checkout, and against itself."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from onecrop.errors import UserError
from onecrop.recipe import Recipe
from onecrop.report.plots import plot_cells_against_cost
from onecrop.reproduce import numbers
from onecrop.reproduce.catalogue import TABLES, find_table
from onecrop.reproduce.options import Options
from onecrop.reproduce.plan import make_plan
from tests.conftest import DATA

PAPER = DATA.parent / "paper" / "paper.tex"


def printed(label):
    """All numbers of the paper's table, row by row, without those in its heads and brackets."""
    text = PAPER.read_text()
    text = (
        text[text.index(rf"\label{{{label}}}") :]
        if label != "tab:ablation"
        else text[: text.index(r"\label{tab:ablation}")]
    )
    body = text[text.index(r"\begin{tabular}") : text.index(r"\end{tabular}")]
    if label == "tab:ablation":
        body = text[text.rindex(r"\begin{tabular}") : text.rindex(r"\end{tabular}")]
    values = []
    for line in re.split(r"\\\\", body):
        line = re.sub(r"\(\\textcolor\{grassgreen\}\{[^}]*\}\)", "", line)  # improvements, in brackets
        line = re.sub(
            r"\\(cite|cline|cellcolor|multicolumn|renewcommand|begin|multirow)\{[^}]*\}(\{[^}]*\})?", "", line
        )
        line = re.sub(r"\\pt(?![a-z])|\\textbf|\\rowcolor\{[^}]*\}|\^\\dagger", " ", line)
        line = line.replace("{10,000}", " ").replace("{100,000}", " ")
        cells = [re.sub(r"[\s{}$]", "", cell) for cell in line.split("&")]
        values += [float(cell) for cell in cells if re.fullmatch(r"\d+\.\d+|\d{4}", cell)]
    return values


def flat(values):
    return [float(value) for row in values for value in (row if isinstance(row, tuple) else (row,))]


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source does not lie beside the checkout")
def test_the_numbers_are_the_papers():
    rows = [row for table in numbers.CIFAR_RESULT.values() for row in table.values()]
    assert printed("tab:cifar-result") == flat(rows)
    rows = [row for table in numbers.SUBSET_DETECTION.values() for row in table.values()]
    assert printed("tab:imagenet-subset-detection") == [
        value for value in flat(rows) if value
    ]  # hours of 0 are no decimals
    for label, place in (("tab:linear-eval-small-imagenet", 0), ("tab:linear-eval-cifar10-small-imagenet", 1)):
        wanted = [(part[place], part[2]) for row in numbers.SMALL_NETS.values() for part in row]
        assert printed(label) == flat(wanted)
    assert printed("tab:coco-result") == flat(numbers.TRANSFER.values())
    assert printed("tab:coco-result-r18") == flat(numbers.TRANSFER_R18.values())
    assert printed("tab:ablation") == flat(numbers.ABLATION.values())
    assert printed("tab:linear-eval") == flat(numbers.IMAGENET_LINEAR.values())
    assert printed("tab:ablation-sqrtkl") == flat(numbers.KL_PARTS.values())


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_a_recipe(name):
    steps = make_plan(find_table(name)[1], Options())
    recipes = {step.name: step.recipe for step in steps}
    assert len(recipes) == len(steps)  # every run has a folder of its own
    for step in steps:
        if step.recipe is None:
            assert step.training.method == "untrained"
            continue
        assert isinstance(step.recipe, Recipe)
        assert step.recipe.epochs == step.training.epochs or step.training.steps_of
        assert step.recipe.method == step.training.method


def test_what_the_issue_names_is_there():
    cells = find_table("1")[1].cells
    assert len({cell.row for cell in cells}) == 18
    assert sum(cell.column == "cifar100" and cell.training.method != "sid" for cell in cells) == 15
    assert sum(cell.row[0] == "resnet50" and cell.column == "tiny-imagenet" for cell in cells) == 5
    trainings = {cell.training for cell in find_table("Table 2")[1].cells}
    assert {(t.method, t.epochs) for t in trainings} >= {("moco", 800), ("sid", 800), ("simsiam", 200)}
    assert {cell.column for cell in find_table("table6")[1].cells} == {"cifar10", "tiny-imagenet"}
    quoted = {cell.row for cell in find_table("table7")[1].cells if cell.training is None}
    assert len(quoted) == 14
    assert {cell.row[0] for cell in find_table("table5")[1].cells if cell.training is None} == set(
        numbers.TRANSFER_R18
    ) - {"sid"}


def test_folder_names_fit_into_a_file_system():
    many = {"data_dir": "x" * 300}
    names = [
        {step.name for step in make_plan(find_table("6")[1], Options(change=change))}
        for change in (many, {"data_dir": "x" * 301})
    ]
    assert all(len(name) < 250 for name in names[0])
    assert len(names[0]) == 10
    assert not names[0] & names[1]


def test_every_seed_has_a_run_of_its_own():
    """Of the untrained network too: one measurement is not the mean of two."""
    for table in ("table1", "table2"):
        one, two = (make_plan(find_table(table)[1], Options(seeds=seeds)) for seeds in (1, 2))
        assert len(two) == 2 * len(one)
        assert [step.options.seed for step in two] == [0] * len(one) + [1] * len(one)


def test_tables_share_their_runs():
    names = [
        {step.name for step in make_plan(find_table(table)[1], Options())} for table in ("table3", "table9", "figure7")
    ]
    assert names[0] == names[1] == names[2]
    ablation, parts, weights = (
        {step.name for step in make_plan(find_table(table)[1], Options())} for table in ("table6", "table8", "figure5")
    )
    assert len(ablation & parts) == 2
    assert len(ablation & weights) == 2  # with SqrtKL, and λ = 0
    with pytest.raises(UserError, match="did you mean 'table3'"):
        find_table("tabel3")


@pytest.mark.parametrize("change", [{}, {"batch_size": "128"}])
def test_few_images_are_seen_for_as_many_epochs_or_for_as_many_steps(change):
    """The incomplete batch that an epoch drops is a fifth of one of 2,500 images, and next to nothing of 50,000."""
    recipes = [step.recipe for step in make_plan(find_table("data")[1], Options(scale=0.25, change=change))]
    assert len(recipes) == 14
    for method in ("sid", "moco"):
        ours = [recipe for recipe in recipes if recipe.method == method]
        assert [recipe.epochs for recipe in ours if recipe.epochs == 100] == [100] * 4
        longer = [recipe for recipe in ours if recipe.epochs != 100]
        assert [recipe.subset for recipe in longer] == [2500, 5000, 10_000]
        for recipe in longer:
            an_epoch = recipe.subset // recipe.batch_size
            assert recipe.epochs * an_epoch == pytest.approx(100 * (50_000 // recipe.batch_size), abs=an_epoch)


def test_rows_that_would_not_be_what_they_are_called_are_refused():
    for table, fewest in (("data", 50_000), ("rows", 11_000)):
        assert make_plan(find_table(table)[1], Options(images=fewest))
        with pytest.raises(UserError, match=r"is not for this table, whose rows differ in .* leave it out"):
            make_plan(find_table(table)[1], Options(images=fewest - 1))
    for table, name in (("rivals", "epochs"), ("data", "epochs"), ("data", "subset"), ("table3", "subset")):
        with pytest.raises(UserError, match=f"--change {name}=.* is what its rows differ in"):
            make_plan(find_table(table)[1], Options(change={name: "5"}))


@pytest.mark.parametrize(("recipe", "size"), [("sid", 0.75), ("sid-small", 1.0)])
def test_crops_are_as_large_for_all_methods(recipe, size):
    for table in ("rivals", "nets", "data"):
        recipes = [step.recipe for step in make_plan(find_table(table)[1], Options(recipe=recipe))]
        assert {made.crop_resolution for made in recipes} == {size}
        assert all("crops-0.75" in made.out for made in recipes if made.method != "sid") == (size != 1)


def test_every_rival_is_trained_by_muon_too():
    *recipes, longer = [step.recipe for step in make_plan(find_table("rivals")[1], Options())]
    own, by_muon = recipes[::2], recipes[1::2]
    assert [recipe.method for recipe in own] == [recipe.method for recipe in by_muon]
    assert {recipe.optimizer for recipe in own} == {"sgd"}
    assert {(recipe.optimizer, recipe.lr, recipe.weight_decay) for recipe in by_muon} == {("muon", 0.02, 0.05)}
    ours = next(recipe for recipe in by_muon if recipe.method == "sid")
    assert longer == replace(ours, epochs=2 * ours.epochs, out=longer.out)  # as many crops as methods of two


def test_scores_are_drawn_against_the_costs_that_are_known(tmp_path):
    pytest.importorskip("matplotlib")
    values = {"a": (80.0, 1.0, None), "b": (None, None, None), "c": (70.0, 2.0, 1500.0)}
    columns = ("linear", "hours", "memory, MB")
    cells = [
        {"row": [name, kind], "column": column, "ours": value}
        for kind in ("its own", "Muon")
        for name, row in values.items()
        for column, value in zip(columns, row, strict=True)
    ]
    sizes = {}
    for name, drawn in {"both": cells, "hours": [cell for cell in cells if cell["column"] != "memory, MB"]}.items():
        path = plot_cells_against_cost(drawn, "title", tmp_path / f"{name}.png")
        with Image.open(path) as picture:
            sizes[name] = picture.size
    assert sizes["both"][0] > 1.8 * sizes["hours"][0]  # a panel a cost


@pytest.mark.parametrize("name", ["cost", "cost-resnet18"])
def test_costs_stand_beside_the_papers_ratio_for_the_same_backbone(name):
    """sid's hours as a share of the other method's; of a backbone or method that the paper has not, nothing."""
    rows = json.loads((Path(__file__).parents[2] / "docs" / "results" / f"{name}.json").read_text())["rows"]
    for row in rows:
        hours = {method: values[0] for method, values in numbers.CIFAR_RESULT[row["backbone"]].items()}
        own = hours.get(row["method"]) if row["method"] != "sid" else None
        expected = None if own is None else pytest.approx(hours["sid"] / own)
        assert row["paper_time_share"] == expected, (row["method"], row["backbone"])
