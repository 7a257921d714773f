"""`onecrop reproduce`: plan, train, measure, and the table beside the paper's numbers, rewritten after every run."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from onecrop.compare import attempt
from onecrop.detect.coco import coco_tools
from onecrop.device import choose_device, describe
from onecrop.errors import UserError
from onecrop.map import report, tsne_class
from onecrop.report.figures import plotly
from onecrop.report.reproduction import plan_text, write_reproduction
from onecrop.reproduce.hours import Forecasts
from onecrop.reproduce.measure import Found, look_up, measure
from onecrop.reproduce.plan import (
    DETECTION,
    OFFICIAL,
    DataThere,
    Options,
    Step,
    can_run,
    limited,
    look_for_data,
    make_plan,
)
from onecrop.reproduce.tables import Cell, Table, find_table
from onecrop.runs import circumstances
from onecrop.train import pretrain


def reproduce(name: str, options: Options, *, plan_only: bool = False, skip_missing: bool = False) -> Path | None:
    """Make a table or figure of the paper -> its Markdown file, or None where only the plan was asked for."""
    name, table = find_table(name)
    steps = make_plan(table, options)
    there = look_for_data(steps, options)
    print(f"{name}: {table.title}")
    for data, remedy in there.missing.items():
        print(f"missing: {data}: {remedy}", flush=True)
    if there.missing and not (skip_missing or plan_only):
        raise UserError(
            f"{len(there.missing)} data sets are missing, and nothing was started: get them, "
            "or pass --skip-missing to make the rows that can be made"
        )
    steps = [_limit(step, there, options) for step in steps]
    if not plan_only:
        steps = [step for step in steps if can_run(step, options, there)]
    print(describe_plan(steps, there, options), flush=True)
    if plan_only:
        return None
    _need_packages(table, steps)
    return run_plan(name, table, steps, options)


def _need_packages(table: Table, steps: Sequence[Step]) -> None:
    """Say what is not installed before the first run, not after the last."""
    kinds = {measure.kind for step in steps for measure in step.measures}
    if "coco" in kinds:
        coco_tools()
    if "map" in kinds:
        tsne_class()
    if table.picture == "page":
        plotly()


def _limit(step: Step, there: DataThere, options: Options) -> Step:
    """With the images that the data has; a finished run is what it is."""
    if step.recipe is None or step.is_finished:
        return step
    total = there.counts.get(step.recipe.data) or OFFICIAL.get(step.recipe.data)
    return step if total is None else step._replace(recipe=limited(step.recipe, total, options.images))


def describe_plan(steps: Sequence[Step], there: DataThere, options: Options) -> str:
    forecasts = Forecasts(Path(options.out))
    rows = []
    for step in steps:
        if step.recipe is None:
            continue
        data = step.recipe.data
        total = there.counts.get(data) or OFFICIAL.get(data)  # hours may be known before the data is there
        images = step.recipe.subset or total
        state = "finished" if step.is_finished else "begun" if Path(step.recipe.out).exists() else "to do"
        state = "data missing" if data in there.missing else state
        row: dict[str, Any] = {"run": step.name, "data": data, "images": images, "epochs": step.recipe.epochs}
        row["state"] = state
        if images and not step.is_finished:
            row["hours"] = forecasts.hours(step.recipe, images)
        rows.append(row)
    detections = {(step.name, m.kind) for step in steps for m in step.measures if m.kind in DETECTION}
    return plan_text(rows, len(detections), options.differences(), describe(choose_device(options.device)))


def run_plan(name: str, table: Table, steps: Sequence[Step], options: Options) -> Path:
    """Train and measure what is not there yet; the table is made from the files of all its runs, after each one."""
    failed = dict[str, str]()
    path = _write(name, table, failed, options)
    for number, step in enumerate(steps, 1):
        print(f"\n[{number}/{len(steps)}] {step.name}", flush=True)
        failure = attempt(partial(_train_and_measure, step, options))
        if failure is not None:
            failed[step.name] = failure
            print(f"{step.name} failed: {failure}", file=sys.stderr, flush=True)
        path = _write(name, table, failed, options)
    if table.picture == "page":
        runs = [step.recipe.out for step in _all_steps(table, options) if step.recipe is not None and step.is_finished]
        if runs:  # maps, where the figure is about them, have been made with its cells
            print(report(runs, Path(options.out) / f"{name}.html", points=0))
    return path


def _train_and_measure(step: Step, options: Options) -> None:
    if step.recipe is not None and not step.is_finished:
        pretrain(step.recipe, resume=True)
    for what in step.measures:
        measure(step, what, options)


def _all_steps(table: Table, options: Options) -> list[Step]:
    """Those of earlier calls, that asked for other methods or backbones, included."""
    return make_plan(table, replace(options, methods=(), backbones=()))


def _write(name: str, table: Table, failed: dict[str, str], options: Options) -> Path:
    steps = {step.training: step for step in _all_steps(table, options)}
    cells, fewer = [], dict[str, None]()
    for cell in table.cells:
        step = steps.get(cell.training) if cell.training else None
        got = (look_up(step, cell.measure, options) if step else None) or {}
        cells.append(_cell(cell, got, failed.get(step.name) if step else None, options))
        fewer |= dict.fromkeys(_fewer_images(cell, got, options))
    now = circumstances(choose_device(options.device))
    facts = {
        "title": f"{name}: {table.title}",
        **{key: now[key] for key in ("command", "date", "device")},
        "torch": now["versions"]["torch"],
        "scale": options.scale,
        "differences": [*options.differences(), *fewer],
        "notes": [table.note] if table.note else [],
    }
    return write_reproduction(Path(options.out), name, facts, table.heads, cells, table.picture)


def _fewer_images(cell: Cell, got: Found, options: Options) -> list[str]:
    """Said where the copy of a data set is smaller than the official one."""
    if cell.training is None or "images" not in got or cell.training.data in options.use:
        return []
    official = cell.training.subset or OFFICIAL[cell.training.data]
    if got["images"] >= min(official, options.images or official):
        return []
    return [f"{cell.training.data} has {got['images']:,} training images here, not {official:,}"]


def _cell(cell: Cell, got: Found, failure: str | None, options: Options) -> dict[str, Any]:
    value = got.get("value")
    comparable = cell.measure.kind not in ("hours", "memory") and not options.stands_in(cell)
    return {
        "row": list(cell.row),
        "column": cell.column,
        "ours": value,
        "paper": cell.paper,
        "difference": None if value is None or cell.paper is None or not comparable else value - cell.paper,
        "quoted": cell.training is None,
        "paper_epochs": None if cell.training is None else cell.training.epochs,
        "failure": failure,
        **{key: value for key, value in got.items() if key != "value"},
    }
