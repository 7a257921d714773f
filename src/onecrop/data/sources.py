"""Where images come from: the named sets, and any folder. A new set is one function and one line in SOURCES."""

import posixpath
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onecrop.data.archives import ENDINGS, is_archive, list_archive
from onecrop.data.cifar import cifar
from onecrop.data.images import ImageSet, subset_index
from onecrop.data.listing import Entry, Listing, list_folder
from onecrop.data.pack import PackSettings, pack
from onecrop.data.shapes import shapes
from onecrop.draws import fold
from onecrop.errors import UserError, from_extra, unknown
from onecrop.files import printable

FOLDERS = {"tiny-imagenet": "tiny-imagenet-200", "imagenet": "imagenet"}  # in --data-dir, with train/ and val/ in them
TEST_SHARE = 0.2  # of a labelled folder that has no test part of its own


@dataclass(frozen=True)
class Request:
    """How a data set is wanted; the fields are the recipe's."""

    data_dir: str = "data"
    image_size: int | None = None
    subset: int | None = None  # so many training images, at random
    holdout: int = 0  # so many training images, always the same ones, serve as the test part
    seed: int = 0
    drop_duplicates: bool = False  # keep one of several that look alike


def load(name: str, split: str = "train", request: Request | None = None) -> ImageSet:
    """A named set, a folder or an archive -> its "train" or "test" part, or "all" of a folder or archive."""
    request = request or Request()
    if request.holdout:
        return _held_out(name, split, request)
    if name in SOURCES:
        images = SOURCES[name](split, request)
    elif name and Path(name).is_dir():  # an empty one is not the folder we are in
        images = _folder(split, Path(name), request)
    elif is_archive(Path(name)):
        images = _archive(split, Path(name), request)
    elif "/" in name or Path(name).exists():
        raise UserError(
            f"{name or 'an empty name'} is not a folder: give a folder or archive ({', '.join(ENDINGS)}) of images, "
            f"or one of {', '.join(SOURCES)}"
        )
    else:
        raise unknown("data set (and no such folder)", name, SOURCES)
    return replace(images, name=name)  # as it was asked for: result rows are matched by it


def pretrained_on(facts: dict[str, Any]) -> str:
    """The data that a backbone's file names as its own."""
    data = str(facts["data"])
    if data not in SOURCES and not Path(data).exists():
        raise UserError(f"{data}, which this backbone was pretrained on, is not there: name its images with --data")
    return data


def _held_out(name: str, split: str, request: Request) -> ImageSet:
    """The training part in two: settings are chosen on what nobody learned from, and the test part stays unseen."""
    whole = load(name, "train", replace(request, holdout=0, subset=None))
    if request.holdout >= len(whole):
        raise UserError(f"--holdout {request.holdout} leaves none of the {len(whole)} images of {name} to learn from")
    aside = np.zeros(len(whole), bool)
    aside[subset_index(len(whole), request.holdout, seed=0)] = True
    return _in_memory(whole.take(np.flatnonzero(aside if split == "test" else ~aside)), split, request)


class Labelled(NamedTuple):
    """What an evaluation needs."""

    train: ImageSet
    test: ImageSet
    split: str  # how the two were parted


def load_labelled(name: str, request: Request) -> Labelled:
    """A folder of classes without a test part gives up a fifth of each class."""
    whole = replace(request, subset=None)
    train = load(name, "train", whole)
    train.need_labels()
    if request.holdout or has_test_part(name):
        test = load(name, "test", whole)
        test.need_labels()
        if test.classes != train.classes:
            raise UserError(f"{name}: the test part has other classes than the training part")
        official = "official" if name in SOURCES else "folders"
        return Labelled(train, test, f"{request.holdout} training images held out" if request.holdout else official)
    return hold_out(train)


def hold_out(whole: ImageSet) -> Labelled:
    """TEST_SHARE of each class aside, at least one image, always the same ones."""
    labels, aside = whole.need_labels(), np.zeros(len(whole), bool)
    for number, label in enumerate(whole.classes):
        members = np.random.default_rng(fold("held out", number)).permutation(np.flatnonzero(labels == number))
        if len(members) < 2:
            count = "one image" if len(members) else "no image that can be read"
            raise UserError(f"{whole.name}: label {label} has {count}, and two are needed: one to learn, one to test")
        aside[members[: max(1, round(TEST_SHARE * len(members)))]] = True
    parts = whole.take(np.flatnonzero(~aside)), whole.take(np.flatnonzero(aside))
    # pretraining on this folder sees all of it, without labels; the row must not hide that
    return Labelled(*parts, f"{TEST_SHARE:.0%} of each class held out of the labels")


