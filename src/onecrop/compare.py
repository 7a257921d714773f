"""Several runs under one loop, one augmentation and one probe: one table.

Every member is a run folder of its own, so a comparison that was stopped goes on where it was; a member that fails gets
a row that says why, and the others go on. The same command begun several times, one a GPU, shares the work.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from onecrop.choices import choose_image_size, settle
from onecrop.data.sources import load_labelled
from onecrop.device import choose_device
from onecrop.errors import RecipeError, StoppedError, UserError, unknown
from onecrop.evaluate import EVALUATIONS, evaluate
from onecrop.files import locked, read_json_lines, write_atomically
from onecrop.methods import METHODS
from onecrop.nets.backbones import MODULE
from onecrop.recipe import Recipe, named_values, need_fields
from onecrop.recipes import RECIPES, named
from onecrop.report.comparison import FAILURE, add_to_plan, is_own_score, write_comparison
from onecrop.runs import Run
from onecrop.train import pretrain

TAKEN = ".taken"  # in --out: locks of the processes that share its work


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

    A method starts from its recipe for small images, where it has one, and keeps that recipe's batch size; `overrides`
    are recipe fields that hold for all, and settings that hold for the methods that have them.
    """
    for name in methods:
        if name not in METHODS:
            raise unknown("method", name, METHODS)
    overrides, recipes = overrides or {}, {method: member(base, method) for method in methods}
    need_fields(overrides, recipes.values())
    members = {}
    for backbone in backbones:
        for method, usual in recipes.items():
            recipe = usual.override({**usual.having(overrides), "backbone": backbone})
            for seed in range(base.seed, base.seed + seeds):
                members[f"{method}-{backbone.replace('/', '-')}-{seed}"] = recipe.override({"seed": seed})
    return run_all(members, out, evaluations)


def member(base: Recipe, method: str) -> Recipe:
    """The recipe of a method in a comparison over the data of `base`."""
    small = f"{method}-small"
    recipe = named(small) if small in RECIPES else Recipe(method=method)
    shared = ("data", "data_dir", "subset", "holdout", "epochs", "image_size")
    return recipe.override({name: getattr(base, name) for name in shared})


def sweep(
    base: Recipe,
    tries: Sequence[str],
    seeds: int,
    out: Path,
    evaluations: Sequence[str] = ("knn", "linear-fast"),
) -> Path:
    """One recipe with changes, each "field=value field=value" -> the table's Markdown file. "" is the recipe itself."""
    members, recipes = {}, list[Recipe]()
    for changes in tries:
        pairs = named_values(changes.split(), "--try", "field=value")
        if pairs.keys() & {"seed", "out"}:
            raise UserError(
                f"--try {changes}: runs have seeds from --seed on, as many as --seeds says, and lie in --out"
            )
        recipe = base.override({name.replace("-", "_"): value for name, value in pairs.items()})
        if recipe in recipes:
            raise UserError(f'--try "{changes}" makes the same run as another --try: leave one of them out')
        recipes.append(recipe)
        for seed in range(base.seed, base.seed + seeds):
            name = " ".join(changes.split()).replace("/", "-") or "unchanged"
            members[f"{name}-{seed}"] = recipe.override({"seed": seed})
    return run_all(members, out, evaluations)


def run_all(members: dict[str, Recipe], out: Path, evaluations: Sequence[str]) -> Path:
    """Folder name -> recipe: train and score what is not done yet -> the table's Markdown file.

    A mistake of the call is said before anything is trained or written.
    """
    for name in evaluations:
        if name not in EVALUATIONS:
            raise unknown("evaluation", name, EVALUATIONS)
    members = {name: recipe.override({"out": str(out / name)}) for name, recipe in members.items()}
    need_all(members.values())
    with one_at_a_time(out):
        add_to_plan(out, {name: recipe.to_json() for name, recipe in members.items()})
    failures, table = [], None
    for name in not_taken(members, out):
        failure = attempt(partial(_train_and_score, members[name], evaluations))
        if failure is None:
            (out / name / FAILURE).unlink(missing_ok=True)
        else:
            print(f"{name} failed: {failure}", flush=True)
            write_atomically(out / name / FAILURE, failure.encode())
            failures.append(failure)
        table = _write(out)
    if len(failures) == len(members):
        raise UserError(f"no run of this comparison came to its end: {failures[0]}")
    return table or _write(out)  # nothing was ours to do


def _write(out: Path) -> Path:
    with one_at_a_time(out):
        return write_comparison(out)


def need_all(members: Iterable[Recipe]) -> None:
    """Refuse members that were begun with other settings, and data that is not there or has no labels to score by."""
    by_data = {}
    for recipe in members:
        if str(recipe.backbone).startswith(MODULE):
            raise UserError(f"{recipe.backbone} is a module from Python, which no name makes: name another backbone")
        begun = Run(recipe.out)
        if begun.recipe_file.exists():
            begun.refuse_changes(recipe)
        by_data[recipe.data, replace(recipe.request(), subset=None, seed=0)] = recipe
    for recipe in by_data.values():
        sized = settle(recipe, choose_image_size(recipe, choose_device(recipe.device)))
        load_labelled(recipe.data, sized.request())


def _train_and_score(recipe: Recipe, evaluations: Sequence[str]) -> None:
    run = pretrain(recipe, resume=True)
    begun = Run(run).recipe().to_json()
    done = {row["evaluation"] for row in read_json_lines(run / "results.jsonl") if is_own_score(row, begun)}
    missing = tuple(evaluation for evaluation in evaluations if evaluation not in done)
    if missing:
        print(f"scoring: {', '.join(missing)}", flush=True)
        evaluate(run, evaluations=missing, data_dir=recipe.data_dir, device=recipe.device)


class _TakenError(Exception):
    pass


def not_taken(names: Iterable[str], out: Path) -> Iterator[str]:
    """Those that no other process is at, each ours while it is worked on; all are announced."""

    def pass_over() -> None:
        raise _TakenError

    names = list(names)
    for number, name in enumerate(names, 1):
        print(f"\n[{number}/{len(names)}] {name}", flush=True)
        try:
            with _lock(out, name, pass_over):
                yield name
        except _TakenError:
            print("another process is at it", flush=True)


def one_at_a_time(out: Path) -> AbstractContextManager[None]:
    """While the table of all is made: the last one to make it has seen what every other has done."""
    return _lock(out, "table", lambda: None)


def _lock(out: Path, name: str, waiting: Callable[[], None]) -> AbstractContextManager[None]:
    (out / TAKEN).mkdir(parents=True, exist_ok=True)
    return locked(out / TAKEN / name, waiting)


def attempt(work: Callable[[], None]) -> str | None:
    """Do one of several pieces of work -> why it failed, so that the others go on; None where it did not."""
    try:
        work()
    except (RecipeError, StoppedError, OSError):  # a mistake of the call, Ctrl-C, or a disk that the others need too
        raise
    except Exception as error:  # out of memory, a network or a compiler that raises what it likes
        if isinstance(error, UserError):
            return str(error)
        kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
        return kind + " ".join(str(error).split())[:300]
    return None
