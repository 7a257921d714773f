"""From a table of the paper to a plan: which runs on which data, how long they will take here, what is missing.

A full-size table is shrunk by two numbers, and both stand in every result: `scale` multiplies epochs and the steps of
detection, `images` is the most training images that pretraining and probes may see. Data sets and backbones may be
replaced by others; that is said as well.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from onecrop.data import SOURCES, load
from onecrop.data.archives import is_archive
from onecrop.data.scan import list_pictures
from onecrop.data.sources import Request
from onecrop.detect.recipe import DetectRecipe
from onecrop.errors import UserError, unknown
from onecrop.evaluate import EVALUATIONS
from onecrop.nets import BACKBONES
from onecrop.recipe import Recipe
from onecrop.recipes import named
from onecrop.reproduce.tables import NAMES, Cell, Measure, Table, Training
from onecrop.runs import Run

DETECTION = ("voc07", "voc0712", "coco")
UNTRAINED = "untrained"
OFFICIAL = {"cifar10": 50_000, "cifar100": 50_000, "tiny-imagenet": 100_000, "imagenet": 1_281_167}  # training images
LONGEST_NAME = 200  # bytes of a folder's; file systems take 255
STAND_INS = ("cifar10", "cifar100", "tiny-imagenet", "imagenet", "voc", "coco")  # data that --use may replace


@dataclass(frozen=True)
class Options:
    """How a table is reproduced; all but where things lie is printed with the result."""

    data_dir: str = "data"
    out: str = "runs/reproduce"
    scale: float = 1.0
    images: int | None = None
    probe: str = "linear"
    use: dict[str, str] = field(default_factory=dict)  # a data set or backbone of the paper -> what stands for it
    change: dict[str, str] = field(default_factory=dict)  # fields of every pretraining's recipe
    detect: dict[str, str] = field(default_factory=dict)  # fields of every detection's recipe
    methods: tuple[str, ...] = ()  # those to run; none: all
    backbones: tuple[str, ...] = ()
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise UserError(f"--scale {self.scale:g} is out of range: it must be above 0 and at most 1")
        if self.images is not None and self.images < 2:
            raise UserError(f"--images {self.images} is too few: a batch needs two to tell apart")
        if self.probe not in EVALUATIONS:
            raise unknown("evaluation", self.probe, EVALUATIONS)
        for method in self.methods:
            if method not in NAMES:
                raise unknown("method", method, NAMES)
        DetectRecipe().override(self.detect)  # a mistake in it is said now
        for name in ("scale", "weights", "out", "set", "data"):
            if name in self.detect:
                raise UserError(
                    f"--detect {name}=… is not for the command line: the table decides it, --scale shrinks it"
                )

    def wants(self, training: Training) -> bool:
        chosen = not self.methods or training.method in self.methods
        return chosen and (not self.backbones or training.backbone in self.backbones)

    def stands_in(self, cell: Cell) -> bool:
        """Whether the number is of another data set or backbone than the paper's; a folder may hold the same data."""
        names = [cell.measure.what, *([cell.training.data, cell.training.backbone] if cell.training else [])]
        others = [self.use[name] for name in names if name in self.use]
        return any(other in SOURCES or other in BACKBONES for other in others)

    def differences(self) -> list[str]:
        """In what the result is not the paper's experiment, for the reader of the table."""
        said = []
        if self.scale != 1:
            said.append(f"scale {self.scale:g}: epochs and detection steps multiplied by it")
        if self.images is not None:
            said.append(f"at most {self.images:,} training images, for pretraining and for probes")
        if self.probe != "linear":
            said.append(f"scored by {self.probe}, not by the paper's linear protocol")
        said += [f"{other} stands for {name}" for name, other in self.use.items()]
        said += [f"{name} {value} in every run" for name, value in self.change.items()]
        said += [f"{name} {value} in detection" for name, value in self.detect.items()]
        return said