def _in_memory(images: ImageSet, split: str, request: Request) -> ImageSet:
    if request.subset is None or split != "train":
        return images
    return images.take(subset_index(len(images), request.subset, request.seed))


def _shapes(split: str, request: Request) -> ImageSet:
    """procedural pictures of 10 classes, endless: --subset says how many, --image-size how large"""
    size = request.image_size or 32
    if split == "train":
        return shapes(request.subset or 4000, size, seed=0)
    return shapes(1000, size, seed=1)


def _digits(split: str, request: Request) -> ImageSet:
    """1,797 handwritten digits of 8 px; every fifth is for testing"""
    data = from_extra("sklearn.datasets", "digits", "the data set digits comes with scikit-learn").load_digits()
    grey = np.round(data.images * (255 / 16)).astype(np.uint8)
    images = np.ascontiguousarray(np.broadcast_to(grey[:, None], (len(grey), 3, 8, 8)))
    test = np.arange(len(images)) % 5 == 4
    whole = ImageSet("digits", images, data.target.astype(np.int64), tuple("0123456789"), image_size=32)
    return _in_memory(whole.take(np.flatnonzero(test if split == "test" else ~test)), split, request)


def _cifar10(split: str, request: Request) -> ImageSet:
    """60,000 photographs of 32 px, 10 classes"""
    return _in_memory(cifar("cifar10", split, Path(request.data_dir)), split, request)


def _cifar100(split: str, request: Request) -> ImageSet:
    """60,000 photographs of 32 px, 100 classes"""
    return _in_memory(cifar("cifar100", split, Path(request.data_dir)), split, request)


def _tiny_imagenet(split: str, request: Request) -> ImageSet:
    """110,000 photographs of 64 px, 200 classes"""
    root = Path(request.data_dir) / FOLDERS["tiny-imagenet"]
    if not root.is_dir():
        _download_tiny_imagenet(Path(request.data_dir))
    try:
        wnids = tuple((root / "wnids.txt").read_text().split())
        table = (root / "val" / "val_annotations.txt").read_text().splitlines()
        wnid_of = dict(line.split("\t")[:2] for line in table)
    except OSError as error:
        raise UserError(f"tiny-imagenet is incomplete: cannot read {error.filename}; fetch it again") from None
    except ValueError:  # no text, or no tabs in it
        raise UserError(f"tiny-imagenet is damaged: its lists in {root} cannot be read; fetch it again") from None
    listing = list_folder(root / ("train" if split == "train" else "val/images"))
    if split == "train":
        names = [entry.name.partition("/")[0] for entry in listing.entries]
    else:
        missing = wnid_of.keys() - {entry.name for entry in listing.entries}
        if missing:
            raise UserError(f"tiny-imagenet: {listing.root / min(missing)} is listed but not there; fetch it again")
        names = [wnid_of.get(entry.name, "") for entry in listing.entries]
    if not listing.entries:
        raise UserError(f"tiny-imagenet is incomplete: no images of its {split} part below {root}; fetch it again")
    return _packed("tiny-imagenet", split, listing, names, wnids, 64, 64, request)


def _download_tiny_imagenet(data_dir: Path) -> None:
    from torchvision.datasets.utils import download_and_extract_archive

    try:
        download_and_extract_archive("http://cs231n.stanford.edu/tiny-imagenet-200.zip", str(data_dir))
    except Exception as error:
        raise UserError(
            f"tiny-imagenet is not in {data_dir} and cannot be downloaded ({error}): "
            f"put the unpacked folder {FOLDERS['tiny-imagenet']} there, or name another --data-dir"
        ) from None


def _imagenet(split: str, request: Request) -> ImageSet:
    """1.28 million photographs, 1,000 classes; --subset 10000 and 100000 are the paper's IN-10k and IN-100k"""
    part = Path(request.data_dir) / FOLDERS["imagenet"] / ("train" if split == "train" else "val")
    if not part.is_dir():
        raise UserError(
            f"imagenet cannot be downloaded: put its images as {part}/<wnid>/<image>.JPEG, or name another --data-dir"
        )
    return _class_folders("imagenet", split, list_folder(part), request)


