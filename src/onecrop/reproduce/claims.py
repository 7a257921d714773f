"""Tables that put the paper's claims to the test, made by the same command as those it prints.

Its ablations (Tables 6 and 8, Figures 4 and 5) are in tables.py; here is what it does not print. All of them on
CIFAR with as many epochs as its Table 1; `--scale 0.25` makes it 100. What a table is about is set for every row, the
rest is the recipe's: `--recipe` says under which one a claim is tested.
"""

from collections.abc import Mapping
from typing import Any

from onecrop.reproduce.tables import NAMES, SMALL_EPOCHS, Cell, Measure, Table, Training

Changes = tuple[tuple[str, Any], ...]

MUON: Changes = (("optimizer", "muon"), ("lr", 0.02), ("weight_decay", 0.05))
TWICE = "Muon, twice the epochs"
RIVALS = ("sid", "npid", "pid", "simclr", "moco", "simsiam", "byol", "jigclu")
NETS = ("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "efficientnet_b0")
FULL = 50_000


def optimizers() -> Table:
    """sid by SGD and by Muon; CIFAR-10"""
    rows: dict[str, Changes] = {
        "SGD lr 1 wd 1e-4, as released": (("optimizer", "sgd"), ("lr", 1.0), ("weight_decay", 1e-4)),
        "SGD lr .3 wd 5e-4": (("optimizer", "sgd"), ("lr", 0.3), ("weight_decay", 5e-4)),
        "Muon lr .02 wd .05": MUON,
    }
    return _settings("Optimisers", "optimizer", rows)


def relation() -> Table:
    """sid with and without its neighbours in the bank as soft targets; CIFAR-10"""
    rows: dict[str, Changes] = {
        "0": (("relation", 0.0),),
        "0.5": (("relation", 0.5), ("relation_rise", 0.1)),
        "growing to 0.9": (("relation", 0.9), ("relation_rise", 0.95)),
    }
    return _settings("The relation term", "share of neighbours", rows)


def rows() -> Table:
    """sid against all rows of the bank and against drawn ones; CIFAR-10"""
    names = {"1,000": 1000, "10,000": 10_000, "all": 0}
    table = _settings("Rows in the loss", "rows", {name: (("sampled_rows", rows),) for name, rows in names.items()})
    return table._replace(least_images=11_000)  # with a batch's own rows 10,000 drawn ones are all of fewer


def proximal() -> Table:
    """SqrtKL against NPID's proximal term, in the same bank; CIFAR-10"""
    off: Changes = (("kl", "none"),)
    terms: dict[str, Changes] = {"none": off, "SqrtKL": (("kl", "sqrt"),)}
    terms |= {f"‖z − w‖², weight {weight:g}": (*off, ("proximal_weight", weight)) for weight in (1.0, 5.0, 30.0)}
    return _settings("SqrtKL and the proximal term", "term", terms)


def rivals() -> Table:
    """eight methods, each by its own optimiser and by Muon, under three probes; CIFAR-10"""
    cells = []
    runs = [(method, *how) for method in RIVALS for how in (("its own", (), 1), ("Muon", MUON, 1))]
    runs.append(("sid", TWICE, MUON, 2))  # as many crops as those of two take
    for method, name, changes, times in runs:
        training = Training(method, "resnet18", "cifar10", times * SMALL_EPOCHS, changes=changes)
        cells += _scored((NAMES[method], name), training, ("linear", "linear-fast", "knn"))
        cells.append(Cell((NAMES[method], name), "hours", None, training, Measure("hours")))
        cells.append(Cell((NAMES[method], name), "memory, MB", None, training, Measure("memory")))
    note = "Each method has its own batch size, by Muon too, unless batch_size is said to be changed."
    return Table("Eight methods, ResNet-18 on CIFAR-10", ("method", "optimizer"), tuple(cells), note, picture="cost")


def data() -> Table:
    """sid and MoCo v2 on few images, both by Muon, for as many epochs and for as many steps; CIFAR-10"""
    cells = []
    for images in (2500, 5000, 10_000, FULL):
        for name, steps_of in {"epochs": None, "steps": FULL}.items():
            for method in ("sid", "moco"):
                subset = images if images < FULL else None
                training = Training(method, "resnet18", "cifar10", SMALL_EPOCHS, subset, MUON, steps_of)
                cells += _scored((f"{images:,}", f"as many {name}", NAMES[method]), training)
    heads = ("images", "trained for", "method")
    return Table("Data efficiency by Muon, ResNet-18 on CIFAR-10", heads, tuple(cells), least_images=FULL)


def nets() -> Table:
    """small networks by sid, SimCLR and MoCo v2, all by Muon; CIFAR-100"""
    cells = []
    for backbone in NETS:
        for method in ("sid", "simclr", "moco"):
            training = Training(method, backbone, "cifar100", SMALL_EPOCHS, changes=MUON)
            cells += _scored((backbone, NAMES[method]), training)
            cells.append(Cell((backbone, NAMES[method]), "hours", None, training, Measure("hours")))
    return Table("Small networks by Muon on CIFAR-100", ("backbone", "method"), tuple(cells))


def _settings(title: str, head: str, rows: Mapping[str, Changes]) -> Table:
    """sid with one thing changed in each row."""
    cells = []
    for name, changes in rows.items():
        cells += _scored((name,), Training("sid", "resnet18", "cifar10", SMALL_EPOCHS, changes=changes))
    return Table(f"{title}, ResNet-18 on CIFAR-10", (head,), tuple(cells))


def _scored(row: tuple[str, ...], training: Training, probes: tuple[str, ...] = ("linear", "knn")) -> list[Cell]:
    return [Cell(row, probe, None, training, Measure(probe, training.data)) for probe in probes]