class Step(NamedTuple):
    """One pretraining of the plan and what is measured on it."""

    name: str
    training: Training
    recipe: Recipe | None  # None: an untrained network is measured
    measures: tuple[Measure, ...]

    @property
    def is_finished(self) -> bool:
        return self.recipe is not None and Run(self.recipe.out).finished


def make_plan(table: Table, options: Options) -> list[Step]:
    """The distinct pretrainings of a table, in its order."""
    _check_use(table, options)
    measured: dict[Training, list[Measure]] = {}
    for cell in table.cells:
        if cell.training is not None and options.wants(cell.training):
            measured.setdefault(cell.training, []).append(cell.measure)
    if not measured:
        raise UserError("no row of this table is left to run: name other --methods or --backbones")
    steps = []
    for training, measures in measured.items():
        recipe = None if training.method == UNTRAINED else recipe_of(training, options)
        steps.append(Step(name_of(training, options), training, recipe, tuple(dict.fromkeys(measures))))
    return steps


def _check_use(table: Table, options: Options) -> None:
    backbones = {cell.training.backbone for cell in table.cells if cell.training is not None}
    for name in options.use:
        if name not in (*STAND_INS, *backbones):
            raise unknown("data set or backbone of this table", name, [*STAND_INS, *backbones])


def recipe_of(training: Training, options: Options) -> Recipe:
    recipe = _published(training.method, training.data).override(
        {
            "data": options.use.get(training.data, training.data),
            "data_dir": options.data_dir,
            "backbone": options.use.get(training.backbone, training.backbone),
            "epochs": _scaled(training.epochs, options.scale),
            "subset": training.subset,
            "seed": options.seed,
            "device": options.device,
            "out": str(Path(options.out) / "runs" / name_of(training, options)),
            **dict(training.changes),
            **options.change,
        }
    )
    if recipe.probe_every:
        recipe = recipe.override({"probe_every": _scaled(recipe.probe_every, options.scale)})
    return recipe


def _scaled(epochs: int, scale: float) -> int:
    return max(1, round(epochs * scale))


def _published(method: str, data: str) -> Recipe:
    """The paper's recipe for its own method; for rivals the one its authors used, and on ImageNet the published one."""
    if method == "sid":
        return named("paper")
    if data != "imagenet":
        return named(f"{method}-small")
    lr, batch_size = {"moco": (0.03, 256), "simsiam": (0.1, 512)}[method]
    return Recipe(method=method, optimizer="sgd", lr=lr, weight_decay=1e-4, batch_size=batch_size)


def name_of(training: Training, options: Options) -> str:
    """The run's folder: everything in which runs of one --out can differ."""
    data = options.use.get(training.data, training.data)
    parts = [training.method, options.use.get(training.backbone, training.backbone), Path(data).name]
    if training.method == UNTRAINED:
        return _folder_name(parts[:2])
    if training.subset is not None:
        parts.append(str(training.subset))
    parts.append(f"{_scaled(training.epochs, options.scale)}e")
    if options.images is not None:
        parts.append(f"at-most-{options.images}")
    parts += [f"{name}={value}" for name, value in (*training.changes, *options.change.items())]
    return _folder_name([*parts, *([f"seed{options.seed}"] if options.seed else [])])


def _folder_name(parts: Sequence[str]) -> str:
    """Parts that do not fit into a file name are hashed."""
    name = "-".join(parts).replace("/", "-")
    if len(name.encode()) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME // 2]}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"


def detection_recipe(step: Step, kind: str, options: Options) -> DetectRecipe:
    weights = "scratch" if step.recipe is None else step.recipe.out
    backbone = (
        {"backbone": options.use.get(step.training.backbone, step.training.backbone)} if step.recipe is None else {}
    )
    parts = [step.name, kind, f"x{options.scale:g}", *(f"{name}={value}" for name, value in options.detect.items())]
    return DetectRecipe().override(
        {
            "weights": weights,
            "set": kind,
            "scale": options.scale,
            "seed": options.seed,
            "device": options.device,
            "data": str(detection_folder(kind, options)),
            "out": str(Path(options.out) / "detect" / _folder_name(parts)),
            **backbone,
            **options.detect,
        }
    )


