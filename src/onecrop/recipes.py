"""Named recipes: `onecrop pretrain --recipe NAME` starts from one, flags override its fields."""

from collections.abc import Callable

from onecrop.errors import unknown
from onecrop.methods import Settings
from onecrop.methods.byol import ByolSettings
from onecrop.methods.jigclu import JigcluSettings
from onecrop.methods.moco import MocoSettings
from onecrop.methods.npid import NpidSettings
from onecrop.methods.pid import PidSettings
from onecrop.methods.sid import SidSettings
from onecrop.methods.simclr import SimclrSettings
from onecrop.methods.simsiam import SimsiamSettings
from onecrop.recipe import Recipe


def paper() -> Recipe:
    """The paper's row for CIFAR-10 with the released code's settings (lr .1 in the paper's text: --lr 0.1;
    10,000 sampled rows in the code: --sampled-rows 10000).

    onecrop pretrain cifar10 --recipe paper --out RUN
    """
    settings = SidSettings(dim=2048, hidden=2048)
    return Recipe(data="cifar10", backbone="resnet18", epochs=400, batch_size=512, optimizer="sgd", settings=settings)


def demo() -> Recipe:
    """A minute on two cores: procedural shapes, a small net. No CutMix: it costs ten points in so short a run.

    onecrop demo
    """
    return Recipe(
        data="shapes",
        out="demo/run",
        backbone="tiny",
        epochs=12,
        batch_size=128,
        optimizer="muon",
        settings=SidSettings(dim=128, hidden=256, cutmix=0.0, update="plain", bank_momentum=0.2),
    )


def _small(method: str, settings: Settings, lr: float, weight_decay: float = 1e-4, batch_size: int = 512) -> Recipe:
    """A rival on small images, by SGD for 400 epochs, as in the paper's first table."""
    return Recipe(
        data="cifar10",
        backbone="resnet18",
        epochs=400,
        optimizer="sgd",
        method=method,
        settings=settings,
        lr=lr,
        weight_decay=weight_decay,
        batch_size=batch_size,
    )


def sid_small() -> Recipe:
    """sid on CIFAR, with what is chosen on a GPU: in comparisons it is the same on every device."""
    settings = SidSettings(dim=2048, hidden=2048)
    return Recipe(data="cifar10", backbone="resnet18", epochs=100, batch_size=512, optimizer="muon", settings=settings)


def simsiam_small() -> Recipe:
    """SimSiam on CIFAR, with the paper authors' settings."""
    return _small("simsiam", SimsiamSettings(), lr=0.05, weight_decay=5e-4)


def byol_small() -> Recipe:
    """BYOL on CIFAR, with the paper authors' settings."""
    settings = ByolSettings(crop_scale=0.2, dim=512, hidden=2048, target_momentum=0.99)
    return _small("byol", settings, lr=0.05)


def simclr_small() -> Recipe:
    """SimCLR on CIFAR, with the paper authors' settings."""
    return _small("simclr", SimclrSettings(crop_scale=0.2, jitter=0.4, dim=256, temperature=0.5), lr=0.5)


def moco_small() -> Recipe:
    """MoCo v2 on CIFAR, with the paper authors' settings."""
    return _small("moco", MocoSettings(dim=256, queue_size=2048), lr=0.3, batch_size=256)


def npid_small() -> Recipe:
    """NPID on CIFAR, as in its released code: T .1, no proximal term, batch 128."""
    settings = NpidSettings(temperature=0.1, proximal_weight=0.0)
    return _small("npid", settings, lr=0.1, weight_decay=5e-4, batch_size=128)


def pid_small() -> Recipe:
    """PID on CIFAR, with the optimiser of PIC's released code (for ImageNet).

    That code trains on ImageNet alone. From it: SGD with momentum .9, weight decay 1e-4, lr .03 for 256 images (.06 for
    our 512), cosine decay, T .2, a two-layer head of 128 dimensions, crops from .2 on (from .08 with its multi-crop).
    Ours: 400 epochs, batch 512, no warm-up (there a fortieth of the epochs), one crop, every image once an epoch (there
    a sliding window), and rows that begin at unit length (there about .1).
    """
    return _small("pid", PidSettings(), lr=0.06)


def jigclu_small() -> Recipe:
    """JigClu on CIFAR, with the optimiser of its released code (for ImageNet)."""
    return _small("jigclu", JigcluSettings(), lr=0.03, batch_size=256)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo": demo,
    "paper": paper,
    "sid-small": sid_small,
    "simclr-small": simclr_small,
    "moco-small": moco_small,
    "simsiam-small": simsiam_small,
    "byol-small": byol_small,
    "npid-small": npid_small,
    "pid-small": pid_small,
    "jigclu-small": jigclu_small,
}


def named(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]()
