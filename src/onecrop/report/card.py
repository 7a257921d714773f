"""The model card of a run: what it learned from, how, at what cost, how well, and how to load it. From JSON alone."""

import json
import statistics
from pathlib import Path
from typing import Any

from onecrop.errors import UserError
from onecrop.files import read_json_lines, write_atomically
from onecrop.progress import duration
from onecrop.report.tables import markdown_table

CARD = "card.md"
SHOWN = ("method", "backbone", "stem", "image_size", "epochs", "batch_size", "optimizer", "lr", "weight_decay", "seed")

# scores that agree in these are of one kind, of which the last counts
KIND = ("of", "evaluation", "data", "split", "protocol", "image_size", "num_train")


def write_card(folder: Path) -> Path:
    """Read recipe, provenance, metrics and results of a run and write card.md beside them."""
    recipe, provenance = (_read(folder / name) for name in ("recipe.json", "provenance.json"))
    metrics, results = (read_json_lines(folder / name) for name in ("metrics.jsonl", "results.jsonl"))
    try:
        parts = [_head(folder, recipe), _data(recipe, provenance), _recipe(recipe), _cost(provenance, metrics)]
        parts += [_scores(results), _loading(folder, recipe), _limits(recipe, provenance)]
    except (KeyError, TypeError) as error:
        raise UserError(f"no model card: a file in {folder} lacks {error}") from None
    path = folder / CARD
    write_atomically(path, ("\n\n".join(parts) + "\n").encode(errors="backslashreplace"))
    return path


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"no model card: {file} cannot be read ({error})") from None
    return dict(content) if isinstance(content, dict) else {}


def _head(folder: Path, recipe: dict[str, Any]) -> str:
    return (
        f"# {folder.resolve().name}\n\nA {recipe['backbone']} backbone, pretrained without labels by onecrop: pictures "
        f"of {recipe['image_size']} px in, pooled features out. Written by onecrop from the files beside it."
    )


def _data(recipe: dict[str, Any], provenance: dict[str, Any]) -> str:
    lines = ["## Data", "", f"- {recipe['data']}: {provenance['num_images']:,} images, no labels used"]
    if recipe.get("subset"):
        lines.append(f"- drawn at random from it with seed {recipe['seed']}")
    if recipe.get("holdout"):
        lines.append(f"- {recipe['holdout']:,} more held out to score on")
    lines.append(f"- fingerprint {provenance['data_fingerprint']}")
    if recipe.get("weights"):
        lines.append(f"- begun from the weights {recipe['weights']}, SHA-256 {provenance['weights_sha256']}")
    return "\n".join(lines)


def _recipe(recipe: dict[str, Any]) -> str:
    rows = [(name.replace("_", " "), str(recipe[name])) for name in SHOWN if recipe.get(name) is not None]
    settings = ", ".join(f"{name} {value}" for name, value in recipe["settings"].items())
    rows.append((f"settings of {recipe['method']}", settings))
    return "## Recipe\n\n" + markdown_table(("field", "value"), rows)


def _cost(provenance: dict[str, Any], metrics: list[dict[str, Any]]) -> str:
    lines = ["## Cost", "", f"- {provenance['device']}, torch {provenance['versions']['torch']}, {provenance['date']}"]
    if metrics:
        seconds = sum(row["seconds"] for row in metrics)
        rate = statistics.median(row["images_per_second"] for row in metrics)
        lines.append(f"- {duration(seconds)} of training steps, {rate:,.0f} images/s")
        memory = [row["peak_memory"] for row in metrics if row.get("peak_memory")]
        lines += [f"- {max(memory) / 1e9:.2f} GB of GPU memory at most"] if memory else []
    return "\n".join(lines)


def _scores(results: list[dict[str, Any]]) -> str:
    """The last score of each kind, so that an evaluation that was run again stands there once."""
    last = {tuple(row.get(name) for name in KIND): row for row in results}
    if not last:
        return "## Scores\n\nNone yet: `onecrop evaluate RUN --data LABELLED` adds them here."
    rows = []
    for row in last.values():
        said = f"{row['epoch']} epochs, {row['protocol']}; {row['split']}, {row['num_train']:,} train, "
        said += f"{row['num_test']:,} test" + (f"; {row['image_size']} px, {row['resize']}" if "resize" in row else "")
        score = f"{row['accuracy']:.1f}"
        rows.append((row["of"], row["evaluation"], row["data"], score, f"{said}, seed {row['seed']}"))
    return "## Scores\n\n" + markdown_table(("features", "evaluation", "data", "accuracy, %", "protocol"), rows)


def _loading(folder: Path, recipe: dict[str, Any]) -> str:
    size, name = recipe["image_size"], folder.resolve().name
    into = ", into=module" if str(recipe["backbone"]).startswith("module/") else ""
    lines = ["## Loading it", "", "```python", "import torch", "from onecrop import load_backbone"]
    lines += [f'features = load_backbone("{name}"{into})(torch.zeros(1, 3, {size}, {size}))  # [1, dim]', "```"]
    lines += ["", "Pictures are RGB from 0 to 1, normalised with ImageNet's mean and deviation as in torchvision."]
    return "\n".join(lines)


def _limits(recipe: dict[str, Any], provenance: dict[str, Any]) -> str:
    lines = [
        "## Limits",
        "",
        f"- It has seen {provenance['num_images']:,} images of one source; on others expect less, and measure it.",
        f"- It is for pictures of {recipe['image_size']} px; other sizes run, with other features.",
        "- There is no classifier in it. What the images show, and whom they leave out, is in its features.",
        "- Scores on the data it was pretrained on are of images it has seen, without labels, unless held out.",
    ]
    if recipe.get("stem") == "small":
        lines.append("- Its first layers are those for small images: torchvision's and timm's own network do not fit.")
    return "\n".join(lines)
