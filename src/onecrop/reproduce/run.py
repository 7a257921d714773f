"""`onecrop reproduce`: plan, train, measure, and the table beside the paper's numbers, rewritten after every run."""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from onecrop.compare import attempt, not_taken, one_at_a_time
from onecrop.detect.coco import coco_tools
from onecrop.device import choose_device, describe
from onecrop.errors import UserError
from onecrop.map import report, tsne_class
from onecrop.report.figures import plotly
from onecrop.report.reproduction import plan_text, write_reproduction
from onecrop.reproduce.catalogue import find_table
from onecrop.reproduce.hours import Forecasts
from onecrop.reproduce.measure import Found, Record
from onecrop.reproduce.needed import OFFICIAL, DataThere, look_for_data, need_detection, possible
from onecrop.reproduce.options import Options
from onecrop.reproduce.plan import DETECTION, Step, limited, make_plan, plan_step
from onecrop.reproduce.tables import Cell, Table
from onecrop.runs import circumstances
from onecrop.train import pretrain

# What takes long is measured last: a machine that goes away in between takes less with it.
SLOW = {"knn": 1, "linear-fast": 2, "linear": 3, "map": 4, **dict.fromkeys(DETECTION, 5)}


def reproduce(name: str, options: Options, *, plan_only: bool = False, skip_missing: bool = False) -> Path | None:
    """Make a table or figure of the paper -> its Markdown file, or None where only the plan was asked for."""
    name, table = find_table(name)
    record = Record(options)
    steps = [record.left(step) for step in make_plan(table, options)]
    there = look_for_data(steps, options)
    print(options.title(name, table))
    for data, remedy in there.missing.items():
        print(f"missing: {data}: {remedy}", flush=True)
    if there.missing and not (skip_missing or plan_only):
        raise UserError(
            f"{len(there.missing)} data sets are missing, and nothing was started: get them, "
            "or pass --skip-missing to make the cells that can be made"
        )
    steps = [_limit(step, there) for step in steps]
    if not plan_only:
        steps = [able for step in steps if (able := possible(step, there)).measures or not step.measures]
    # a table of dozens of short runs would spend more time on its forecast than the forecast is worth
    print(describe_plan(steps, there, Forecasts(options, there, measure=plan_only), options), flush=True)
    if plan_only:
        return None
    steps = [step for step in steps if step.measures]
    _need_packages(table, steps)
    need_detection(steps)
    return run_plan(name, table, steps, record, options)


def _need_packages(table: Table, steps: Sequence[Step]) -> None:
    """Say what is not installed before the first run, not after the last."""
    kinds = {measure.kind for step in steps for measure in step.measures}
    if "coco" in kinds:
        coco_tools()
    if "map" in kinds:
        tsne_class()
    if table.picture == "page":
        plotly()


def _limit(step: Step, there: DataThere) -> Step:
    """With the images that the data has; a finished run is what it is."""
    if step.recipe is None or step.is_finished:
        return step
    total = there.size(step.recipe.data)
    return step if total is None else step._replace(recipe=limited(step.recipe, total, step.options.images))


def describe_plan(steps: Sequence[Step], there: DataThere, forecasts: Forecasts, options: Options) -> str:
    rows = []
    for step in steps:
        row: dict[str, Any] = {"run": step.name, "state": _state(step, there), "hours": forecasts.hours(step)}
        if step.recipe is not None:
            counts = filter(None, (there.size(step.recipe.data), step.recipe.subset, options.images))
            row |= {"data": step.recipe.data, "images": min(counts, default=None), "epochs": step.recipe.epochs}
        rows.append(row)
    return plan_text(rows, options.differences(), describe(forecasts.device))


def _state(step: Step, there: DataThere) -> str:
    if not step.measures:
        return "finished"
    if step.is_finished:
        return "trained"
    if step.recipe is None:
        return "to do"
    begun = Path(step.recipe.out).exists()
    return "data missing" if step.recipe.data in there.missing else "begun" if begun else "to do"


