"""Look through a folder or archive of images before anything is trained on it: what is there, broken, double."""

import hashlib
import io
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from onecrop.data.archives import ENDINGS, is_archive, list_archive
from onecrop.data.decode import Opener, Picture, decode
from onecrop.data.duplicates import Looks, Originals, look_at
from onecrop.data.listing import Listing, Skipped, list_folder
from onecrop.data.parallel import in_parallel
from onecrop.errors import UserError
from onecrop.progress import Progress, duration

THUMBNAIL = 64  # px: enough to compare by, and a JPEG is then decoded at a quarter or less, though still to its end


@dataclass
class Group:
    """Pictures that are one to a learner: the first in the order of names, and those that repeat it."""

    kept: str
    exact: list[str] = field(default_factory=list)  # byte for byte as an earlier one
    near: list[str] = field(default_factory=list)

    @property
    def pairs(self) -> int:
        count = 1 + len(self.exact) + len(self.near)
        return count * (count - 1) // 2


@dataclass
class Scan:
    listing: Listing
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    sizes: list[tuple[int, int]] = field(default_factory=list)  # width, height of each readable image
    image_bytes: int = 0
    broken: list[Skipped] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_images(self) -> int:
        return len(self.sizes)

    @property
    def num_repeats(self) -> int:
        return sum(len(group.exact) + len(group.near) for group in self.groups)

    def facts(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        width, height = np.array(self.sizes or [(0, 0)]).T
        exact, near = (sum(len(getattr(group, kind)) for group in self.groups) for kind in ("exact", "near"))
        return {
            "root": str(self.listing.root),
            "seconds": self.seconds,
            "images": self.num_images,
            "bytes": self.image_bytes,
            "formats": dict(self.formats.most_common()),
            "modes": dict(self.modes.most_common()),
            "width": _spread(width),
            "height": _spread(height),
            "aspect": _spread(width / np.maximum(height, 1)),
            "not_images": dict(Counter(Path(name).suffix.lower() or "(none)" for name in self.listing.others)),
            "broken": [skipped._asdict() for skipped in self.broken],
            "passed_over": [skipped._asdict() for skipped in self.listing.skipped],
            "groups": [{"kept": g.kept, "exact": g.exact, "near": g.near} for g in self.groups],
            "exact_duplicates": exact,
            "near_duplicates": near,
            "pairs_pushed_apart": sum(group.pairs for group in self.groups),
        }


def _spread(values: NDArray[Any]) -> dict[str, float]:
    least, median, most = np.percentile(values, (0, 50, 100))
    return {"least": round(least, 3), "median": round(median, 3), "most": round(most, 3)}


class _Seen(NamedTuple):
    size: tuple[int, int]
    format: str
    mode: str
    digest: bytes | None  # of the file, where another has its size


def list_pictures(root: Path) -> Listing:
    if root.is_dir():
        return list_folder(root)
    if is_archive(root):
        return list_archive(root)
    raise UserError(f"{root} is not a folder: give a folder or archive ({', '.join(ENDINGS)}) of images")


def scan(root: Path) -> Scan:
    """Every image is decoded to its end, on all cores; nothing is written."""
    started = time.monotonic()
    found = Scan(list_pictures(root))
    entries, originals, progress = found.listing.entries, Originals(), Progress()
    groups: list[Group] = []  # of each original
    digests = set[bytes]()
    done = 0
    for seen, looks in in_parallel(_look, _jobs(found.listing)):
        repeated = iter(originals.add(looks))
        for entry, one in zip(entries[done : done + len(seen)], seen, strict=True):
            if isinstance(one, str):
                found.broken.append(Skipped(entry.name, one))
                continue
            found.formats[one.format] += 1
            found.modes[one.mode] += 1
            found.sizes.append(one.size)
            found.image_bytes += entry.size
            original = next(repeated)
            if original is None:
                groups.append(Group(entry.name))
            else:
                (groups[original].exact if one.digest in digests else groups[original].near).append(entry.name)
            if one.digest is not None:
                digests.add(one.digest)
        done += len(seen)
        left = duration(progress.remaining(done, len(entries)))
        progress.update(f"scanning {done:,} of {len(entries):,} images, {left} left")
    progress.clear()
    found.groups = [group for group in groups if group.pairs]
    found.seconds = time.monotonic() - started
    return found


def _jobs(listing: Listing) -> Iterator[tuple[Opener, bool]]:
    """How to open each file, and whether to hash it: one whose size no other has is no copy."""
    sizes = Counter(entry.size for entry in listing.entries)
    for entry, opener in zip(listing.entries, listing.openers(listing.entries), strict=True):
        yield opener, sizes[entry.size] > 1


def _look(jobs: list[tuple[Opener, bool]]) -> tuple[list[_Seen | str], Looks]:
    """What each file is, or why it cannot be read, and the looks of those that can."""
    seen: list[_Seen | str] = []
    squares = []
    for opener, hashed in jobs:
        picture = decode(opener, THUMBNAIL)
        if isinstance(picture, str):
            seen.append(picture)
        else:
            size = (picture.width, picture.height)
            seen.append(_Seen(size, picture.format, picture.mode, _digest(opener) if hashed else None))
            squares.append(picture.square)
    return seen, look_at(squares)


def _digest(opener: Opener) -> bytes | None:
    try:
        with opener() as file:
            return hashlib.file_digest(cast(io.BytesIO, file), "blake2b").digest()
    except OSError:  # gone since it was decoded: no copy of it either
        return None


def thumbnails(listing: Listing, names: set[str], size: int) -> dict[str, NDArray[np.uint8]]:
    """Name -> [height, width, 3] in true proportions, its longer side `size`; for those that can be read."""
    entries = [entry for entry in listing.entries if entry.name in names]
    tasks = in_parallel(lambda openers: [decode(opener, size) for opener in openers], listing.openers(entries))
    found = {}
    for entry, picture in zip(entries, chain.from_iterable(tasks), strict=True):
        if isinstance(picture, Picture):
            longer = max(picture.width, picture.height)
            shape = max(1, size * picture.width // longer), max(1, size * picture.height // longer)
            found[entry.name] = np.asarray(picture.square.resize(shape))
    return found
