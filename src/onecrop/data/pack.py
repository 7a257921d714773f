"""Decode image files once, into one uint8 memory map [N, 3, R, R] of squares with the true aspect ratio beside it.

A pack is addressed by what it was made from (names, sizes and times of the files, and R): the second run on the same
files starts at once, and a changed folder gets a new pack.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from onecrop.data.images import ImageSet
from onecrop.errors import UserError
from onecrop.progress import Progress, duration

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


def cache_folder() -> Path:
    return Path(os.environ.get("ONECROP_CACHE") or Path.home() / ".cache" / "onecrop")


def list_images(folder: Path) -> list[Path]:
    """Image files below `folder`, sorted; links to folders are not followed."""
    return sorted(
        Path(base, name)
        for base, _, names in os.walk(folder)
        for name in names
        if Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")
    )


def pack(
    name: str, root: Path, files: Sequence[Path], image_size: int, stored_size: int, skip_broken: bool
) -> ImageSet:
    """-> ImageSet over a memory map, without labels; `files` says what was kept."""
    key = _fingerprint(root, files, stored_size, skip_broken)
    folder = cache_folder() / key
    if not (folder / "kept.json").exists():
        _write(folder, files, stored_size, skip_broken)
    kept = json.loads((folder / "kept.json").read_text())
    broken = len(files) - len(kept)
    if broken:
        print(f"{name}: {broken} unreadable images skipped, listed in {folder / 'broken.txt'}")
    return ImageSet(
        name,
        np.load(folder / "images.npy", mmap_mode="c"),  # copy on write: torch wants writable memory
        aspect=np.load(folder / "aspect.npy"),
        image_size=image_size,
        files=tuple(str(files[i]) for i in kept),
        key=key,
    )


def _fingerprint(root: Path, files: Sequence[Path], stored_size: int, skip_broken: bool) -> str:
    digest = hashlib.blake2b(f"{stored_size} {skip_broken}".encode(), digest_size=16)
    for file in files:
        state = file.stat()
        digest.update(
            f"{file.relative_to(root)}\0{state.st_size}\0{state.st_mtime_ns}\n".encode(errors="surrogateescape")
        )
    return digest.hexdigest()


def _decode(file: Path, size: int) -> tuple[NDArray[np.uint8], float] | str:
    """-> (pixels [3, size, size], width / height), or why it cannot be read."""
    try:
        with Image.open(file) as image:
            image.draft("RGB", (size, size))  # JPEG only: decode at the nearest larger eighth
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, ValueError, SyntaxError) as error:
        return str(error)
    aspect = upright.width / upright.height
    square = upright.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0)
    return np.asarray(square).transpose(2, 0, 1), aspect


def _write(folder: Path, files: Sequence[Path], size: int, skip_broken: bool) -> None:
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    progress = Progress()
    try:
        temporary.mkdir(parents=True)
        shape = (len(files), 3, size, size)
        images = np.lib.format.open_memmap(temporary / "images.npy", mode="w+", dtype=np.uint8, shape=shape)
        aspects: list[float] = []
        kept: list[int] = []
        broken: list[str] = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for number, decoded in enumerate(pool.map(lambda file: _decode(file, size), files)):
                if isinstance(decoded, str):
                    if not skip_broken:
                        pool.shutdown(cancel_futures=True)
                        raise UserError(
                            f"cannot read image {files[number]} ({decoded}): remove it, or pass --skip-broken true"
                        )
                    broken.append(f"{files[number]}\t{decoded}")
                    continue
                images[len(kept)] = decoded[0]
                aspects.append(decoded[1])
                kept.append(number)
                left = duration(progress.remaining(number + 1, len(files)))
                progress.update(f"packing {number + 1:,} of {len(files):,} images, {left} left")
        if not kept:
            raise UserError(f"none of the {len(files)} images could be read; the first: {broken[0]}")
        if broken:
            (temporary / "broken.txt").write_text("\n".join(broken) + "\n", errors="surrogateescape")
            np.save(temporary / "images.npy", images[: len(kept)].copy())
        else:
            images.flush()
        np.save(temporary / "aspect.npy", np.array(aspects, np.float32))
        (temporary / "kept.json").write_text(json.dumps(kept))
        temporary.rename(folder)
    except OSError as error:
        if folder.exists():  # another process packed the same files meanwhile
            return
        raise UserError(
            f"cannot write the pack {folder}: {error.strerror}; set ONECROP_CACHE to a disk with room"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
