"""Several runs under one loop, one augmentation and one probe: one table.

Every member is a run folder of its own, so a comparison that was stopped goes on where it was; a member that fails gets
a row that says why, and the others go on.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onecrop.errors import RecipeError, StoppedError, UserError, unknown
from onecrop.evaluate import EVALUATIONS, evaluate
from onecrop.files import read_json_lines, write_atomically
from onecrop.methods import METHODS
from onecrop.recipe import Recipe
from onecrop.recipes import named
from onecrop.report.comparison import FAILURE, add_to_plan, is_own_score, write_comparison
from onecrop.runs import Run
from onecrop.train import pretrain


def compare(
    base: Recipe,
    methods: Sequence[str],
    backbones: Sequence[str],
    seeds: int,
    out: Path,
    evaluations: Sequence[str] = ("knn", "linear-fast"),
    overrides: dict[str, Any] | None = None,
) -> Path:
    """Train and score every combination below `out` -> the table's Markdown file.

    A method starts from its recipe for small images, and keeps that recipe's batch size; `overrides` are recipe
    fields that hold for all.
    """
    for name in methods:
        if name not in METHODS:
            raise unknown("method", name, METHODS)
    members = {}
    for backbone in backbones:
        for method in methods:
            recipe = member(base, method, overrides or {}).override({"backbone": backbone})
            for seed in range(base.seed, base.seed + seeds):
                members[f"{method}-{backbone.replace('/', '-')}-{seed}"] = recipe.override({"seed": seed})
    return run_all(members, out, evaluations)


def member(base: Recipe, method: str, overrides: dict[str, Any]) -> Recipe:
    """The recipe of a method in a comparison over the data of `base`."""
    recipe = named(f"{method}-small")
    shared = {name: getattr(base, name) for name in ("data", "data_dir", "subset", "holdout", "epochs", "image_size")}
    return recipe.override({**shared, **overrides})


def sweep(
    base: Recipe,
    tries: Sequence[str],
    seeds: int,
    out: Path,
    evaluations: Sequence[str] = ("knn", "linear-fast"),
) -> Path:
    """One recipe with changes, each "field=value field=value" -> the table's Markdown file. "" is the recipe itself."""
    members = {}
    for changes in tries:
        pairs = [change.partition("=") for change in changes.split()]
        wrong = next((name for name, equals, value in pairs if not (name and equals and value)), None)
        if wrong is not None:
            raise UserError(f"--try {changes!r} is not of the form field=value: see {wrong!r}")
        recipe = base.override({name.replace("-", "_"): value for name, _, value in pairs})
        for seed in range(base.seed, base.seed + seeds):
            name = " ".join(changes.split()).replace("/", "-") or "unchanged"
            members[f"{name}-{seed}"] = recipe.override({"seed": seed})
    return run_all(members, out, evaluations)


def run_all(members: dict[str, Recipe], out: Path, evaluations: Sequence[str]) -> Path:
    """Folder name -> recipe: train and score what is not done yet -> the table's Markdown file."""
    for name in evaluations:
        if name not in EVALUATIONS:
            raise unknown("evaluation", name, EVALUATIONS)
    members = {name: recipe.override({"out": str(out / name)}) for name, recipe in members.items()}
    add_to_plan(out, {name: recipe.to_json() for name, recipe in members.items()})
    for number, (name, recipe) in enumerate(members.items()):
        print(f"\n[{number + 1}/{len(members)}] {name}", flush=True)
        folder = out / name
        try:
            run = pretrain(recipe, resume=True)
            rows = read_json_lines(run / "results.jsonl")
            done = {row["evaluation"] for row in rows if is_own_score(row, Run(run).recipe().to_json())}
            missing = tuple(evaluation for evaluation in evaluations if evaluation not in done)
            if missing:
                evaluate(run, evaluations=missing)
            (folder / FAILURE).unlink(missing_ok=True)
        except (RecipeError, StoppedError):  # a mistake of the call, or Ctrl-C: not a failure of the method
            raise
        except (UserError, RuntimeError) as error:  # RuntimeError: out of memory among others
            reason = " ".join(str(error).split())[:300]
            print(f"{name} failed: {reason}", flush=True)
            write_atomically(folder / FAILURE, reason.encode())
        table = write_comparison(out)
    return table
