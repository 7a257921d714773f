"""How long a plan will take on this device: a few real steps of every kind of run, kept for the next time."""

import json
from pathlib import Path

from onecrop.device import choose_device, describe
from onecrop.errors import UserError
from onecrop.files import write_json
from onecrop.progress import Progress
from onecrop.recipe import Recipe
from onecrop.survey import forecast

FILE = "plan/forecasts.json"  # apart from result files; device and kind of run -> seconds an image
LONGEST_STEP = 0.25  # seconds: of one kind among dozens, a rough figure will do
MOST_ROWS = 100_000  # of a bank that is made only to time a step
SIZES = {"cifar10": 32, "cifar100": 32, "shapes": 32, "digits": 32, "tiny-imagenet": 64, "imagenet": 224}


class Forecasts:
    def __init__(self, folder: Path) -> None:
        self.file, self.progress = folder / FILE, Progress()
        try:
            self.known: dict[str, float] = json.loads(self.file.read_text())
        except (OSError, ValueError):
            self.known = {}

    def hours(self, recipe: Recipe, num_images: int) -> float | None:
        """Of pretraining; None where it cannot be told."""
        rows = min(num_images, MOST_ROWS)
        size = recipe.image_size or SIZES.get(recipe.data)
        device = describe(choose_device(recipe.device))
        kind = f"{device}: {recipe.method} {recipe.backbone} {size} px, batch {recipe.batch_size}, {rows} images"
        kind += f", {recipe.optimizer}"
        if kind not in self.known:
            self.progress.update(f"timing a few steps: {recipe.method}, {recipe.backbone}")
            try:
                seconds = forecast(recipe.override({"image_size": size, "epochs": 1}), rows, LONGEST_STEP)["seconds"]
            except (UserError, RuntimeError):  # the run itself will say what is wrong
                return None
            finally:
                self.progress.clear()
            if seconds is None:
                return None
            self.known[kind] = seconds / rows
            write_json(self.file, self.known)
        assert recipe.epochs is not None
        return self.known[kind] * num_images * recipe.epochs / 3600
