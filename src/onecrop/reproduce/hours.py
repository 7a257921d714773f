"""How long a plan will take on this device: a few real steps of every kind of work, kept for the next time."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

from onecrop.choices import choose_image_size
from onecrop.detect.recipe import DetectRecipe
from onecrop.detect.weights import NETS, Net
from onecrop.device import choose_device, describe
from onecrop.errors import UserError
from onecrop.files import read_json, write_json
from onecrop.nets.backbones import SMALL_IMAGE, Stem
from onecrop.progress import Progress
from onecrop.recipe import Recipe
from onecrop.reproduce.measure import UNTRAINED_SIZE, probe_of
from onecrop.reproduce.needed import DataThere
from onecrop.reproduce.options import Options
from onecrop.reproduce.plan import DETECTION, Step, detection_recipe
from onecrop.reproduce.trials import LONGEST, seconds_a_step, seconds_a_test, seconds_a_view
from onecrop.survey import forecast

FILE = "plan/forecasts.json"  # apart from result files; device and kind of work -> seconds a thing
MOST_ROWS = 100_000  # of a bank that is made only to time a step
SIZES = {"cifar10": 32, "cifar100": 32, "shapes": 32, "digits": 32, "tiny-imagenet": 64, "imagenet": 224}
PASSES = {"knn": 1, "linear": 100, "linear-fast": 5}  # of the training images through the frozen network, by probe
FORWARD = 1 / 3  # of a training step: its backward pass takes twice as long

Hours = dict[str, float | None]  # pretraining, probes, detection, as far as they are to do; None: cannot be told


class Forecasts:
    def __init__(self, options: Options, there: DataThere, measure: bool) -> None:
        """measure: what no earlier plan has timed; else it is not known."""
        self.file, self.there, self.progress, self.measure = Path(options.out) / FILE, there, Progress(), measure
        self.device, self.sizes = choose_device(options.device), dict(SIZES)
        self.known: dict[str, float] = read_json(self.file) or {}

    def hours(self, step: Step) -> Hours:
        """Of what is left to do of a step. Maps of pictures, minutes at most, are not counted."""
        hours: Hours = {}
        if not step.measures:
            return hours
        if step.recipe is not None and not step.is_finished:
            hours["pretraining"] = _times(self._pretraining(step.recipe), step.recipe.epochs)
        images = images_probed(step, self.there)
        if images != 0:
            hours["probes"] = _times(self._view(step), images)
        kinds = dict.fromkeys(what.kind for what in step.measures if what.kind in DETECTION)
        if kinds:
            found = [self._detection(detection_recipe(step, kind), step) for kind in kinds]
            hours["detection"] = None if None in found else sum(cast(list[float], found))
        return {kind: _times(seconds, 1 / 3600) for kind, seconds in hours.items()}

    def _pretraining(self, recipe: Recipe) -> float | None:
        """Seconds an epoch."""
        images = recipe.subset or self.there.size(recipe.data)
        if images is None:
            return None
        rows, size = min(images, MOST_ROWS), self._size(recipe)
        counts = [f"{name} {value}" for name, value in vars(recipe.settings).items() if type(value) is int]
        stem = "" if recipe.stem is None else f"{recipe.stem} stem, "
        kind = f"{recipe.method} {recipe.backbone} {stem}{size} px, batch {recipe.batch_size}, {rows} images"
        if recipe.crop_resolution not in (None, 1):
            kind += f", crops × {recipe.crop_resolution:g}"
        kind += "".join(f", {said}" for said in (recipe.optimizer, *counts))

        def seconds_an_image() -> float | None:
            seconds = forecast(recipe.override({"image_size": size, "epochs": 1}), rows, LONGEST)["seconds"]
            return None if seconds is None else seconds / rows

        return _times(self._kept(kind, seconds_an_image), images)

    def _view(self, step: Step) -> float | None:
        """Seconds an image."""
        backbone, size, stem = step.options.stand_in(step.training.backbone), UNTRAINED_SIZE, cast(Stem, "standard")
        if step.recipe is not None:
            size = self._size(step.recipe)
            stem = step.recipe.stem or ("small" if size <= SMALL_IMAGE else "standard")
        kind = f"views through {backbone}, {stem} stem, {size} px"
        return self._kept(kind, lambda: seconds_a_view(backbone, stem, size, self.device))

    def _detection(self, recipe: DetectRecipe, step: Step) -> float | None:
        """Seconds of training, of measuring norms, and of testing."""
        backbone, tested = cast(Net, step.options.stand_in(step.training.backbone)), self.there.size(recipe.set)
        if backbone not in NETS or tested is None:
            return None
        sizes, masks = recipe.sizes(), recipe.resolved().masks
        kind = f"{backbone} {sizes.train[0]}–{sizes.train[-1]} px, {'masks' if masks else 'boxes'}, {recipe.norm} norm"
        trained = f"detection by {kind}, {recipe.crops} crops, batch {recipe.batch_size}"
        a_step = self._kept(trained, lambda: seconds_a_step(recipe, backbone, self.device))
        a_test = self._kept(f"testing of {kind}", lambda: seconds_a_test(recipe, backbone, self.device))
        return None if a_step is None or a_test is None else a_step * detection_steps(recipe) + a_test * tested

    def _size(self, recipe: Recipe) -> int:
        """Pixels that the network sees."""
        if recipe.image_size is not None:
            return recipe.image_size
        if recipe.data not in self.sizes:
            chosen = choose_image_size(recipe, self.device)  # which looks into the folder
            self.sizes[recipe.data] = chosen["image_size"].value if chosen else 224
        return self.sizes[recipe.data]

    def _kept(self, kind: str, seconds: Callable[[], float | None]) -> float | None:
        """Seconds a thing; None where it cannot be told."""
        key = f"{describe(self.device)}: {kind}"
        if key not in self.known:
            if not self.measure:
                return None
            self.progress.update(f"timing a few steps: {kind}")
            try:
                found = seconds()
            except (UserError, RuntimeError):  # the run itself will say what is wrong
                return None
            finally:
                self.progress.clear()
            if found is None:
                return None
            self.known[key] = found
            write_json(self.file, self.known)
        return self.known[key]


def _times(seconds: float | None, count: float | None) -> float | None:
    return None if seconds is None or count is None else seconds * count


def images_probed(step: Step, there: DataThere) -> int | None:
    """Images through the frozen network, for every probe of the step and those along its training."""
    options, recipe = step.options, step.recipe
    probes = [(1, name, what.what, options.images) for what in step.measures if (name := probe_of(what, options))]
    if recipe is not None and recipe.probe_every and recipe.epochs and not step.is_finished:
        times = -(-recipe.epochs // recipe.probe_every)  # after the last epoch too
        probes.append((times, recipe.probe, step.training.data, None))
    total = 0
    for times, name, wanted, most in probes:
        data = options.stand_in(wanted)
        images = there.size(data)
        if images is None:
            return None
        total += times * (PASSES[name] * min(images, most or images) + there.tested(data))
    return total


def detection_steps(recipe: DetectRecipe) -> float:
    """Of training; those that measure batch norm's statistics have no backward pass."""
    steps = recipe.steps().iterations
    return steps + (FORWARD * min(recipe.norm_steps, steps) if recipe.norm == "batch" else 0)
