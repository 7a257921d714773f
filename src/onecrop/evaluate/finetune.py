"""Few labels: a linear probe, and all weights fine-tuned against the same network trained from scratch.

Fine-tuning and training from scratch are one function with one budget; they differ in where the weights start.
"""

import copy
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from onecrop.data import ImageSet
from onecrop.data.sources import Labelled, Request
from onecrop.device import choose_device, seed_step, tune
from onecrop.draws import draws, fold, shuffled
from onecrop.errors import UserError, not_fatal
from onecrop.evaluate.features import Probe, extract, labels_on, random_view, short_on_a_gpu
from onecrop.evaluate.labels import load_with_labels
from onecrop.evaluate.linear import linear_fast, new_classifier, score
from onecrop.files import append_json_line, read_json_lines, sha256_of
from onecrop.nets import load_backbone, read_backbone
from onecrop.nets.backbones import adopt, backbone_file, untrained_like
from onecrop.optim import cosine
from onecrop.progress import Progress, duration

FILE = "finetune.jsonl"  # in the run folder: one row as soon as it is known
PROBE, TUNED, SCRATCH = "linear probe", "fine-tuned", "from scratch"
CROP_SCALE = 0.2
WEIGHT_DECAY = 0.05


class Budget(NamedTuple):
    """How long and how fast weights are trained, wherever they start."""

    epochs: int = 50
    batch_size: int = 64
    lr: float = 1e-3
    least_steps: int = 200  # of the smallest shares an epoch is a step or two

    def steps(self, num_images: int) -> int:
        return max(self.least_steps, self.epochs * (num_images // self.batch(num_images)))

    def batch(self, num_images: int) -> int:
        return min(self.batch_size, num_images)

    def protocol(self, num_images: int) -> str:
        return (
            f"all weights, AdamW lr {self.lr:g} wd {WEIGHT_DECAY}, cosine, batch {self.batch(num_images)}, "
            f"{self.steps(num_images)} steps, crops from {CROP_SCALE} and flips, last step"
        )


def finetune(
    run: Path | str,
    data: str,
    *,
    shares: Sequence[float] = (0.01, 0.1, 1.0),
    budget: Budget | None = None,
    data_dir: str = "data",
    device: str = "auto",
    seed: int = 0,
    backbone: nn.Module | None = None,
) -> list[dict[str, Any]]:
    """Every share with each of the three ways to use it -> rows, those that are in the run folder already included.

    backbone: the module that the run was given, where it came from Python; it stays as it is.
    """
    budget = budget or Budget()
    _check(shares, budget)
    _, facts = read_backbone(run)
    if backbone is not None:
        backbone = adopt(backbone, facts["image_size"])  # a copy that knows how long its features are
    pretrained = load_backbone(run, into=copy.deepcopy(backbone))
    folder, digest = backbone_file(run).parent, sha256_of(backbone_file(run))
    probe = Probe(facts["image_size"], choose_device(device), seed)
    tune(probe.device)
    sets = load_with_labels(data, Request(data_dir, facts["image_size"]))
    done = {_key(row): row for row in read_json_lines(folder / FILE)}
    rows = []
    for share in shares:
        train = sets.train.take(labelled_share(sets.train, share, seed))
        for way in (PROBE, TUNED, SCRATCH):
            row: dict[str, Any] = {
                "of": way,
                "share": share,
                "num_labels": len(train),
                "data": data,
                "split": sets.split,
                "num_test": len(sets.test),
                "num_classes": len(train.classes),
                "seed": seed,
                "budget": "linear-fast" if way == PROBE else budget.protocol(len(train)),
                "fingerprint": train.fingerprint + sets.test.fingerprint,
                "pretraining": facts,
                "backbone": digest,  # a folder may hold several
            }
            if _key(row) not in done:
                start = untrained_like(run, fold(seed, "scratch"), backbone) if way == SCRATCH else pretrained
                row |= _measure(way, start, Labelled(train, sets.test, sets.split), probe, budget)
                with not_fatal():
                    append_json_line(folder / FILE, row)
            rows.append(done.get(_key(row), row))
    return rows


def _check(shares: Sequence[float], budget: Budget) -> None:
    wrong = next((share for share in shares if not 0 < share <= 1), None)
    if wrong is not None or not shares:
        raise UserError(f"--shares {wrong if shares else ''} is out of range: shares are above 0 and at most 1")
    if budget.epochs < 1 or budget.batch_size < 2 or not 0 < budget.lr < float("inf"):
        raise UserError("--epochs takes 1 or more, --batch-size 2 or more, --lr a number above 0")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Rows that agree in these need not be measured twice."""
    return tuple(row.get(name) for name in ("of", "share", "data", "seed", "budget", "fingerprint", "backbone"))


def labelled_share(images: ImageSet, share: float, seed: int) -> NDArray[np.int64]:
    """The same share of every class, at least one image of each; a smaller share is part of a larger one."""
    labels, parts = images.need_labels(), []
    for label in range(len(images.classes)):
        members = np.random.default_rng(fold(seed, "share", label)).permutation(np.flatnonzero(labels == label))
        parts.append(members[: max(1, round(share * len(members)))])
    return np.sort(np.concatenate(parts))


def _measure(way: str, start: nn.Module, sets: Labelled, probe: Probe, budget: Budget) -> dict[str, Any]:
    begun = time.monotonic()
    if way == PROBE:
        row = linear_fast(start.to(probe.device), sets.train, sets.test, probe)
    else:
        row = train_all(start, sets, probe, budget)
    return {
        **row,
        "seconds": time.monotonic() - begun,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def train_all(start: nn.Module, sets: Labelled, probe: Probe, budget: Budget) -> dict[str, Any]:
    """Train a copy of the network with a linear classifier on it -> accuracy after the last step, and the protocol."""
    train, count = sets.train, len(sets.train)
    net = copy.deepcopy(start).to(probe.device, memory_format=torch.channels_last).requires_grad_(True).train()  # type: ignore[call-overload]
    classifier = new_classifier(int(start.dim), len(train.classes), probe)  # type: ignore[arg-type]
    parameters = [*net.parameters(), *classifier.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=budget.lr, weight_decay=WEIGHT_DECAY)
    labels, aspect = labels_on(train, probe.device), torch.from_numpy(train.true_aspect).to(probe.device)
    batch, steps, progress = budget.batch(count), budget.steps(count), Progress()
    for step in range(steps):
        epoch, place = divmod(step, count // batch)
        if place == 0:
            order = shuffled(count, fold(probe.seed, "fine-tune", epoch), "cpu")
        index = order[place * batch : (place + 1) * batch]
        pixels = torch.from_numpy(np.ascontiguousarray(train.images[index.numpy()])).to(probe.device)
        index = index.to(probe.device)
        draw = draws(fold(probe.seed, "fine-tune view", step), batch, probe.device)
        x = random_view(pixels, aspect[index], probe.image_size, draw, CROP_SCALE)
        for group in optimizer.param_groups:
            group["lr"] = budget.lr * cosine(step, steps)
        seed_step(probe.seed, step)  # for layers that draw
        with short_on_a_gpu(x):
            logits = classifier(net(x.contiguous(memory_format=torch.channels_last)))
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(logits.float(), labels[index]).backward()
        optimizer.step()
        left = duration(progress.remaining(step + 1, steps))
        progress.update(f"{count} labels: step {step + 1}/{steps}, {left} left")
    progress.clear()
    features = extract(net.eval(), sets.test, probe)
    return {"accuracy": score(classifier, features, sets.test, probe), "protocol": budget.protocol(count)}
