"""Recipe: everything a run depends on, in one frozen typed dataclass.

It is the Python API, the command line and the saved configuration. The settings of the chosen method are one of its
fields; on the command line and in overrides the two stand side by side, by field name.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from onecrop.data.sources import Request
from onecrop.distributed import Group
from onecrop.errors import UserError, unknown
from onecrop.methods import METHODS, Settings
from onecrop.nets.backbones import Stem, check_backbone

# A run may be continued with other values of these: they say where and how it runs, not what it computes.
FREE_ON_RESUME = {"out", "data_dir", "device", "checkpoint_seconds"}

_SHARE = ("between 0 and 1", lambda x: 0 <= x <= 1)
_SOME_SHARE = ("above 0 and at most 1", lambda x: 0 < x <= 1)
_BELOW_ONE = ("at least 0 and below 1", lambda x: 0 <= x < 1)
_COUNT = ("at least 1", lambda x: x >= 1)
_POSITIVE = ("above 0", lambda x: 0 < x < float("inf"))
_NOT_NEGATIVE = ("0 or more", lambda x: 0 <= x < float("inf"))
# What a number may be, by field name, for the recipe and for every method's settings.
RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "epochs": _COUNT,
    "minutes": _POSITIVE,
    "warmup_epochs": _NOT_NEGATIVE,
    "batch_size": ("at least 2", lambda x: x >= 2),  # batch norm needs two
    "image_size": ("between 8 and 4096", lambda x: 8 <= x <= 4096),
    "crop_resolution": _SOME_SHARE,
    "subset": _COUNT,
    "holdout": _NOT_NEGATIVE,
    "seed": ("between 0 and 2^32 − 1", lambda x: 0 <= x < 2**32),
    "probe_every": _NOT_NEGATIVE,
    "lr": _POSITIVE,
    "weight_decay": _NOT_NEGATIVE,
    "momentum": _BELOW_ONE,
    "checkpoint_seconds": _NOT_NEGATIVE,
    "crop_scale": _SOME_SHARE,
    "jitter": _SHARE,
    "jitter_probability": _SHARE,
    "grey_probability": _SHARE,
    "blur_probability": _SHARE,
    "dim": ("at least 2", lambda x: x >= 2),
    "hidden": _COUNT,
    "temperature": _POSITIVE,
    "kl_temperature": _POSITIVE,
    "kl_weight": _NOT_NEGATIVE,
    "bank_momentum": _BELOW_ONE,
    "bank_momentum_end": _BELOW_ONE,
    "sampled_rows": _NOT_NEGATIVE,
    "relation": _SHARE,
    "relation_temperature": ("at least 0.02", lambda x: 0.02 <= x < float("inf")),
    "relation_start": _SHARE,
    "relation_rise": _SOME_SHARE,
    "smoothing": _BELOW_ONE,
    "bottleneck": _COUNT,
    "target_momentum": _SHARE,
    "key_momentum": _SHARE,
    "queue_size": _COUNT,
    "norm_groups": _COUNT,
    "noise_samples": _COUNT,
    "proximal_weight": _NOT_NEGATIVE,
    "location_weight": _NOT_NEGATIVE,
    "overlap": _SHARE,
    "cutmix": ("between 0 and 100", lambda x: 0 <= x <= 100),
}


@dataclass(frozen=True)
class Recipe:
    """Defaults are the paper's. None means: chosen from the data and the device, in choices.py, with its reason."""

    data: Annotated[str, "a named data set or a folder of images"] = "shapes"
    out: Annotated[str, "the run folder to write"] = "runs/run"
    data_dir: Annotated[str, "where named data sets lie, or are downloaded to"] = "data"
    subset: Annotated[int | None, "train on so many images, drawn at random"] = None
    holdout: Annotated[int, "keep so many training images aside, to score on in place of the test part"] = 0
    drop_duplicates: Annotated[bool, "of images that look alike train on one"] = False
    method: Annotated[str, "how to learn"] = "sid"
    settings: Annotated[Settings, "the method's own settings"] = None  # type: ignore[assignment]
    backbone: Annotated[str | None, "which network"] = None
    weights: Annotated[str | None, "start from a file in torchvision's keys, or from `torchvision`'s own"] = None
    stem: Annotated[Stem | None, "first layers: small keeps the resolution of small images"] = None
    image_size: Annotated[int | None, "pixels the network sees"] = None
    crop_resolution: Annotated[float | None, "side of a training crop, as a share of the image size"] = None
    epochs: Annotated[int | None, "passes over the data"] = None
    minutes: Annotated[
        float | None, "train about so long: the epochs that fit, at most --epochs; probes come on top"
    ] = None
    batch_size: Annotated[int | None, "images a step"] = None
    optimizer: Annotated[Literal["muon", "sgd", "adamw", "lars"] | None, "how weights move"] = None
    lr: Annotated[float | None, "peak learning rate"] = None
    momentum: Annotated[float, "of the optimizer"] = 0.9
    weight_decay: Annotated[float | None, "of the optimizer"] = None
    warmup_epochs: Annotated[float, "epochs of linear warm-up before the cosine decay"] = 0.0
    seed: Annotated[int, "of weights, order and augmentation"] = 0
    device: Annotated[str, "auto, cpu, cuda or cuda:N"] = "auto"
    precision: Annotated[Literal["float32", "bfloat16"] | None, "number format of network and bank"] = None
    compile: Annotated[bool | None, "compile the step, on a GPU"] = None
    sync_batch_norm: Annotated[bool, "of several processes: normalise by the images of all"] = True
    probe: Annotated[Literal["knn", "linear-fast", "linear"], "which evaluation --probe-every runs"] = "knn"
    probe_every: Annotated[int, "evaluate every so many epochs; 0 never"] = 0
    checkpoint_seconds: Annotated[float, "save the state so often; 0 after every step"] = 60.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)
        if cast(Settings | None, self.settings) is None:
            object.__setattr__(self, "settings", METHODS[self.method].Settings())
        if type(self.settings) is not METHODS[self.method].Settings:
            wanted, got = METHODS[self.method].Settings.__name__, type(self.settings).__name__
            raise UserError(f"settings of {self.method} are a {wanted}, not a {got}")
        if not (self.data and self.out):  # as by a variable that a shell does not know: not the folder we are in
            raise UserError("the name of the data, or of --out, is empty: say a folder's name, or . for this one")
        if self.backbone is not None:
            check_backbone(self.backbone)
        for part in (self, self.settings):
            for name, hint in hints(type(part)).items():
                if name != "settings":
                    object.__setattr__(part, name, check(name, hint, getattr(part, name)))
        for name, value in self.flat().items():
            if name in RANGES and value is not None:
                allowed, holds = RANGES[name]
                if not holds(value):
                    raise UserError(f"{flag(name)} {value} is out of range: it must be {allowed}")
        if self.epochs is not None and not 0 <= self.warmup_epochs < self.epochs:
            raise UserError(f"--warmup-epochs {self.warmup_epochs} is not between 0 and the {self.epochs} epochs")

    def override(self, changes: dict[str, Any]) -> "Recipe":
        """A copy with fields of the recipe, or of its method's settings, replaced; values may be strings."""
        changes = dict(changes)
        own = {name: changes.pop(name) for name in list(changes) if name in hints(Recipe)}
        settings = own.pop("settings", None)
        same_method = own.get("method", self.method) == self.method
        settings = settings or (self.settings if same_method else None)  # None: the new method's defaults
        base = dataclasses.replace(self, **{**_typed(Recipe, own), "settings": settings})
        known = hints(type(base.settings))
        for name in changes:
            if name not in known:
                raise unknown("field", name, [*hints(Recipe), *known])
        return dataclasses.replace(
            base, settings=dataclasses.replace(base.settings, **_typed(type(base.settings), changes))
        )

    def completed(self, begun: "Recipe") -> "Recipe":
        """What is open here as it was chosen in `begun`: a run goes on as it was, on whatever device."""
        here, there = self._left_open(begun), begun.flat()
        return self.override({name: there[name] for name in here if here[name] is None and there.get(name) is not None})

    def _left_open(self, begun: "Recipe") -> dict[str, Any]:
        """flat(), with None for epochs that only bound the minutes, where those of `begun` are within them."""
        fields = self.flat()
        if self.minutes is not None and (begun.epochs or 0) <= (self.epochs or 0):
            fields["epochs"] = None
        return fields

    def agreed(self, group: Group) -> "Recipe":
        """As the first process has it: it alone may have seen the run folder."""
        return self if group.size == 1 else Recipe.from_json(group.said_by(0, self.to_json()))

    def changed(self, wanted: "Recipe") -> dict[str, tuple[Any, Any]]:
        """Field -> (value here, value wanted), where they differ and it matters to what is computed.

        None in `wanted` leaves the choice open: whatever was chosen here will do.
        """
        here, there = self.flat(), wanted._left_open(self)
        return {
            name: (here.get(name), there[name])
            for name in there
            if name not in FREE_ON_RESUME and there[name] is not None and here.get(name) != there[name]
        }

    def flat(self) -> dict[str, Any]:
        """Field -> value, the method's settings beside the recipe's own."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}
        return own | dataclasses.asdict(self.settings)

    def having(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `changes` whose field this recipe has: not every method has a head."""
        fields = self.flat()
        return {name: value for name, value in changes.items() if name in fields}

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> "Recipe":
        if not isinstance(content, dict) or not isinstance(content.get("settings", {}), dict):
            raise UserError("it does not hold a recipe")
        content = dict(content)
        settings = content.pop("settings", {})
        return cls(method=content.get("method", "sid")).override({**content, **settings})

    @property
    def crop_size(self) -> int:
        """Pixels of a training crop: a multiple of 4, which halves twice, or all of the image size."""
        assert self.image_size is not None, "the recipe is not resolved"
        side = max(8, 4 * round((self.crop_resolution or 1.0) * self.image_size / 4))
        return self.image_size if self.crop_resolution == 1 else min(side, self.image_size)

    def request(self) -> Request:
        return Request(self.data_dir, self.image_size, self.subset, self.holdout, self.seed, self.drop_duplicates)


