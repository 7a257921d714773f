"""The paper's tables and figures as plans: every cell with the run and the measurement behind it.

A cell without a run is one that the paper itself quotes from others. Where the paper does not say with what settings a
rival was trained on ImageNet, the published ones of its authors are taken.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from onecrop.reproduce import numbers

NAMES = {
    "sid": "sid (the paper's)",
    "moco": "MoCo v2",
    "simsiam": "SimSiam",
    "simclr": "SimCLR",
    "byol": "BYOL",
    "jigclu": "JigClu",
    "pid": "PID",
    "npid": "NPID",
    "untrained": "random init.",
}
APS = ("AP50", "AP", "AP75")
SMALL_EPOCHS, IMAGENET_EPOCHS = 400, 200


class Training(NamedTuple):
    """One pretraining; cells that name an equal one share its run folder."""

    method: str  # or "untrained"
    backbone: str
    data: str
    epochs: int
    subset: int | None = None
    changes: tuple[tuple[str, Any], ...] = ()  # to the method's recipe
    steps_of: int | None = None  # so many images: their epochs' steps are taken, in more epochs of fewer images


class Measure(NamedTuple):
    """What is measured on a run: a probe on a data set, what the run itself says, a map, or detection on a set."""

    kind: str  # linear, linear-fast, knn; hours, memory, instances; map; voc07, voc0712, coco
    what: str = ""  # the data set; of detection "boxes AP50" and the like


class Cell(NamedTuple):
    row: tuple[str, ...]
    column: str
    paper: float | None
    training: Training | None  # None: the paper quotes it
    measure: Measure


class Table(NamedTuple):
    """A table or figure of the paper."""

    title: str
    heads: tuple[str, ...]  # of the cells' rows
    cells: tuple[Cell, ...]
    note: str = ""
    picture: str = ""  # "cost", "line", "subsets" or "page": what is drawn beside the table
    least_images: int = 0  # with fewer, rows would not be what they are called


def cifar_result() -> Table:
    """accuracy of eight methods on CIFAR-10, CIFAR-100 and Tiny-ImageNet; three backbones"""
    return Table("Linear evaluation after pretraining on the same data", ("backbone", "method"), tuple(_small_images()))


def _small_images() -> Iterator[Cell]:
    for backbone, rows in numbers.CIFAR_RESULT.items():
        for method, (hours, memory, *accuracies) in rows.items():
            row = (backbone, NAMES[method])
            for data, accuracy in zip(("cifar10", "cifar100", "tiny-imagenet"), accuracies, strict=True):
                training = Training(method, backbone, data, SMALL_EPOCHS)
                yield Cell(row, data, accuracy, training, Measure("linear", data))
                if data == "cifar10":
                    yield Cell(row, "hours", hours, training, Measure("hours"))
                    yield Cell(row, "memory, MB", memory, training, Measure("memory"))


def subset_detection() -> Table:
    """ImageNet subsets → detection on VOC 07+12 and Tiny-ImageNet; ResNet-18 and ResNet-50"""
    cells = []
    for backbone, rows in numbers.SUBSET_DETECTION.items():
        for (method, images, epochs), (hours, *aps, accuracy) in rows.items():
            row = (backbone, NAMES[method], f"{images:,}", str(epochs))
            training = Training(method, backbone, "imagenet", epochs, images or None)
            if images:
                cells.append(Cell(row, "hours", hours, training, Measure("hours")))
            cells += [
                Cell(row, f"VOC 07+12 {name}", value, training, Measure("voc0712", f"boxes {name}"))
                for name, value in zip(APS, aps, strict=True)
            ]
            cells.append(Cell(row, "tiny-imagenet", accuracy, training, Measure("linear", "tiny-imagenet")))
    return Table("Pretraining on subsets of ImageNet", ("backbone", "method", "images", "epochs"), tuple(cells))


def subsets_to_cifar100() -> Table:
    """ImageNet and its subsets → CIFAR-100; four small backbones"""
    return _small_nets("cifar100", 0)


def subsets_to_cifar10() -> Table:
    """ImageNet and its subsets → CIFAR-10; four small backbones"""
    return _small_nets("cifar10", 1)


def _small_nets(data: str, place: int) -> Table:
    cells = []
    for (backbone, method), results in numbers.SMALL_NETS.items():
        for images, result in zip(numbers.SUBSETS, results, strict=True):
            count = "1,281,167" if images is None else f"{images:,}"
            training = Training(method, backbone, "imagenet", IMAGENET_EPOCHS, images)
            quoted = method == "moco" and images is None
            row = (backbone, NAMES[method], count)
            cells.append(Cell(row, data, result[place], None if quoted else training, Measure("linear", data)))
            cells.append(Cell(row, "hours", result[2], None if quoted else training, Measure("hours")))
    return Table(f"ImageNet and its subsets → {data}", ("backbone", "method", "images"), tuple(cells))


def transfer() -> Table:
    """ImageNet → VOC 07, VOC 07+12, COCO boxes and masks; ResNet-50"""
    parts = (("voc07", "boxes"), ("voc0712", "boxes"), ("coco", "boxes"), ("coco", "masks"))
    return _transfer("resnet50", numbers.TRANSFER, parts)


def transfer_r18() -> Table:
    """ImageNet → COCO boxes and masks; ResNet-18"""
    return _transfer("resnet18", numbers.TRANSFER_R18, (("coco", "boxes"), ("coco", "masks")))


def _transfer(backbone: str, results: Mapping[str, tuple[float, ...]], parts: tuple[tuple[str, str], ...]) -> Table:
    training = Training("sid", backbone, "imagenet", IMAGENET_EPOCHS)
    measures = [Measure(kind, f"{what} {name}") for kind, what in parts for name in APS]
    cells = [
        Cell((_ours(method),), f"{measure.kind} {measure.what}", value, training if method == "sid" else None, measure)
        for method, values in results.items()
        for measure, value in zip(measures, values, strict=True)
    ]
    return Table(f"Detection and instance segmentation, {backbone} C4", ("method",), tuple(cells))


def _ours(method: str) -> str:
    return NAMES["sid"] if method == "sid" else method


def ablation() -> Table:
    """the three parts of the method, switched on one by one; CIFAR-10 and Tiny-ImageNet"""
    cells = []
    for parts, accuracies in numbers.ABLATION.items():
        row = tuple("yes" if part else "no" for part in parts)
        for data, accuracy in zip(("cifar10", "tiny-imagenet"), accuracies, strict=True):
            training = Training("sid", "resnet18", data, SMALL_EPOCHS, changes=_parts(*parts))
            cells.append(Cell(row, data, accuracy, training, Measure("linear", data)))
    return Table("Ablation, ResNet-18", ("Feature Calibrate", "SqrtKL", "Grad Update"), tuple(cells))


def _parts(calibrate: bool, sqrt_kl: bool, grad_update: bool) -> tuple[tuple[str, Any], ...]:
    """What differs from the whole method."""
    off = (("calibrate", False, calibrate), ("kl", "none", sqrt_kl), ("update", "plain", grad_update))
    return tuple((name, value) for name, value, is_on in off if not is_on)


def imagenet_linear() -> Table:
    """linear evaluation on ImageNet; ResNet-50"""
    training = Training("sid", "resnet50", "imagenet", IMAGENET_EPOCHS)
    cells = tuple(
        Cell(
            (_ours(method),), "imagenet", accuracy, training if method == "sid" else None, Measure("linear", "imagenet")
        )
        for method, accuracy in numbers.IMAGENET_LINEAR.items()
    )
    return Table("Linear evaluation on ImageNet, ResNet-50", ("method",), cells)


def kl_parts() -> Table:
    """the two parts of SqrtKL; CIFAR-10"""
    names = {"none": "none", "l1": "L1 = Σ p log p", "l2": "L2 = −Σ p log u", "sqrt": "SqrtKL = L1 + L2"}
    cells = []
    for part, accuracy in numbers.KL_PARTS.items():
        changes = {"none": _parts(False, False, False), "sqrt": ()}.get(part, (("kl", part),))
        training = Training("sid", "resnet18", "cifar10", SMALL_EPOCHS, changes=changes)
        cells.append(Cell((names[part],), "cifar10", accuracy, training, Measure("linear", "cifar10")))
    note = "The paper's 88.8 without the term is its ablation's row without any of the three parts, and so is ours."
    return Table("Parts of SqrtKL, ResNet-18", ("term",), tuple(cells), note)


def accuracy_and_cost() -> Table:
    """accuracy against cost on CIFAR-100"""
    cells = []
    for method, (_, _, _, accuracy, _) in numbers.CIFAR_RESULT["resnet18"].items():
        training = Training(method, "resnet18", "cifar100", SMALL_EPOCHS)
        cells.append(Cell((NAMES[method],), "cifar100", accuracy, training, Measure("linear", "cifar100")))
        cells.append(Cell((NAMES[method],), "hours", None, training, Measure("hours")))
    note = "The figure's hours are not printed; Table 1 has those of CIFAR-10."
    return Table("Accuracy against cost, ResNet-18 on CIFAR-100", ("method",), tuple(cells), note, "cost")


def with_and_without_kl() -> Table:
    """loss, instance accuracy and linear probe along the training, with and without SqrtKL; CIFAR-10"""
    cells = []
    for name, paper, changes in (("with SqrtKL", 91.1, ()), ("without", 90.0, (("kl", "none"),))):
        watched = (*changes, ("probe", "linear-fast"), ("probe_every", 20))
        training = Training("sid", "resnet18", "cifar10", SMALL_EPOCHS, changes=watched)
        cells.append(Cell((name,), "cifar10", paper, training, Measure("linear", "cifar10")))
        cells.append(Cell((name,), "instance accuracy", None, training, Measure("instances")))
    note = "Curves are in the page; the numbers at the end are Table 6's."
    return Table("With and without SqrtKL, ResNet-18 on CIFAR-10", ("sid",), tuple(cells), note, "page")


def bank_momentum() -> Table:
    """accuracy against m, the bank's momentum; CIFAR-10"""
    return _curve("bank_momentum", "m", (0.0, 0.1, 0.3, 0.5, 0.7, 0.9), {0.5: 91.1})


