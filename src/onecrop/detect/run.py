"""The folder of a detection run: as a pretraining run's, with truth.json and detections.json in place of the backbone.

detections.json is written last: a run that has it is finished, and can be scored again from the two files alone.
"""

import json
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from onecrop.detect.recipe import DetectRecipe
from onecrop.detect.sets import DetectionSet
from onecrop.detect.weights import Start
from onecrop.errors import UserError
from onecrop.files import write_atomically
from onecrop.runs import Run, circumstances


class DetectRun(Run):
    """Run asks its recipe for `data`, `to_json` and `changed` alone, which a DetectRecipe has as well."""

    def __init__(self, folder: Path | str) -> None:
        super().__init__(folder)
        self.truth_file = self.folder / "truth.json"
        self.detections_file = self.folder / "detections.json"

    @property
    def finished(self) -> bool:
        return self.detections_file.exists()

    def recipe(self) -> Any:
        return self.read_recipe(DetectRecipe.from_json, "a detection run", "method")

    @property
    def way_on(self) -> str:
        """What to say to whoever stopped it."""
        return f"continue with `onecrop detect --out {quote(self.folder.as_posix())} --resume`"

    def write_truth(self, truth: dict[str, Any]) -> None:
        write_atomically(self.truth_file, json.dumps(truth).encode())

    def write_detections(self, detections: list[dict[str, Any]]) -> None:
        write_atomically(self.detections_file, json.dumps(detections).encode())

    def facts(self, recipe: DetectRecipe) -> dict[str, Any]:
        """What a result row has to say beside its figures, so that nobody takes a shrunken run for a whole one."""
        try:
            begun = json.loads((self.folder / "provenance.json").read_text())["detection"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.folder / 'provenance.json'} cannot be read: {error}") from None
        fields = (
            *("set", "train_part", "test_part", "backbone", "norm", "masks", "schedule", "scale", "size_scale"),
            *("batch_size", "crops", "lr", "seed", "precision"),
        )
        shown = {name: getattr(recipe, name) for name in fields}
        return shown | {"iterations": recipe.steps().iterations, "step": recipe.steps().iterations, **begun}


def provenance(
    recipe: DetectRecipe, start: Start, train: DetectionSet, test: DetectionSet, device: torch.device
) -> dict[str, Any]:
    """What one needs to know to trust a result, or to get it again."""
    return {
        **circumstances(device, "faster-coco-eval"),
        "seed": recipe.seed,
        "data_fingerprint": f"{train.fingerprint} {test.fingerprint}",
        "detection": {
            "of": start.of,
            "loaded_tensors": start.loaded,
            "pretraining": start.pretraining,
            "num_train": len(train),
            "num_test": len(test),
            "num_classes": len(train.categories),
            "notes": {"train": train.notes, "test": test.notes},
        },
    }