SOURCES: dict[str, Callable[[str, Request], ImageSet]] = {
    "shapes": _shapes,
    "digits": _digits,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "tiny-imagenet": _tiny_imagenet,
    "imagenet": _imagenet,
}


TEST_NAMES = ("test", "val", "valid", "validation")


def _are_parts(folders: Set[str]) -> bool:
    """A training part, one or more to test on, and nothing else."""
    return "train" in folders and len(folders) > 1 and folders <= {"train", *TEST_NAMES}


def _split_folders(root: Path) -> dict[str, Path]:
    """{"train": folder, "test": folder} where `root` is laid out so: train/ and test parts, and no other folder."""
    folders = {entry.name: entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    if not _are_parts(folders.keys()):
        return {}
    # test parts are often handed out without labels: take one whose images lie in class folders, if there is one
    tests = [folders[name] for name in TEST_NAMES if name in folders]
    labelled = [part for part in tests if any(entry.is_dir() for entry in part.iterdir())]
    return {"train": folders["train"], "test": (labelled or tests)[0]}


def has_test_part(name: str) -> bool:
    return name in SOURCES or (Path(name).is_dir() and bool(_split_folders(Path(name))))


def _folder(split: str, root: Path, request: Request) -> ImageSet:
    parts = _split_folders(root)
    if split == "test" and not parts:
        raise UserError(f"{root} has no test part: sort it into {root}/train and {root}/test")
    return _class_folders(str(root), split, list_folder(parts.get(split, root)), request)


def _archive(split: str, path: Path, request: Request) -> ImageSet:
    if split == "test":
        raise UserError(f"{path} has no test part: unpack it and sort it into train and test folders")
    return _class_folders(str(path), split, list_archive(path), request)


def stored_size(image_size: int) -> int:
    """256 for 224: room for the evaluation's central crop."""
    return -(-image_size * 8 // 7)


def _class_folders(name: str, split: str, listing: Listing, request: Request) -> ImageSet:
    """Labels are the outermost folders, where every image lies in one and there are two or more."""
    if not listing.entries:
        where = f"no images found below {listing.root}"
        if listing.skipped:
            raise UserError(f"{where}: {_passed_over(listing)}")
        raise UserError(f"{where}: {listing.unread() or 'give a folder that holds .jpg, .png or other image files'}")
    shared = _shared_folder(listing) if listing.root.is_file() else ""  # archives often hold one folder with all in it
    below = [entry.name[len(shared) :].partition("/") for entry in listing.entries]
    names = [folder if slash else "" for folder, slash, _ in below]
    classes = tuple(sorted(set(names)))
    if "" in classes or len(classes) < 2 or _are_parts(set(names)):
        names, classes = [], ()
    size = request.image_size or 224
    return _packed(name, split, listing, names, classes, size, stored_size(size), request)


def _shared_folder(listing: Listing) -> str:
    """The innermost "folder/" that holds all images."""
    shared = posixpath.commonpath([posixpath.dirname(entry.name) for entry in listing.entries])
    return shared + "/" if shared else ""


def _passed_over(listing: Listing) -> str:
    name, reason = listing.skipped[0]
    others = f" and {len(listing.skipped) - 1:,} more" if len(listing.skipped) > 1 else ""
    return f"{printable(name)} ({reason}){others} passed over; `onecrop scan` lists them all"


def _packed(
    name: str,
    split: str,
    listing: Listing,
    names: list[str],
    classes: tuple[str, ...],
    size: int,
    stored: int,
    request: Request,
) -> ImageSet:
    entries: Sequence[Entry] = listing.entries
    if request.subset is not None and split == "train":
        chosen = subset_index(len(entries), request.subset, request.seed)
        entries, names = [entries[i] for i in chosen], [names[i] for i in chosen] if names else []
    number = {label: i for i, label in enumerate(classes)}
    unknown_class = next((label for label in names if label not in number), None)
    if unknown_class is not None:
        raise UserError(f"{name}: {unknown_class} is not one of its {len(classes)} classes")
    if listing.skipped:
        print(f"{name}: {_passed_over(listing)}", flush=True)
    if unread := listing.unread():
        print(f"{name}: {unread}", flush=True)
    drop = request.drop_duplicates and split == "train"
    images, kept = pack(name, listing, entries, PackSettings(stored, drop))
    labels = np.array([number[names[i]] for i in kept], np.int64) if names else None
    return replace(images, image_size=size, labels=labels, classes=classes)
