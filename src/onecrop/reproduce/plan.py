"""From a table of the paper to a plan: which runs, and what is measured on each.

A full-size table is shrunk by two numbers, and both stand in every result: `scale` multiplies epochs and the steps of
detection, `images` is the most training images that pretraining and probes may see. Data sets and backbones may be
replaced by others; that is said as well.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onecrop.detect.recipe import DetectRecipe
from onecrop.errors import UserError, unknown
from onecrop.recipe import Recipe, need_fields
from onecrop.recipes import named
from onecrop.reproduce.options import Options
from onecrop.reproduce.tables import Cell, Measure, Table, Training
from onecrop.runs import Run

DETECTION = ("voc07", "voc0712", "coco")
UNTRAINED = "untrained"
LONGEST_NAME = 200  # bytes of a folder's; file systems take 255
STAND_INS = ("cifar10", "cifar100", "tiny-imagenet", "imagenet", "voc", "coco")  # data that --use may replace


class Step(NamedTuple):
    """One pretraining of the plan and what is measured on it."""

    name: str
    training: Training
    recipe: Recipe | None  # None: an untrained network is measured
    measures: tuple[Measure, ...]
    options: Options  # with this step's seed

    @property
    def is_finished(self) -> bool:
        return self.recipe is not None and Run(self.recipe.out).finished


def make_plan(table: Table, options: Options) -> list[Step]:
    """The distinct pretrainings of a table, in its order: all of the first seed, then all of the next."""
    _check_use(table, options)
    _check_change(table, options)
    if options.images is not None and options.images < table.least_images:
        why = f"whose rows differ in what they take of {table.least_images:,} images or more"
        raise UserError(f"--images {options.images} is not for this table, {why}: leave it out")
    steps = dict[str, Step]()
    for one in options.each_seed():
        for cell in table.cells:
            if cell.training is not None and options.wants(cell.training):
                step = plan_step(cell, one)
                step = steps.get(step.name, step)  # one run for cells that say a recipe's own values and that do not
                steps[step.name] = step._replace(measures=tuple(dict.fromkeys((*step.measures, cell.measure))))
    if not steps:
        raise UserError("no row of this table is left to run: name other --methods or --backbones")
    return list(steps.values())


def plan_step(cell: Cell, options: Options) -> Step:
    """The run behind a cell."""
    training = cell.training
    assert training is not None, "the paper quotes it"
    recipe = None if training.method == UNTRAINED else recipe_of(training, options)
    return Step(name_of(training, options), training, recipe, (cell.measure,), options)


def _check_use(table: Table, options: Options) -> None:
    backbones = {cell.training.backbone for cell in table.cells if cell.training is not None}
    for name in options.use:
        if name not in (*STAND_INS, *backbones):
            raise unknown("data set or backbone of this table", name, [*STAND_INS, *backbones])


def _check_change(table: Table, options: Options) -> None:
    trainings = [cell.training for cell in table.cells if cell.training is not None and options.wants(cell.training)]
    recipes = [_published(training, options) for training in trainings if training.method != UNTRAINED]
    if recipes:
        need_fields(options.change, recipes)
    decided = {change for training in trainings for change, _ in training.changes}
    decided |= {name for name in ("epochs", "subset") if len({getattr(training, name) for training in trainings}) > 1}
    decided |= {"epochs"} if any(training.steps_of for training in trainings) else set()
    for name in options.change:
        if name in decided:
            raise UserError(f"--change {name}=… is not for this table: it is what its rows differ in")


def recipe_of(training: Training, options: Options) -> Recipe:
    recipe = _published(training, options).override(
        {
            "data": options.stand_in(training.data),
            "data_dir": options.data_dir,
            "backbone": options.stand_in(training.backbone),
            "stem": "standard" if training.data == "imagenet" else None,  # detectors take no other
            "epochs": _epochs(training, options),
            "subset": training.subset,
            "seed": options.seed,
            "device": options.device,
            "out": str(Path(options.out) / "runs" / name_of(training, options)),
            **dict(training.changes),
            **_asked(training, options),
        }
    )
    if recipe.probe_every:
        recipe = recipe.override({"probe_every": _scaled(recipe.probe_every, options.scale)})
    return recipe


def _scaled(epochs: int, scale: float) -> int:
    return max(1, round(epochs * scale))


def _epochs(training: Training, options: Options) -> int:
    epochs = _scaled(training.epochs, options.scale)
    if training.steps_of is None or training.subset is None:
        return epochs
    batch = _published(training, options).override(_asked(training, options)).batch_size
    assert batch is not None, "the recipes of a table name it"
    batch = min(batch, training.subset)
    return round(epochs * (training.steps_of // batch) / (training.subset // batch))  # an epoch drops what is left over


def _published(training: Training, options: Options) -> Recipe:
    """The chosen recipe of the paper's method; for rivals that of its authors, and on ImageNet the published one.

    Crops of small images are as large for all: their size is no part of a method, and half of the cost.
    """
    ours = named(options.recipe)
    if training.method == "sid":
        return ours
    if training.data != "imagenet":
        return named(f"{training.method}-small").override({"crop_resolution": ours.crop_resolution})
    lr, batch_size = {"moco": (0.03, 256), "simsiam": (0.1, 512)}[training.method]
    published = {"optimizer": "sgd", "lr": lr, "weight_decay": 1e-4, "batch_size": batch_size, "crop_resolution": 1.0}
    return Recipe(method=training.method).override(published)


def name_of(training: Training, options: Options) -> str:
    """The run's folder: everything in which runs of one --out can differ."""
    backbone, data = options.stand_in(training.backbone), options.stand_in(training.data)
    seed = [f"seed{options.seed}"] if options.seed else []
    if training.method == UNTRAINED:
        return folder_name([training.method, backbone, *seed])
    own = [options.recipe] if training.method == "sid" and options.recipe != "paper" else []
    crops = _published(training, options).crop_resolution
    parts = [training.method, *own, backbone, Path(data).name]
    if training.method != "sid" and crops != 1:
        parts.append(f"crops-{crops:g}")
    if training.subset is not None:
        parts.append(str(training.subset))
    parts.append(f"{_epochs(training, options)}e")
    if options.images is not None:
        parts.append(f"at-most-{options.images}")
    parts += [f"{name}={value}" for name, value in (*_changes(training, options), *_asked(training, options).items())]
    return folder_name([*parts, *seed])