def run_plan(name: str, table: Table, steps: Sequence[Step], record: Record, options: Options) -> Path:
    """Train and measure what is not there yet; the table is made from all that was measured, after each run."""
    failed = dict[str, str]()
    path, to_do = _write(name, table, record, failed, options), {step.name: step for step in steps}
    left = dict(to_do)
    for _ in range(2):  # again in the end: what another process was at, for a table of its own, may be done by then
        for run in not_taken(tuple(left), Path(options.out)):
            failure = attempt(partial(_train_and_measure, left.pop(run), record))
            if failure is not None:
                failed[run] = failure
                print(f"{run} failed: {failure}", file=sys.stderr, flush=True)
            path = _write(name, table, record, failed, options)
        if not left:
            break
    if left:
        print(f"\nnot here, for another process is at it: {', '.join(left)}; begun again, this command takes them in")
    if table.picture == "page":
        everything = make_plan(table, replace(options, methods=(), backbones=()))  # those of earlier calls included
        runs = [step.recipe.out for step in everything if step.recipe is not None and step.is_finished]
        if runs:  # maps, where the figure is about them, have been made with its cells
            print(report(runs, Path(options.out) / f"{options.result_name(name)}.html", points=0))
    if to_do and len(failed) == len(to_do):
        raise UserError(f"no run of this table came to its end: {next(iter(failed.values()))}")
    return path


def _train_and_measure(step: Step, record: Record) -> None:
    record.refresh()  # another process may have been at it
    step = record.left(step)
    if not step.measures:
        return
    if step.recipe is not None and not step.is_finished:
        pretrain(step.recipe, resume=True)
    for what in sorted(step.measures, key=lambda what: SLOW.get(what.kind, 0)):
        record.measure(step, what)


def _write(name: str, table: Table, record: Record, failed: dict[str, str], options: Options) -> Path:
    with one_at_a_time(Path(options.out)):
        record.refresh()
        return _write_table(name, table, record, failed, options)


def _write_table(name: str, table: Table, record: Record, failed: dict[str, str], options: Options) -> Path:
    made, fewer = dict[tuple[str, ...], dict[str, Any]](), dict[str, None]()
    for cell in table.cells:
        steps = [] if cell.training is None else [plan_step(cell, one) for one in options.each_seed()]
        found = [got for step in steps if (got := record.get(step, cell.measure))]
        failure = next((failed[step.name] for step in steps if step.name in failed), None)
        column = options.probe if cell.column == "linear" else cell.column  # --with says what stands for it
        made[*cell.row, column] = {**_cell(cell, found, failure, options), "column": column}
        fewer |= dict.fromkeys(_fewer_images(cell, found, options))
    cells = list(made.values())
    now = circumstances(choose_device(options.device))
    days = {cell["date"][:10] for cell in cells if "date" in cell} or {now["date"][:10]}
    devices = {cell["device"] for cell in cells if "device" in cell} or {now["device"]}
    versions = {cell["torch"] for cell in cells if "torch" in cell} or {now["versions"]["torch"]}
    facts = {
        "title": options.title(name, table),
        "table": name,
        "recipe": options.recipe,
        "command": now["command"],
        "date": ", ".join(sorted(days)),
        "device": ", ".join(sorted(devices)),
        "torch": ", ".join(sorted(versions)),
        "scale": options.scale,
        "differences": [*options.differences(), *fewer],
        "notes": [table.note] if table.note else [],
    }
    return write_reproduction(Path(options.out), options.result_name(name), facts, table.heads, cells, table.picture)


def _fewer_images(cell: Cell, found: Sequence[Found], options: Options) -> list[str]:
    """Said where the copy of a data set is smaller than the official one."""
    if cell.training is None or not found or "images" not in found[0] or cell.training.data in options.use:
        return []
    if "subset" in options.change:  # fewer were asked for, and that is said
        return []
    official, images = cell.training.subset or OFFICIAL[cell.training.data], found[0]["images"]
    if images >= min(official, options.images or official):
        return []
    return [f"{cell.training.data} has {images:,} training images here, not {official:,}"]


def _cell(cell: Cell, found: Sequence[Found], failure: str | None, options: Options) -> dict[str, Any]:
    """The mean over the seeds that were measured, their spread, and the circumstances of the first."""
    values = [got["value"] for got in found if got["value"] is not None]
    mean = statistics.mean(values) if values else None
    comparable = cell.measure.kind not in ("hours", "memory") and not options.stands_in(cell)
    told = {key: value for key, value in found[0].items() if key != "value"} if found else {}
    if "device" in told:  # of each seed: hours are compared on one kind alone
        told["device"] = ", ".join(dict.fromkeys(got.get("device", "?") for got in found))
    return {
        "row": list(cell.row),
        "column": cell.column,
        "ours": mean,
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "seeds": len(values),
        "paper": cell.paper,
        "difference": None if mean is None or cell.paper is None or not comparable else mean - cell.paper,
        "quoted": cell.training is None,
        "paper_epochs": None if cell.training is None else cell.training.epochs,
        "failure": failure,
        **told,
    }
