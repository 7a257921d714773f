"""The run folder: recipe.json, provenance.json, metrics.jsonl, results.jsonl, checkpoint/, log.txt and the backbone.

backbone.safetensors is written last: a run that has it is finished and never written to again.
"""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from onecrop.device import describe
from onecrop.errors import RecipeError, UserError
from onecrop.files import append_json_line, locked, read_json_lines, write_atomically, write_json
from onecrop.methods import METHODS
from onecrop.nets import save_backbone
from onecrop.progress import readable
from onecrop.recipe import Recipe, flag, spelled
from onecrop.report.card import write_card
from onecrop.report.comparison import FAILURE
from onecrop.tensors import load_tensors, save_tensors

AnyRecipe = TypeVar("AnyRecipe")
LOCK = ".lock"  # in a run folder: held by the process that writes it
# What a kill in `begin`, or a member of a comparison that could not begin, leaves: nothing to lose.
NOT_BEGUN = (LOCK, "provenance.json", FAILURE)


class Run:
    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.recipe_file = self.folder / "recipe.json"
        self.metrics_file = self.folder / "metrics.jsonl"
        self.results_file = self.folder / "results.jsonl"
        self.backbone_file = self.folder / "backbone.safetensors"
        self.checkpoint_file = self.folder / "checkpoint" / "state.safetensors"

    @property
    def finished(self) -> bool:
        return self.backbone_file.exists()

    def recipe(self) -> Recipe:
        return self.read_recipe(Recipe.from_json, "a run folder", "schedule")

    def read_recipe(self, parse: Callable[[Any], AnyRecipe], kind: str, foreign: str) -> AnyRecipe:
        """foreign: a field that recipes of another kind of run have, and those of this kind have not."""
        try:
            content = json.loads(self.recipe_file.read_text())
            if not isinstance(content, dict) or foreign not in content:
                return parse(content)
        except FileNotFoundError:
            raise UserError(f"{self.folder} is not {kind}: it has no recipe.json") from None
        except (ValueError, TypeError, OSError) as error:
            raise UserError(f"{self.recipe_file} cannot be read: {error}") from None
        raise UserError(f"{self.folder} is not {kind} of this verb: its recipe has the field {foreign!r}")

    def refuse(self, recipe: Recipe, resume: bool) -> None:
        """A folder that is not to be overwritten, or was begun with another recipe: said before any work is done."""
        if self.recipe_file.exists() and resume:
            self.refuse_changes(recipe, but={"data"})  # it may lie elsewhere now: `begin` compares the images
            return
        if self.folder.exists() and (
            not self.folder.is_dir()
            or any(f.name not in NOT_BEGUN and f.suffix != ".part" for f in self.folder.iterdir())
        ):
            remedy = "choose another --out" + ", or pass --resume" * self.recipe_file.exists()
            raise UserError(f"{self.folder} exists and is not overwritten: {remedy}")

    def need_room(self, checkpoint: int) -> None:
        """Refuse, before the first step, checkpoints of so many bytes where the disk has no room for them: a new one is
        written beside the old one, which only then goes."""
        needed = checkpoint if self.checkpoint_file.exists() else 2 * checkpoint
        there = next(folder for folder in (self.folder, *self.folder.resolve().parents) if folder.exists())
        free = shutil.disk_usage(there).free
        if free < needed:
            raise UserError(
                f"a checkpoint takes {readable(checkpoint)}, and for a moment there are two of them; {readable(free)} "
                f"are free where {self.folder} lies: make room, or choose another --out"
            )

    def begin(self, recipe: Recipe, provenance: dict[str, Any], resume: bool) -> None:
        """Make the folder, or check that `recipe` and the images are those this run was begun with."""
        self.refuse(recipe, resume)
        if self.recipe_file.exists():
            begun = self._provenance()
            if begun["data_fingerprint"] != provenance["data_fingerprint"]:
                raise UserError(f"{self.folder} was begun with other images than {recipe.data} holds now")
            if not self.checkpoint_file.exists() and begun.get("weights_sha256") != provenance.get("weights_sha256"):
                raise UserError(f"{self.folder} was begun with other weights than {recipe.weights} holds now")
            return
        write_json(self.folder / "provenance.json", provenance)
        write_json(self.recipe_file, recipe.to_json())

    def refuse_changes(self, recipe: Recipe, but: Collection[str] = ()) -> None:
        for name, (was, now) in self.recipe().changed(recipe).items():
            if name not in but:
                raise RecipeError(
                    f"{self.folder} was begun with {flag(name)} {spelled(was)}, not {spelled(now)}: "
                    "resume it as it was, or choose another --out"
                )

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """One process a run, from before it begins; the lock goes with the process, however it ends."""

        def refuse() -> None:
            raise UserError(f"another process is writing {self.folder}: wait, or choose another --out")

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {self.folder}: {error.strerror}") from None
        with locked(self.folder / LOCK, refuse):
            yield

    def _provenance(self) -> dict[str, Any]:
        try:
            begun = json.loads((self.folder / "provenance.json").read_text())
            return {**begun, "data_fingerprint": str(begun["data_fingerprint"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.folder / 'provenance.json'} cannot be read: {error}") from None

    def say(self, line: str) -> None:
        self.log(line)
        try:
            print(line, flush=True)
        except OSError:  # the reader of our output went away, or its disk is full; the run goes on, log.txt has it all
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def log(self, line: str) -> None:
        try:
            with (self.folder / "log.txt").open("a", encoding="utf-8", errors="surrogateescape") as file:
                file.write(line + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self.folder / 'log.txt'}: {error.strerror}") from None

    def add_metrics(self, row: dict[str, Any]) -> None:
        append_json_line(self.metrics_file, row)

    def add_result(self, row: dict[str, Any]) -> None:
        append_json_line(self.results_file, row)

    def save(self, step: int, tensors: dict[str, Tensor]) -> None:
        save_tensors(self.checkpoint_file, tensors, {"step": step})

    def finish(self, backbone: nn.Module, facts: dict[str, Any]) -> None:
        """The card first: the backbone makes the run a finished one."""
        write_card(self.folder)
        save_backbone(self.backbone_file, backbone, facts)

    def restore(self) -> tuple[int, dict[str, Tensor]]:
        """-> step and tensors of the last checkpoint (0 and nothing where there is none); later metrics are dropped."""
        step, tensors = 0, dict[str, Tensor]()
        if self.checkpoint_file.exists():
            try:
                tensors, facts = load_tensors(self.checkpoint_file)
            except UserError as error:
                raise UserError(f"{error}: remove it to start {self.folder} from its beginning") from None
            if not isinstance(facts, dict) or not isinstance(facts.get("step"), int):
                raise UserError(f"{self.checkpoint_file} is not a checkpoint of onecrop: remove it to start again")
            step = facts["step"]
        for file in (self.metrics_file, self.results_file):
            rows = [row for row in read_json_lines(file) if row.get("step", 0) <= step]
            if file.exists():
                write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
        for part in self.folder.rglob(".*.part"):  # left by a kill in the middle of a write
            part.unlink(missing_ok=True)
        return step, tensors


class Onlooker(Run):
    """The run folder for every process but the first, which may not even see it: nothing is written or read."""

    def refuse(self, recipe: Recipe, resume: bool) -> None: ...

    def need_room(self, checkpoint: int) -> None: ...

    def begin(self, recipe: Recipe, provenance: dict[str, Any], resume: bool) -> None: ...

    def refuse_changes(self, recipe: Recipe, but: Collection[str] = ()) -> None: ...

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        yield

    def log(self, line: str) -> None: ...

    def add_metrics(self, row: dict[str, Any]) -> None: ...

    def add_result(self, row: dict[str, Any]) -> None: ...

    def save(self, step: int, tensors: dict[str, Tensor]) -> None: ...

    def restore(self) -> tuple[int, dict[str, Tensor]]:
        return 0, {}

    def finish(self, backbone: nn.Module, facts: dict[str, Any]) -> None: ...


def provenance(
    recipe: Recipe,
    fingerprint: str,
    num_images: int,
    device: torch.device,
    weights_sha256: str | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """What one needs to know to trust a result, or to get it again."""
    return {
        **circumstances(device, "safetensors", *["timm"] * str(recipe.backbone).startswith("timm/")),
        "seed": recipe.seed,
        "data_fingerprint": fingerprint,
        "num_images": num_images,
        "processes": processes,
        "weights_sha256": weights_sha256,
        "crops": METHODS[recipe.method].crops,
        "networks": METHODS[recipe.method].networks,
    }


def circumstances(device: torch.device, *more_packages: str) -> dict[str, Any]:
    """When, by which command, with what, and where."""
    versions = {}
    for package in ("onecrop", "torch", "torchvision", "numpy", *more_packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # onecrop itself may run from its source folder
            versions[package] = "source" if package == "onecrop" else "none"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "commit": _commit(),
        "device": describe(device),
        "host": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _command() -> str:
    """As a user types it: of the program its name, not where it is installed."""
    program = Path(sys.argv[0]).name
    return shlex.join(["onecrop" if program == "__main__.py" else program, *sys.argv[1:]])


def _commit() -> str | None:
    """The source's commit, where it runs from a checkout."""
    here = Path(__file__).resolve().parent
    if not (here.parents[1] / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"], capture_output=True, text=True
        )
    except OSError:
        return None
    return done.stdout.strip() or None