def _changes(training: Training, options: Options) -> list[tuple[str, Any]]:
    """Those that change something: a table says m = .5 also where the recipe does."""
    usual = _published(training, options).flat()
    return [(name, value) for name, value in training.changes if usual[name] != value]


def _asked(training: Training, options: Options) -> dict[str, str]:
    """What --change sets, as far as the method has such a field."""
    return _published(training, options).having(options.change)


def folder_name(parts: Sequence[str]) -> str:
    """Parts that do not fit into a file name are hashed."""
    name = "-".join(parts).replace("/", "-")
    if len(name.encode()) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME // 2]}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"


def detection_recipe(step: Step, kind: str) -> DetectRecipe:
    """Of the detector that is trained on a step's network."""
    options = step.options
    start = (
        {"weights": "scratch", "backbone": options.stand_in(step.training.backbone)}
        if step.recipe is None
        else {"weights": step.recipe.out}
    )
    parts = [step.name, kind, f"x{options.scale:g}", *(f"{name}={value}" for name, value in options.detect.items())]
    return DetectRecipe().override(
        {
            **start,
            "set": kind,
            "scale": options.scale,
            "seed": options.seed,
            "device": options.device,
            "data": str(detection_folder(kind, options)),
            "out": str(Path(options.out) / "detect" / folder_name(parts)),
            **options.detect,
        }
    )


def detection_folder(kind: str, options: Options) -> Path:
    name = "coco" if kind == "coco" else "voc"
    default = {"coco": Path(options.data_dir) / "coco", "voc": Path(options.data_dir)}[name]
    return Path(options.use.get(name, default))


def limited(recipe: Recipe, total: int, images: int | None) -> Recipe:
    """With a subset and a batch that the data has images for."""
    wanted = min(total, recipe.subset or total, images or total)
    batch = min(recipe.batch_size or wanted, wanted)
    return recipe.override({"subset": wanted if wanted < total else None, "batch_size": batch})
