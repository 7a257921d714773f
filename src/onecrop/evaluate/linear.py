"""Linear probes on frozen features. The last epoch is reported, never the best one."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from onecrop.data import ImageSet
from onecrop.device import Captured
from onecrop.distributed import world
from onecrop.draws import fold, shuffled
from onecrop.evaluate.features import Probe, RandomViews, extract, labels_on
from onecrop.optim import cosine
from onecrop.progress import Progress, duration


def linear(
    backbone: nn.Module, train: ImageSet, test: ImageSet, probe: Probe, epochs: int = 100, batch_size: int = 256
) -> dict[str, Any]:
    """The paper authors' protocol: SGD lr 30, ×.1 at 60 % and 80 % of 100 epochs, fresh crops and flips every epoch."""
    labels = labels_on(train, probe.device)
    batch_size = min(batch_size, len(train))
    milestones = [round(0.6 * epochs), round(0.8 * epochs)]
    views = RandomViews(backbone, train, probe, crop_scale=0.08, shown=False)
    progress = Progress(None if world().first else sys.stdout)  # one process speaks
    descent: Descent | None = None
    for epoch in range(epochs):
        # The backbone is frozen: the epoch's crops go through it in large batches, the classifier's steps come after.
        z = views(epoch)
        if descent is None:
            descent = Descent(new_classifier(z.shape[1], len(train.classes), probe), weight_decay=0.0)
        lr = 30.0 * 0.1 ** sum(epoch >= m for m in milestones)
        order = shuffled(len(z), fold(probe.seed, "linear", epoch), probe.device)
        for index in order[: len(z) // batch_size * batch_size].view(-1, batch_size):
            descent(z[index], labels[index], lr)
        left = duration(progress.remaining(epoch + 1, epochs))
        progress.update(f"linear probe: epoch {epoch + 1}/{epochs}, {left} left")
    progress.clear()
    assert descent is not None
    protocol = f"SGD lr 30, batch {batch_size}, {epochs} epochs, ×.1 at {milestones}, crops from .08 and flips"
    tested = extract(backbone, test, probe)
    return {"accuracy": score(descent.classifier, tested, test, probe), "protocol": protocol}


def linear_fast(
    backbone: nn.Module, train: ImageSet, test: ImageSet, probe: Probe, views: int = 5, epochs: int = 40
) -> dict[str, Any]:
    """A few augmented views computed once, standardised; SGD lr .1, wd 1e-4, cosine, batch 512."""
    labels = labels_on(train, probe.device).repeat(views)
    random_views = RandomViews(backbone, train, probe, crop_scale=0.2)
    z = torch.cat([random_views(view) for view in range(views)])  # [views·N, dim]
    mean, scale = z.mean(0), z.std(0) + 1e-6
    z = (z - mean) / scale
    descent = Descent(new_classifier(z.shape[1], len(train.classes), probe), weight_decay=1e-4)
    passes, batch_size = max(1, epochs // views), 512  # an epoch sees one view of each image
    total = passes * -(-len(z) // batch_size)
    step = 0
    for number in range(passes):
        for index in shuffled(len(z), fold(probe.seed, "linear-fast", number), probe.device).split(batch_size):
            descent(z[index], labels[index], 0.1 * cosine(step, total))
            step += 1
    tested = (extract(backbone, test, probe) - mean) / scale
    protocol = f"{views} cached views, standardised, SGD lr .1 wd 1e-4 cosine, batch {batch_size}, {epochs} epochs"
    return {"accuracy": score(descent.classifier, tested, test, probe), "protocol": protocol}


class Descent:
    """SGD with momentum .9 on the mean cross-entropy of a linear classifier, its gradient written out:

    ∂/∂logits = (softmax − one-hot)/B, so that a step is a few products, and on a GPU one graph.
    """

    def __init__(self, classifier: nn.Linear, weight_decay: float) -> None:
        self.classifier, self.weight_decay = classifier.requires_grad_(False), weight_decay
        self.velocities = [torch.zeros_like(p) for p in (classifier.weight, classifier.bias)]
        self.lr = torch.zeros((), device=classifier.weight.device)
        self.classes = torch.arange(classifier.out_features, device=self.lr.device)
        self.step = Captured(self._step)

    def __call__(self, z: Tensor, labels: Tensor, lr: float) -> None:
        self.lr.fill_(lr)
        self.step(z, labels)

    def _step(self, z: Tensor, labels: Tensor) -> Tensor:
        weight, bias = self.classifier.weight, self.classifier.bias
        slopes = (torch.softmax(self.classifier(z), 1) - (labels[:, None] == self.classes).float()) / len(z)  # [B, C]
        gradients = slopes.T @ z, slopes.sum(0)
        for parameter, gradient, velocity in zip((weight, bias), gradients, self.velocities, strict=True):
            velocity.mul_(0.9).add_(gradient).add_(parameter, alpha=self.weight_decay)
            parameter.sub_(self.lr * velocity)
        return weight


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
