"""What a plan's hours of probes and of detection are forecast from: their own code on made pictures, timed.

A step of a ResNet-50 detector is minutes on a CPU. It is begun with 1/64 of a picture, an eighth as wide and high and
with as small a share of its crops: what it takes grows with both alike.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from onecrop.data import ImageSet
from onecrop.data.sources import stored_size
from onecrop.detect import model as detector
from onecrop.detect.batches import Sample, resized
from onecrop.detect.recipe import DetectRecipe
from onecrop.detect.run import DetectRun
from onecrop.detect.sets import DetectionSet
from onecrop.detect.train import Training
from onecrop.detect.weights import Net, Start
from onecrop.device import choose_precision
from onecrop.evaluate.features import BATCH, Probe, RandomViews
from onecrop.forecast import forecast_seconds, timed
from onecrop.nets import build_backbone
from onecrop.nets.backbones import Stem

LONGEST = 0.25  # seconds that are worked to time one kind of work among dozens: a rough figure will do
LONGEST_DETECTION = 1.0  # the same: small shares of a picture tell less well what a whole one takes
FIRST_IMAGES = 2
PARTS = 64  # of a picture: detection is begun with one of them
CATEGORIES = {"voc07": 20, "voc0712": 20, "coco": 80}
FILE = (640, 480)  # pixels of a typical picture
OBJECTS = 4  # in it


def seconds_a_view(backbone: str, stem: Stem, image_size: int, device: torch.device) -> float:
    """Of one image that is cropped and goes through the frozen network: what probes spend their time on."""
    network, side = build_backbone(backbone, stem, image_size).eval().to(device), stored_size(image_size)

    def seconds(count: int) -> float:
        made = ImageSet("made", np.zeros((count, 3, side, side), np.uint8))
        views = RandomViews(network, made, Probe(image_size, device), crop_scale=0.08, shown=False)
        return timed(partial(views, 0), device)

    return forecast_seconds(seconds, FIRST_IMAGES, BATCH, LONGEST)[0] / BATCH


def seconds_a_step(recipe: DetectRecipe, backbone: Net, device: torch.device) -> float:
    """Of a detector's training."""

    def seconds(parts: int) -> float:
        training = _training(recipe, backbone, parts, device)
        sides = training.recipe.sizes()
        sample = _sample(sides.train[len(sides.train) // 2], sides.longest, training.recipe, device)
        return timed(partial(training.learn, [sample] * max(1, parts // PARTS)), device)

    return forecast_seconds(seconds, 1, PARTS * recipe.batch_size, LONGEST_DETECTION)[0]


def seconds_a_test(recipe: DetectRecipe, backbone: Net, device: torch.device) -> float:
    """Of one picture: network and crops, of which a trained detector proposes as many as it may."""

    @torch.no_grad()
    def find(training: Training, count: int) -> None:
        sides, model = training.recipe.sizes(), training.model.eval()
        sample = _sample(sides.test, sides.longest, training.recipe, device)
        images = detector.pad([sample.image])
        proposals = sample.boxes[:1].expand(count, 4)
        with torch.autocast(device.type, torch.bfloat16, enabled=model.dtype == torch.bfloat16):
            model.heads.detections(model.trunk(images.tensors).float(), [proposals], images.image_sizes)

    def seconds(parts: int) -> float:
        training = _training(recipe, backbone, parts, device)
        count = max(1, detector.KEPT["testing"] * parts // PARTS)
        return timed(partial(find, training, count), device)

    return forecast_seconds(seconds, 1, PARTS, LONGEST_DETECTION)[0]


def _training(recipe: DetectRecipe, backbone: Net, parts: int, device: torch.device) -> Training:
    """Of a detector for so many parts of a picture, or for whole ones."""
    share = min(1.0, parts / PARTS)
    smaller = replace(
        recipe.resolved(),
        size_scale=max(0.1, recipe.size_scale * share**0.5),
        crops=max(4, round(recipe.crops * share)),
        precision=recipe.precision or choose_precision(device),
    )
    start = Start(build_backbone(backbone, "standard"), backbone, "made", 0, None)
    categories = tuple((number, str(number)) for number in range(CATEGORIES[recipe.set]))
    return Training(smaller, DetectRun(recipe.out), start, DetectionSet("made", (), categories, {}, {}), device)


def _sample(short: int, longest: int, recipe: DetectRecipe, device: torch.device) -> Sample:
    """A black picture with a few objects in a row."""
    width, height = resized(*FILE, short, longest)
    edges = torch.linspace(0, width, OBJECTS + 1)
    boxes = torch.stack([edges[:-1], torch.zeros(OBJECTS), edges[1:], torch.full((OBJECTS,), height / 2)], dim=1)
    masks = torch.ones(OBJECTS, FILE[1], FILE[0], dtype=torch.uint8) if recipe.masks else None
    ratio = torch.tensor([width / FILE[0], height / FILE[1]] * 2)
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    return Sample(image, boxes, torch.ones(OBJECTS, dtype=torch.int64), masks, ratio).to(device)
