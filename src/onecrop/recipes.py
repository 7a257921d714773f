"""Named recipes: `onecrop pretrain --recipe NAME` starts from one, flags override its fields."""

from collections.abc import Callable

from onecrop.errors import unknown
from onecrop.methods.sid import SidSettings
from onecrop.recipe import Recipe


def paper() -> Recipe:
    """The paper's row for CIFAR-10 with the released code's settings (lr .1 in the paper's text: --lr 0.1;
    10,000 sampled rows in the code: --sampled-rows 10000).

    onecrop pretrain cifar10 --recipe paper --out RUN
    """
    return Recipe(data="cifar10", backbone="resnet18", epochs=400, optimizer="sgd")


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
        settings=SidSettings(dim=128, hidden=256, cutmix=0.0, update="plain", bank_momentum=0.2),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo": demo,
    "paper": paper,
}


def named(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]()
