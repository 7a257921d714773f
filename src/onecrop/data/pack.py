"""Decode image files once, into one uint8 memory map [N, 3, R, R] of squares with the true aspect ratio beside it.

A pack is addressed by the files it was made from (folder, names, sizes, times) and R: the second run on the same folder
starts at once, and a changed folder gets a new pack. Its fingerprint is that of the pixels.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from onecrop.data.images import ImageSet
from onecrop.errors import UserError
from onecrop.progress import Progress, duration

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
FORMAT = 1  # of the pack; a change of decoding or layout raises it


def cache_folder() -> Path:
    return Path(os.environ.get("ONECROP_CACHE") or Path.home() / ".cache" / "onecrop")


def list_images(folder: Path) -> list[Path]:
    """Image files below `folder`, sorted; hidden files and folders and links to folders are passed over."""
    found = []
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(base, n) for n in names if Path(n).suffix.lower() in SUFFIXES and not n.startswith(".")]
    return sorted(found)


def pack(
    name: str, root: Path, files: Sequence[Path], image_size: int, stored_size: int, skip_broken: bool
) -> ImageSet:
    """-> ImageSet over a memory map, without labels; `files` says what was kept."""
    folder = cache_folder() / _address(root, files, stored_size, skip_broken)
    try:
        return _open(name, folder, files, image_size)
    except (OSError, ValueError, KeyError):  # not there yet, or damaged
        shutil.rmtree(folder, ignore_errors=True)
    _write(folder, files, stored_size, skip_broken)
    return _open(name, folder, files, image_size)


def _open(name: str, folder: Path, files: Sequence[Path], image_size: int) -> ImageSet:
    facts = json.loads((folder / "pack.json").read_text())
    kept = facts["kept"]
    if len(kept) < len(files):
        print(f"{name}: {len(files) - len(kept)} unreadable images skipped, listed in {folder / 'broken.txt'}")
    shape = (len(kept), 3, facts["size"], facts["size"])
    # copy on write: torch wants writable memory
    images = np.memmap(folder / "images.bin", np.uint8, mode="c", shape=shape)
    aspect = np.array(facts["aspect"], np.float32)
    return ImageSet(
        name,
        images,
        aspect=aspect,
        image_size=image_size,
        files=tuple(str(files[i]) for i in kept),
        key=facts["pixels"],
    )


def _address(root: Path, files: Sequence[Path], stored_size: int, skip_broken: bool) -> str:
    digest = hashlib.blake2b(f"{FORMAT} {stored_size} {skip_broken}\n".encode(), digest_size=16)
    digest.update(os.fsencode(root.resolve()))
    for file in files:
        state = file.stat()
        digest.update(b"\0" + os.fsencode(file.relative_to(root)) + f"\0{state.st_size}\0{state.st_mtime_ns}".encode())
    return digest.hexdigest()


def _decode(file: Path, size: int) -> tuple[NDArray[np.uint8], float] | str:
    """-> (pixels [3, size, size], width / height), or why it cannot be read."""
    try:
        with Image.open(file) as image:
            image.draft("RGB", (size, size))  # JPEG only: decode at the nearest larger eighth
            upright = _to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # decoders fail in many ways, and none of them may end a night's work
        return str(error) or type(error).__name__
    aspect = upright.width / upright.height
    square = upright.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0)
    return np.asarray(square).transpose(2, 0, 1), aspect


def _to_rgb(image: Image.Image) -> Image.Image:
    """Eight bits a channel; deeper pictures are scaled, transparent ones laid on white."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image, np.float64)
        top = (
            65535.0 if image.mode.startswith("I") and values.max(initial=0) > 255 else max(values.max(initial=0), 1e-9)
        )
        image = Image.fromarray((np.clip(values / top, 0, 1) * 255 + 0.5).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        overlay = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), overlay)
    return image.convert("RGB")


def _write(folder: Path, files: Sequence[Path], size: int, skip_broken: bool) -> None:
    if not files:
        raise UserError("there are no images to pack")
    progress, temporary = Progress(), None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".part", dir=folder.parent))
        aspects: list[float] = []
        kept: list[int] = []
        broken: list[str] = []
        digest = hashlib.blake2b(digest_size=16)
        with ThreadPoolExecutor(os.cpu_count()) as pool, (temporary / "images.bin").open("wb") as out:
            for number, decoded in enumerate(pool.map(lambda file: _decode(file, size), files)):
                if isinstance(decoded, str):
                    if not skip_broken:
                        pool.shutdown(wait=False, cancel_futures=True)
                        raise UserError(
                            f"cannot read image {files[number]} ({decoded}): remove it, or pass --skip-broken true"
                        )
                    broken.append(f"{files[number]}\t{decoded}")
                    continue
                pixels = decoded[0].tobytes()
                out.write(pixels)
                digest.update(pixels)
                aspects.append(decoded[1])
                kept.append(number)
                left = duration(progress.remaining(number + 1, len(files)))
                progress.update(f"packing {number + 1:,} of {len(files):,} images, {left} left")
        if not kept:
            raise UserError(f"none of the {len(files)} images could be read; the first: {broken[0]}")
        if broken:
            (temporary / "broken.txt").write_text("\n".join(broken) + "\n", "utf-8", "surrogateescape")
        facts = {"size": size, "kept": kept, "aspect": aspects, "pixels": digest.hexdigest()}
        (temporary / "pack.json").write_text(json.dumps(facts))
        temporary.rename(folder)
    except OSError as error:
        if (folder / "pack.json").exists():  # another process packed the same files meanwhile
            return
        raise UserError(
            f"cannot write the pack {folder}: {error.strerror}; set ONECROP_CACHE to a disk with room"
        ) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
