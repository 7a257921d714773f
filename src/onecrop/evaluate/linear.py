"""Linear probes on frozen features. The last epoch is reported, never the best one."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecrop.data import ImageSet
from onecrop.draws import fold, shuffled
from onecrop.evaluate.features import Probe, extract, labels_on
from onecrop.optim import cosine
from onecrop.progress import Progress, duration


def linear(
    backbone: nn.Module, train: ImageSet, test: ImageSet, probe: Probe, epochs: int = 100, batch_size: int = 256
) -> dict[str, Any]:
    """The paper authors' protocol: SGD lr 30, ×.1 at 60 % and 80 % of 100 epochs, fresh crops and flips every epoch."""
    labels = labels_on(train, probe.device)
    batch_size = min(batch_size, len(train))
    milestones = [round(0.6 * epochs), round(0.8 * epochs)]
    classifier: nn.Linear | None = None
    progress = Progress()
    for epoch in range(epochs):
        # The backbone is frozen: the epoch's crops go through it in large batches, the classifier's steps come after.
        z = extract(backbone, train, probe, view=epoch, crop_scale=0.08)
        if classifier is None:
            classifier = new_classifier(z.shape[1], len(train.classes), probe)
            optimizer = torch.optim.SGD(classifier.parameters(), lr=30.0, momentum=0.9, weight_decay=0.0)
        for group in optimizer.param_groups:
            group["lr"] = 30.0 * 0.1 ** sum(epoch >= m for m in milestones)
        order = shuffled(len(z), fold(probe.seed, "linear", epoch), probe.device)
        for index in order[: len(z) // batch_size * batch_size].view(-1, batch_size):
            _descend(classifier, optimizer, z[index], labels[index])
        left = duration(progress.remaining(epoch + 1, epochs))
        progress.update(f"linear probe: epoch {epoch + 1}/{epochs}, {left} left")
    assert classifier is not None
    protocol = f"SGD lr 30, batch {batch_size}, {epochs} epochs, ×.1 at {milestones}, crops from .08 and flips"
    return {"accuracy": score(classifier, extract(backbone, test, probe), test, probe), "protocol": protocol}


def linear_fast(
    backbone: nn.Module, train: ImageSet, test: ImageSet, probe: Probe, views: int = 5, epochs: int = 40
) -> dict[str, Any]:
    """A few augmented views computed once, standardised; SGD lr .1, wd 1e-4, cosine, batch 512."""
    labels = labels_on(train, probe.device).repeat(views)
    z = torch.cat([extract(backbone, train, probe, view, crop_scale=0.2) for view in range(views)])  # [views·N, dim]
    mean, scale = z.mean(0), z.std(0) + 1e-6
    z = (z - mean) / scale
    classifier = new_classifier(z.shape[1], len(train.classes), probe)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    passes, batch_size = max(1, epochs // views), 512  # an epoch sees one view of each image
    total = passes * -(-len(z) // batch_size)
    step = 0
    for number in range(passes):
        for index in shuffled(len(z), fold(probe.seed, "linear-fast", number), probe.device).split(batch_size):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * cosine(step, total)
            _descend(classifier, optimizer, z[index], labels[index])
            step += 1
    tested = (extract(backbone, test, probe) - mean) / scale
    protocol = f"{views} cached views, standardised, SGD lr .1 wd 1e-4 cosine, batch {batch_size}, {epochs} epochs"
    return {"accuracy": score(classifier, tested, test, probe), "protocol": protocol}


def _descend(classifier: nn.Linear, optimizer: torch.optim.Optimizer, z: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    F.cross_entropy(classifier(z), labels).backward()
    optimizer.step()


def new_classifier(dim: int, classes: int, probe: Probe) -> nn.Linear:
    """Weights N(0, .01) and zero bias, as in the linear evaluation of MoCo; drawn from the probe's own seed."""
    generator = torch.Generator().manual_seed(fold(probe.seed, "classifier"))
    classifier = nn.Linear(dim, classes)
    with torch.no_grad():
        classifier.weight.normal_(0, 0.01, generator=generator)
        classifier.bias.zero_()
    return classifier.to(probe.device)


@torch.no_grad()
def score(classifier: nn.Linear, features: Tensor, test: ImageSet, probe: Probe) -> float:
    return float((classifier(features).argmax(1) == labels_on(test, probe.device)).double().mean() * 100)
