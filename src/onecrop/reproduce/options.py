"""How a table is reproduced. What makes it another experiment than the paper's is printed with the result."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from onecrop.data import SOURCES
from onecrop.detect.recipe import DetectRecipe
from onecrop.errors import UserError, unknown
from onecrop.evaluate import EVALUATIONS
from onecrop.nets import BACKBONES
from onecrop.recipe import Recipe, hints
from onecrop.recipes import RECIPES, named
from onecrop.reproduce.tables import NAMES, Cell, Table, Training

# fields that --change and --detect may not set: rows would not be what the table says they are
DECIDED = {
    "change": ("method", "data", "backbone", "minutes", "seed", "out"),
    "detect": ("weights", "set", "data", "scale", "out"),
}


@dataclass(frozen=True)
class Options:
    data_dir: str = "data"
    out: str = "runs/reproduce"
    recipe: str = "paper"  # of the paper's method; rivals have their own
    scale: float = 1.0
    images: int | None = None
    probe: str = "linear"
    use: dict[str, str] = field(default_factory=dict)  # a data set or backbone of the paper -> what stands for it
    change: dict[str, str] = field(default_factory=dict)  # fields of every pretraining's recipe
    detect: dict[str, str] = field(default_factory=dict)  # fields of every detection's recipe
    methods: tuple[str, ...] = ()  # those to run; none: all
    backbones: tuple[str, ...] = ()
    seed: int = 0
    seeds: int = 1  # runs of each row, with seeds from `seed` on
    device: str = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise UserError(f"--scale {self.scale:g} is out of range: it must be above 0 and at most 1")
        if self.images is not None and self.images < 2:
            raise UserError(f"--images {self.images} is too few: a batch needs two to tell apart")
        if self.seeds < 1:
            raise UserError(f"--seeds {self.seeds} is too few: it must be at least 1")
        if self.probe not in EVALUATIONS:
            raise unknown("evaluation", self.probe, EVALUATIONS)
        if named(self.recipe).method != "sid":
            others = ", ".join(name for name, recipe in RECIPES.items() if recipe().method == "sid")
            raise UserError(f"--recipe {self.recipe} is not one of the paper's method: use one of {others}")
        for method in self.methods:
            if method not in NAMES:
                raise unknown("method", method, NAMES)
        DetectRecipe().override(self.detect)  # a mistake in it is said now
        for option, names in DECIDED.items():
            for name in names:
                if name in getattr(self, option):
                    own = "the table decides it, or a flag of its own: --use, --scale, --seed, --out"
                    raise UserError(f"--{option} {name}=… is not for the command line: {own}")

    def result_name(self, table: str) -> str:
        """Of a table's files: one made with another recipe lies beside it."""
        return table if self.recipe == "paper" else f"{table}-{self.recipe}"

    def title(self, name: str, table: Table) -> str:
        """Of a table, with what stands in it for something else."""
        others = [f"{other} for {one}" for one, other in self.use.items() if _is_another(other)]
        return f"{self.result_name(name)}: {table.title}" + f" ({', '.join(others)})" * bool(others)

    def each_seed(self) -> Iterator["Options"]:
        for seed in range(self.seed, self.seed + self.seeds):
            yield replace(self, seed=seed, seeds=1)

    def wants(self, training: Training) -> bool:
        chosen = not self.methods or training.method in self.methods
        return chosen and (not self.backbones or training.backbone in self.backbones)

    def stand_in(self, name: str) -> str:
        """What is taken for a data set or backbone of the paper: mostly itself."""
        return self.use.get(name, name)

    def stands_in(self, cell: Cell) -> bool:
        """Whether the number is of another data set or backbone than the paper's."""
        names = [cell.measure.what, *([cell.training.data, cell.training.backbone] if cell.training else [])]
        others = [self.use[name] for name in names if name in self.use]
        return any(map(_is_another, others))

    def differences(self) -> list[str]:
        """In what the result is not the paper's experiment, for the reader of the table."""
        said = []
        if self.recipe != "paper":
            crops = named(self.recipe).crop_resolution
            for_all = "" if crops in (None, 1) else f", and its crops of {crops:g} of the image size for all methods"
            said.append(f"the recipe {self.recipe} for the paper's method{for_all}")
        if self.scale != 1:
            said.append(f"scale {self.scale:g}: epochs and detection steps multiplied by it")
        if self.images is not None:
            said.append(f"at most {self.images:,} training images, for pretraining and for probes")
        if self.probe != "linear":
            said.append(f"scored by {self.probe}, not by the paper's linear protocol")
        said += [f"{other} stands for {name}" for name, other in self.use.items()]
        for name, value in self.change.items():
            said.append(f"{name} {value} in every run" + " of a method that has it" * (name not in hints(Recipe)))
        said += [f"{name} {value} in detection" for name, value in self.detect.items()]
        return said


def _is_another(name: str) -> bool:
    """Data set or backbone than the paper's, by its name; a folder may hold the same data."""
    return name in SOURCES or name in BACKBONES