def detection_folder(kind: str, options: Options) -> Path:
    name = "coco" if kind == "coco" else "voc"
    default = {"coco": Path(options.data_dir) / "coco", "voc": Path(options.data_dir)}[name]
    return Path(options.use.get(name, default))


class DataThere(NamedTuple):
    counts: dict[str, int]  # data set -> images of its training part
    missing: dict[str, str]  # data set -> how to get it


def look_for_data(steps: Sequence[Step], options: Options) -> DataThere:
    """What the plan needs, before anything starts. Sets that can be downloaded are, now."""
    wanted = set[str]().union(*(data_of(step, options) for step in steps))
    counts, missing = dict[str, int](), dict[str, str]()
    for data in sorted(wanted.difference(DETECTION)):
        try:
            counts[data] = count_images(data, options.data_dir)
        except UserError as error:
            missing[data] = str(error)
    for kind in sorted(wanted.intersection(DETECTION)):
        fault = _missing_detection(kind, options)
        if fault:
            missing[kind] = fault
    return DataThere(counts, missing)


def can_run(step: Step, options: Options, there: DataThere) -> bool:
    return not (data_of(step, options) & there.missing.keys())


def data_of(step: Step, options: Options) -> set[str]:
    """Data sets that a step still needs."""
    own = {step.recipe.data} if step.recipe is not None and not step.is_finished else set()
    probed = {options.use.get(m.what, m.what) for m in step.measures if m.kind == "linear"}
    return own | probed | {m.kind for m in step.measures if m.kind in DETECTION}


def count_images(data: str, data_dir: str) -> int:
    """Images of the training part, without decoding folders."""
    folder = {"imagenet": "imagenet/train", "tiny-imagenet": "tiny-imagenet-200/train"}.get(data)
    root = Path(data_dir) / folder if folder else Path(data)
    if data in SOURCES and not (folder and root.is_dir()):
        return len(load(data, "train", Request(data_dir)))  # small, or to be downloaded, or it says how to get it
    if root.is_dir() or is_archive(root):
        parts = (root / "train", root)
        return len(list_pictures(next(part for part in parts if part.exists())).entries)
    return len(load(data, "train", Request(data_dir)))  # which says what is wrong with the name


def _missing_detection(kind: str, options: Options) -> str | None:
    folder = detection_folder(kind, options)
    recipe = DetectRecipe().override({"set": kind, **options.detect}).resolved()
    if kind == "coco":
        needed = [folder / "annotations" / f"instances_{part}.json" for part in (recipe.train_part, recipe.test_part)]
        remedy = "put COCO 2017's pictures and annotations there, or say where they lie: --use coco=FOLDER"
    else:
        root = folder if (folder / "VOC2007").is_dir() else folder / "VOCdevkit"
        years = {"voc07": ("VOC2007",), "voc0712": ("VOC2007", "VOC2012")}[kind]
        needed = [root / year / "ImageSets" / "Main" / f"{recipe.train_part}.txt" for year in years]
        needed.append(root / "VOC2007" / "ImageSets" / "Main" / f"{recipe.test_part}.txt")
        remedy = "unpack PASCAL VOC's VOCdevkit there, or say where it lies: --use voc=FOLDER"
    gone = next((file for file in needed if not file.exists()), None)
    return None if gone is None else f"{gone} is not there: {remedy}"


def limited(recipe: Recipe, total: int, images: int | None) -> Recipe:
    """With a subset and a batch that the data has images for."""
    wanted = min(total, recipe.subset or total, images or total)
    batch = min(recipe.batch_size or wanted, wanted)
    return recipe.override({"subset": wanted if wanted < total else None, "batch_size": batch})
