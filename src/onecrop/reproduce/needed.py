"""The data that a plan needs: what is there, how many images, and how to get what is missing."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from onecrop.data import SOURCES, load
from onecrop.data.archives import is_archive
from onecrop.data.scan import list_pictures
from onecrop.data.sources import FOLDERS, Request
from onecrop.detect.recipe import DetectRecipe
from onecrop.detect.train import load_sets
from onecrop.detect.weights import NETS
from onecrop.errors import UserError
from onecrop.reproduce.measure import probe_of
from onecrop.reproduce.options import Options
from onecrop.reproduce.plan import DETECTION, Step, detection_folder, detection_recipe
from onecrop.reproduce.tables import Measure

OWN = ("hours", "memory", "instances")  # what every run says of itself, whatever else is measured on it
# training images of a data set; of a detection set the pictures it is tested on
OFFICIAL = {"cifar10": 50_000, "cifar100": 50_000, "tiny-imagenet": 100_000, "imagenet": 1_281_167}
OFFICIAL |= {"voc07": 4952, "voc0712": 4952, "coco": 5000}
TESTED = {"tiny-imagenet": 10_000, "imagenet": 50_000}  # where it is not a fifth of the training images


class DataThere(NamedTuple):
    counts: dict[str, int]  # data set -> images, as in OFFICIAL
    missing: dict[str, str]  # data set -> how to get it

    def size(self, data: str) -> int | None:
        """As it is here, or else the official one: hours may be known before the data is there."""
        return self.counts.get(data) or OFFICIAL.get(data)

    def tested(self, data: str) -> int:
        """Images that a probe is scored on, roughly."""
        fifth = (self.size(data) or 0) // 5
        return min(fifth, TESTED.get(data, fifth))


def look_for_data(steps: Sequence[Step], options: Options) -> DataThere:
    """What the plan needs, before anything starts. Sets that can be downloaded are, now."""
    there = DataThere({}, {})
    for data in sorted(set[str]().union(*(data_of(step) for step in steps))):
        try:
            count = count_tested(data, options) if data in DETECTION else count_images(data, options.data_dir)
            there.counts[data] = count
        except UserError as error:
            there.missing[data] = str(error)
    return there


def possible(step: Step, there: DataThere) -> Step:
    """The step with what can be measured by the data that is there: nothing, where the run itself has none."""
    left = [what for what in step.measures if not _data_for(what, step) & there.missing.keys()]
    only_own = len(left) < len(step.measures) and all(what.kind in OWN for what in left)
    if only_own or _own_data(step) & there.missing.keys():  # nobody trains to know the hours alone
        left = []
    return step._replace(measures=tuple(left))


def data_of(step: Step) -> set[str]:
    """Data sets that a step still needs: none where there is nothing left to measure."""
    return _own_data(step).union(*(_data_for(what, step) for what in step.measures))


def _own_data(step: Step) -> set[str]:
    return {step.recipe.data} if step.recipe is not None and step.measures and not step.is_finished else set()


def _data_for(what: Measure, step: Step) -> set[str]:
    if what.kind in DETECTION:
        return {what.kind}
    return {step.options.stand_in(what.what)} if probe_of(what, step.options) else set()


def count_images(data: str, data_dir: str) -> int:
    """Images of the training part, without decoding folders."""
    root = Path(data_dir) / FOLDERS[data] / "train" if data in FOLDERS else Path(data)
    if data in SOURCES and not (data in FOLDERS and root.is_dir()):
        return len(load(data, "train", Request(data_dir)))  # small, or to be downloaded, or it says how to get it
    if root.is_dir() or is_archive(root):
        parts = (root / "train", root)
        return len(list_pictures(next(part for part in parts if part.exists())).entries)
    return len(load(data, "train", Request(data_dir)))  # which says what is wrong with the name


def need_detection(steps: Sequence[Step]) -> None:
    """Read what detectors are trained and tested on, and look at their networks, before anything is pretrained."""
    seen = set[str]()
    for step in steps:
        for kind in dict.fromkeys(what.kind for what in step.measures if what.kind in DETECTION):
            backbone = step.options.stand_in(step.training.backbone)
            if backbone not in NETS:
                raise UserError(f"detection takes {' or '.join(NETS)}, not {backbone}: drop that --use")
            if kind not in seen:
                load_sets(detection_recipe(step, kind).resolved())
                seen.add(kind)


def count_tested(kind: str, options: Options) -> int:
    """Pictures of the test part of a detection set whose lists are there: what is wrong with them, the run says."""
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
    if gone is not None:
        raise UserError(f"{gone} is not there: {remedy}")
    if kind == "coco":
        return len(list((folder / str(recipe.test_part)).glob("*")))
    return len(needed[-1].read_bytes().splitlines())
