"""DetectRecipe: everything a detection run depends on, in one frozen typed dataclass, as Recipe is for pretraining."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

from onecrop.detect.batches import Sizes
from onecrop.detect.weights import SCRATCH, Net
from onecrop.errors import UserError, unknown
from onecrop.recipe import RANGES, check, flag, hints

# A run may be continued with other values of these: they say where and how it runs or is scored, not what it computes.
FREE_ON_RESUME = {"out", "data", "device", "checkpoint_seconds", "metric"}

Length = Literal["24k", "1x", "2x"]
Metric = Literal["coco", "voc07"]


class Schedule(NamedTuple):
    """Steps of batch 16: the learning rate warms up linearly and falls tenfold at each drop."""

    iterations: int
    drops: tuple[int, ...]
    warmup: int

    def scaled(self, scale: float) -> "Schedule":
        """The same shape, with every number multiplied."""
        shorter = (max(1, round(step * scale)) for step in (self.iterations, *self.drops))
        return Schedule(next(shorter), tuple(shorter), round(self.warmup * scale))

    def share(self, step: int) -> float:
        """Of the peak learning rate, at a step from 0."""
        warm = 1.0 if step >= self.warmup else 0.001 + 0.999 * step / self.warmup  # detectron2 begins at a thousandth
        return warm * 0.1 ** sum(step >= drop for drop in self.drops)


SCHEDULES: dict[Length, Schedule] = {
    "24k": Schedule(24_000, (18_000, 22_000), 100),  # MoCo's on VOC
    "1x": Schedule(90_000, (60_000, 80_000), 1_000),  # detectron2's on COCO
    "2x": Schedule(180_000, (120_000, 160_000), 1_000),
}
# set -> schedule, score, parts to train and test on, short sides in training: those of MoCo's detection code
DEFAULTS: dict[str, tuple[Length, Metric, str, str, range]] = {
    "voc07": ("24k", "voc07", "trainval", "test", range(480, 801, 32)),
    "voc0712": ("24k", "voc07", "trainval", "test", range(480, 801, 32)),
    "coco": ("1x", "coco", "train2017", "val2017", range(640, 801, 32)),
}
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **{name: RANGES[name] for name in ("seed", "lr", "weight_decay", "momentum", "checkpoint_seconds")},
    "scale": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "size_scale": ("between 0.1 and 1", lambda x: 0.1 <= x <= 1),
    "batch_size": ("at least 1", lambda x: x >= 1),
    "crops": ("at least 4", lambda x: x >= 4),  # a quarter of them show objects
    "norm_steps": ("0 or more", lambda x: x >= 0),
}


@dataclass(frozen=True)
class DetectRecipe:
    """Defaults are those of MoCo's detection code, which the paper's tables follow. None means: chosen by --set."""

    weights: Annotated[str, "a run folder or backbone.safetensors, a .pth of torchvision's, or scratch"] = SCRATCH
    data: Annotated[str, "the folder VOCdevkit, or COCO's with annotations/ in it"] = "data"
    set: Annotated[Literal["voc07", "voc0712", "coco"], "what to train and test on"] = "voc0712"
    train_part: Annotated[str | None, "part of the set to train on (default: the official one)"] = None
    test_part: Annotated[str | None, "part of the set to test on (default: the official one)"] = None
    skip_broken: Annotated[bool, "leave broken pictures and annotations out instead of stopping"] = False
    out: Annotated[str, "the run folder to write"] = "runs/detect"
    backbone: Annotated[Net | None, "which network (default: the run's)"] = None
    masks: Annotated[bool | None, "Mask R-CNN instead of Faster R-CNN (default: on COCO)"] = None
    norm: Annotated[Literal["batch", "frozen"], "batch norm: trained, or fixed at the pretrained statistics"] = "batch"
    schedule: Annotated[Length | None, "steps and drops (default: 24k on VOC, 1x on COCO)"] = None
    scale: Annotated[float, "multiplies steps, drops and warm-up alike"] = 1.0
    size_scale: Annotated[float, "multiplies the pictures' sides (480–800, at most 1333) and the anchors"] = 1.0
    batch_size: Annotated[int, "pictures a step"] = 16
    crops: Annotated[int, "crops of each picture that stage 4 is trained on"] = 512
    lr: Annotated[float, "peak learning rate"] = 0.02
    momentum: Annotated[float, "of SGD"] = 0.9
    weight_decay: Annotated[float, "of all weights but those of norms"] = 1e-4
    norm_steps: Annotated[int, "steps after training that measure batch norm's statistics anew"] = 200
    seed: Annotated[int, "of new layers, order, sizes, mirroring and sampling"] = 0
    device: Annotated[str, "auto, cpu, cuda or cuda:N"] = "auto"
    precision: Annotated[
        Literal["float32", "bfloat16"] | None,
        "number format of the convolutions (default: bfloat16 where the device has it)",
    ] = None
    metric: Annotated[Metric | None, "COCO's AP or VOC07's 11-point AP (default: the set's own)"] = None
    checkpoint_seconds: Annotated[float, "save the state so often; 0 after every step"] = 60.0

    def __post_init__(self) -> None:
        for name, hint in hints(DetectRecipe).items():
            value = check(name, hint, getattr(self, name))
            object.__setattr__(self, name, value)
            if name in _RANGES and value is not None and not _RANGES[name][1](value):
                raise UserError(f"{flag(name)} {value} is out of range: it must be {_RANGES[name][0]}")
        if self.masks and self.set != "coco":
            raise UserError(f"--masks true needs outlines, and {self.set} has boxes alone: use --set coco")
        if self.norm == "frozen" and self.weights == SCRATCH:
            raise UserError(
                "--norm frozen keeps pretrained statistics, and from scratch there are none: use --norm batch"
            )

    def resolved(self) -> "DetectRecipe":
        """With every None that the set decides filled in."""
        schedule, metric, train_part, test_part, _ = DEFAULTS[self.set]
        return replace(
            self,
            schedule=self.schedule or schedule,
            metric=self.metric or metric,
            train_part=self.train_part or train_part,
            test_part=self.test_part or test_part,
            masks=self.set == "coco" if self.masks is None else self.masks,
        )

    def steps(self) -> Schedule:
        return SCHEDULES[self.schedule or DEFAULTS[self.set][0]].scaled(self.scale)

    def sizes(self) -> Sizes:
        train, test, longest = DEFAULTS[self.set][4], 800, 1333
        return Sizes(
            tuple(round(side * self.size_scale) for side in train),
            round(test * self.size_scale),
            round(longest * self.size_scale),
        )

    def override(self, changes: dict[str, Any]) -> "DetectRecipe":
        """A copy with fields replaced; values may be strings."""
        known = hints(DetectRecipe)
        for name in changes:
            if name not in known:
                raise unknown("field", name, known)
        return replace(self, **changes)

    def changed(self, wanted: "DetectRecipe") -> dict[str, tuple[Any, Any]]:
        """Field -> (value here, value wanted), where they differ and it matters to what is computed."""
        here, there = self.to_json(), wanted.to_json()
        return {
            name: (here[name], there[name])
            for name in there
            if name not in FREE_ON_RESUME and there[name] is not None and here[name] != there[name]
        }

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> "DetectRecipe":
        if not isinstance(content, dict):
            raise UserError("it does not hold a recipe")
        return cls().override(content)
