"""Several methods, backbones and seeds under one loop, one augmentation and one probe: one table.

Every member is a run folder of its own, so a comparison that was stopped goes on where it was; a member that fails gets
a row that says why, and the others go on.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onecrop.errors import RecipeError, UserError, unknown
from onecrop.evaluate import EVALUATIONS, evaluate
from onecrop.files import read_json_lines, write_atomically
from onecrop.methods import METHODS
from onecrop.recipe import Recipe
from onecrop.recipes import RECIPES, named
from onecrop.report.comparison import FAILURE, write_comparison
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

    A method starts from its recipe for small images where it has one, and keeps that recipe's batch size; `overrides`
    are recipe fields that hold for all.
    """
    for name in methods:
        if name not in METHODS:
            raise unknown("method", name, METHODS)
    for name in evaluations:
        if name not in EVALUATIONS:
            raise unknown("evaluation", name, EVALUATIONS)
    members = [
        member(base, method, overrides or {}).override({"backbone": backbone, "seed": base.seed + seed})
        for backbone in backbones
        for method in methods
        for seed in range(seeds)
    ]
    for number, recipe in enumerate(members):
        folder = out / f"{recipe.method}-{recipe.backbone.replace('/', '-')}-{recipe.seed}"
        print(f"\n[{number + 1}/{len(members)}] {folder.name}", flush=True)
        try:
            run = pretrain(recipe.override({"out": str(folder)}), resume=True)
            rows = read_json_lines(run / "results.jsonl")
            done = {row["evaluation"] for row in rows if "step" not in row and row["data"] == recipe.data}
            missing = tuple(name for name in evaluations if name not in done)
            if missing:
                evaluate(run, evaluations=missing)
            (folder / FAILURE).unlink(missing_ok=True)
        except RecipeError:  # a mistake of the call, not a failure of the method
            raise
        except (UserError, RuntimeError) as error:  # RuntimeError: out of memory among others
            reason = " ".join(str(error).split())[:300]
            print(f"{folder.name} failed: {reason}", flush=True)
            write_atomically(folder / FAILURE, reason.encode())
        table = write_comparison(out)
    return table


def member(base: Recipe, method: str, overrides: dict[str, Any]) -> Recipe:
    """The recipe of a method in a comparison over the data of `base`."""
    recipe = named(f"{method}-small") if f"{method}-small" in RECIPES else Recipe(method=method)
    shared = {"data": base.data, "data_dir": base.data_dir, "subset": base.subset, "epochs": base.epochs}
    return recipe.override({**shared, "image_size": base.image_size, **overrides})