def need_fields(names: Iterable[str], recipes: Iterable[Recipe]) -> None:
    """Each must be a field of one of the recipes at least."""
    known = {field: None for recipe in recipes for field in recipe.flat()}
    for name in names:
        if name not in known:
            raise unknown("field", name, known)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def spelled(value: Any) -> str:
    """A value as its flag takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def named_values(texts: Sequence[str], option: str, form: str = "name=value") -> dict[str, str]:
    """["a=1", "c=3"] -> names and values. option: the flag they were given by."""
    pairs = [text.partition("=") for text in texts]
    wrong = next((name + equals for name, equals, value in pairs if not (name and equals and value)), None)
    if wrong is not None:
        raise UserError(f"{option} takes {form}, and {wrong!r} is not of that form")
    return {name: value for name, _, value in pairs}


def hints(cls: type) -> dict[str, Any]:
    """Field -> type, with Annotated help kept."""
    types = get_type_hints(cls, include_extras=True)
    return {f.name: types[f.name] for f in fields(cls)}


def _typed(cls: type, changes: dict[str, Any]) -> dict[str, Any]:
    types = hints(cls)
    return {name: check(name, types[name], value) for name, value in changes.items()}


def bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def describe_hint(hint: Any) -> tuple[str, str]:
    """(what may be given, help text) for the command line."""
    text = get_args(hint)[1] if get_origin(hint) is Annotated else ""
    kinds = [h for h in _members(bare(hint)) if h is not NoneType]
    choices = [str(c) for h in kinds if get_origin(h) is Literal for c in get_args(h)]
    return ("|".join(choices) or {bool: "true|false"}.get(kinds[0], kinds[0].__name__.upper())), text


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def check(name: str, hint: Any, value: Any) -> Any:
    """`value` as the field's type, read from a string where it is one."""
    hint = bare(hint)
    for member in _members(hint):
        if member is NoneType:
            if value is None or value == "none":
                return None
        elif get_origin(member) is Literal:
            if value in get_args(member):
                return value
        elif member is bool:
            if isinstance(value, bool) or value in ("true", "false"):
                return value in (True, "true")
        elif member in (int, float) and not isinstance(value, bool):
            try:
                number = member(value)
            except (TypeError, ValueError, OverflowError):
                continue
            if number == number and (not isinstance(value, float) or number == value):
                return number
        elif member is str and isinstance(value, str):
            return value
    wanted, _ = describe_hint(hint)
    raise UserError(f"{flag(name)} {value!r} is not valid: it takes {wanted}")