def kl_weight() -> Table:
    """accuracy against λ, the weight of SqrtKL; CIFAR-10"""
    return _curve("kl_weight", "λ", (0.0, 1.0, 5.0, 10.0, 20.0, 40.0), {0.0: 90.0, 20.0: 91.1})


def _curve(field: str, symbol: str, values: tuple[float, ...], printed: dict[float, float]) -> Table:
    cells = []
    for value in values:
        off = field == "kl_weight" and value == 0  # the same, under the name that the ablation gives it
        changes: tuple[tuple[str, Any], ...] = (("kl", "none"),) if off else ((field, value),)
        training = Training("sid", "resnet18", "cifar10", SMALL_EPOCHS, changes=changes)
        cells.append(Cell((f"{value:g}",), "cifar10", printed.get(value), training, Measure("linear", "cifar10")))
    note = (
        f"The figure's values of {symbol} and its numbers are not printed; those beside ours are from Tables 1 and 6."
    )
    return Table(f"Effect of {symbol}, ResNet-18 on CIFAR-10", (symbol,), tuple(cells), note, "line")


def tsne() -> Table:
    """t-SNE of 5,000 pictures of CIFAR-10 through SimCLR, SimSiam, MoCo v2 and sid; ResNet-18 and MobileNetV2"""
    cells = []
    for backbone in ("resnet18", "mobilenet_v2"):
        for method in ("simclr", "simsiam", "moco", "sid"):
            training = Training(method, backbone, "cifar10", SMALL_EPOCHS)
            cells.append(Cell((backbone, NAMES[method]), "same class, %", None, training, Measure("map")))
    note = "Maps are in the page; the paper prints no numbers. Same class: of the 12 nearest of every picture."
    return Table("t-SNE of CIFAR-10", ("backbone", "method"), tuple(cells), note, "page")


def subsets_drawn() -> Table:
    """ImageNet's subsets → CIFAR-100 and CIFAR-10, drawn: Tables 3 and 9"""
    parts = (subsets_to_cifar100(), subsets_to_cifar10())
    cells = tuple(cell for part in parts for cell in part.cells if cell.column != "hours")
    return Table("ImageNet and its subsets → CIFAR-100 and CIFAR-10", parts[0].heads, cells, "", "subsets")
