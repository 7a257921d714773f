"""Scan and pack against the machine's limit: decoding and antialiased resizing alone, on all cores, in the same run.

    python benchmarks/pack.py FOLDER [--images 2000] [--rounds 3] [--json docs/benchmarks/pack.json]

The limit is what processes reach that do nothing but decode, resize and forget, one a core; they take turns with scan
and pack on the same files, so that all see the same machine and the same warm file cache. Each figure is the best of
the rounds, the limit's too: other work on the machine only ever slows. CPU time says the same on a busy machine.
"""

import argparse
import json
import os
import tempfile
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from PIL import Image, ImageOps

from onecrop.data import load
from onecrop.data.scan import THUMBNAIL, scan
from onecrop.data.sources import Request, stored_size

SHARE = 64  # files handed to a process at a time


def decode_and_forget(job):
    """As one would write it: open, upright, RGB, resize with an antialiasing filter. -> CPU seconds"""
    files, size = job
    started = time.process_time()
    for file in files:
        with Image.open(file) as image:
            image.draft("RGB", (size, size))
            upright = ImageOps.exif_transpose(image).convert("RGB")
            upright.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0)
    return time.process_time() - started


def limit(pool, files, size):
    jobs = [(files[i : i + SHARE], size) for i in range(0, len(files), SHARE)]
    started = time.monotonic()
    used = sum(pool.map(decode_and_forget, jobs, chunksize=1))
    return len(files) / (time.monotonic() - started), 1000 * used / len(files)


def measured(count, function):
    """-> images/s, CPU milliseconds an image over all threads"""
    started, before = time.monotonic(), time.process_time()
    function()
    return count / (time.monotonic() - started), 1000 * (time.process_time() - before) / count


def pack(folder, image_size, drop_duplicates):
    with tempfile.TemporaryDirectory() as cache:
        os.environ["ONECROP_CACHE"] = cache
        load(str(folder), request=Request(image_size=image_size, drop_duplicates=drop_duplicates))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    values = parser.parse_args()
    files = sorted(path for path in values.folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[
        : values.images
    ]
    side = stored_size(values.image_size)
    rates = {name: [] for name in ("limit of scan", "scan", "limit of pack", "pack", "pack without duplicates")}
    with (
        tempfile.TemporaryDirectory(dir=values.folder.parent) as few,
        get_context("fork").Pool(os.cpu_count()) as pool,
    ):
        folder = Path(few)
        for number, file in enumerate(files):
            os.link(file, folder / f"{number}.jpg")
        linked = sorted(folder.iterdir())
        limit(pool, linked, side)  # warms the file cache
        count = len(linked)
        for _ in range(values.rounds):
            rates["limit of scan"].append(limit(pool, linked, THUMBNAIL))
            rates["scan"].append(measured(count, partial(scan, folder)))
            rates["limit of pack"].append(limit(pool, linked, side))
            rates["pack"].append(measured(count, partial(pack, folder, values.image_size, False)))
            rates["pack without duplicates"].append(measured(count, partial(pack, folder, values.image_size, True)))
    result = {
        name: {"images_per_second": round(max(r for r, _ in rounds)), "cpu_ms": round(min(c for _, c in rounds), 3)}
        for name, rounds in rates.items()
    }
    for name, row in result.items():
        reference = result["limit of scan" if "scan" in name else "limit of pack"]
        rate, cpu = row["images_per_second"] / reference["images_per_second"], reference["cpu_ms"] / row["cpu_ms"]
        shown = (
            f"{row['images_per_second']:>6,} images/s {rate:>5.0%}   {row['cpu_ms']:.2f} ms of CPU an image {cpu:>5.0%}"
        )
        print(f"{name:<24} {shown}")
    if values.json:
        facts = {"images": count, "stored_size": side, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        values.json.write_text(json.dumps({**facts, "best": result, "rounds": rates}, indent=2) + "\n")


if __name__ == "__main__":
    main()
