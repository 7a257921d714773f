"""What the paper states, each statement as comparisons between rows of the tables that test it.

`onecrop claims` reads the measured tables and says which hold. Those marked "ours" are about what this package adds.
"""

from onecrop.report.claims import EPOCH_COST, RUN_COST, Claim, Comparison
from onecrop.report.ranks import Row
from onecrop.reproduce.claims import NETS, RIVALS, TWICE
from onecrop.reproduce.numbers import CIFAR_RESULT
from onecrop.reproduce.tables import NAMES

OURS, MOCO = NAMES["sid"], NAMES["moco"]
SMALL = ("cifar10", "cifar100", "tiny-imagenet")
PROBES = ("linear", "knn")
OTHERS = tuple(NAMES[method] for method in RIVALS if method != "sid")
TWO_CROPS = ("byol", "simsiam", "simclr", "moco")
FEW, MANY = "2,500", "50,000"


def _ablation(ahead: str, behind: str) -> Comparison:
    """Rows of Table 6 by what they have."""
    return Comparison("table6", _parts(ahead), _parts(behind), ("cifar10", "tiny-imagenet"))


def _parts(parts: str) -> Row:
    return tuple("yes" if part in parts.split() else "no" for part in ("calibrate", "kl", "update"))


def _setting(
    table: str, ahead: str, *behind: str, columns: tuple[str, ...] = ("cifar10",), or_equal: bool = False
) -> tuple[Comparison, ...]:
    return tuple(Comparison(table, (ahead,), (other,), columns, or_equal) for other in behind)


def _rivals(others: tuple[str, ...], optimizer: str, columns: tuple[str, ...]) -> tuple[Comparison, ...]:
    """Ours with its own optimiser or with Muon, and so the others."""
    return tuple(Comparison("rivals", (OURS, optimizer), (other, optimizer), columns) for other in others)


def _table1(columns: tuple[str, ...], others: tuple[str, ...] = OTHERS) -> tuple[Comparison, ...]:
    return tuple(
        Comparison("table1", (backbone, OURS), (backbone, NAMES[method]), columns)
        for backbone, methods in CIFAR_RESULT.items()
        for method in methods
        if NAMES[method] in others
    )


def _cheaper(*others: str) -> tuple[Comparison, ...]:
    """Whole runs, and an epoch as benchmarks/cost.py measures it: all methods by SGD and with one batch size."""
    names = tuple(NAMES[method] for method in others)
    epochs = tuple(
        Comparison("cost", (net, "sid", MANY), (net, other, MANY), EPOCH_COST)
        for net in CIFAR_RESULT
        for other in others
    )
    runs = (*_rivals(names, "its own", RUN_COST), *_rivals(names, "Muon", RUN_COST))
    return (*_table1(RUN_COST, names), *runs, *epochs)


def _few_images(amount: str, length: str) -> Comparison:
    return Comparison("data", (amount, length, OURS), (amount, length, MOCO), PROBES)


def _subsets(table: str, column: str, amounts: tuple[str, ...]) -> tuple[Comparison, ...]:
    """Tables 3 and 9: MobileNetV3-small against -large after little data."""
    small, large = "mobilenet_v3_small", "mobilenet_v3_large"
    return tuple(Comparison(table, (small, OURS, amount), (large, OURS, amount), (column,)) for amount in amounts)


CLAIMS = (
    Claim(
        "Feature Calibrate improves accuracy",
        "Table 6",
        (_ablation("calibrate", ""),),
        "89.4 against 88.8 on CIFAR-10, 36.9 against 35.8 on Tiny-ImageNet.",
    ),
    Claim(
        "Grad Update improves accuracy, without SqrtKL and with it",
        "Table 6",
        (_ablation("calibrate update", "calibrate"), _ablation("calibrate kl update", "calibrate kl")),
        "90.0 against 89.4 without SqrtKL, 91.1 against 91.1 with it on CIFAR-10; +.6 and +.8 on Tiny-ImageNet.",
    ),
    Claim(
        "SqrtKL improves accuracy",
        "Table 6, Figure 3",
        (
            _ablation("calibrate kl", "calibrate"),
            _ablation("calibrate kl update", "calibrate update"),
            *_setting("figure3", "with SqrtKL", "without"),
        ),
        "91.1 against 89.4 with the plain update, 91.1 against 90.0 with the corrected one.",
    ),
    Claim(
        "SqrtKL helps to tell instances apart",
        "Figure 3",
        _setting("figure3", "with SqrtKL", "without", columns=("instance accuracy",)),
        "a much higher instance accuracy; the figure prints no numbers.",
    ),
    Claim(
        "The three parts together are better than none",
        "Table 6",
        (_ablation("calibrate kl update", ""),),
        "91.1 against 88.8 on CIFAR-10, 39.7 against 35.8 on Tiny-ImageNet.",
    ),
    Claim(
        "SqrtKL is better than either of its parts",
        "Table 8",
        _setting("table8", "SqrtKL = L1 + L2", "L1 = Σ p log p", "L2 = −Σ p log u"),
        "91.1 against 90.7 and 89.8. By algebra λ·SqrtKL pushes exactly as (λ/2)·L1 does (method.md): what the table"
        " compares is a coefficient.",
    ),
    Claim(
        "SqrtKL is better than NPID's proximal term",
        "section 3.3",
        _setting("proximal", "SqrtKL", *(f"‖z − w‖², weight {weight}" for weight in (1, 5, 30)), columns=PROBES),
        "91.1 against NPID's 80.8, which differs in more than this term.",
    ),
    Claim(
        "m = .5 is better than forgetting the last row (m = 0), and no value is better",
        "Figure 4",
        (
            *_setting("figure4", "0.5", "0"),
            *_setting("figure4", "0.5", "0.1", "0.3", "0.7", "0.9", or_equal=True),
        ),
        "m = .5 and .7 are the highest; the figure prints no numbers.",
    ),
    Claim(
        "Accuracy grows with λ up to 20 and not beyond",
        "Figure 5",
        (*_setting("figure5", "20", "0", "1", "5"), *_setting("figure5", "20", "40", or_equal=True)),
        "91.1 at λ = 20 against 90.0 without the term.",
    ),
    Claim(
        "It is more accurate than each of the seven others, each by its own optimiser (sid-small: ours by Muon)",
        "Table 1",
        (*_table1(SMALL), *_rivals(OTHERS, "its own", PROBES)),
        "91.1 on CIFAR-10, the others 80.8 to 90.7.",
    ),
    Claim(
        "It is more accurate than each of the seven others where all have Muon",
        "ours",
        _rivals(OTHERS, "Muon", PROBES),
    ),
    Claim(
        "With as many crops it is more accurate than methods of two, in less time, where all have Muon",
        "ours",
        tuple(Comparison("rivals", (OURS, TWICE), (NAMES[method], "Muon"), (*PROBES, "hours")) for method in TWO_CROPS),
    ),
    Claim(
        "It takes less time and memory than methods of two crops or two networks",
        "Table 1",
        _cheaper(*TWO_CROPS),
        "3.36 hours against 6.54 to 11.94, 1,715 MB against 1,757 to 2,897.",
    ),
    Claim(
        "It takes less time and memory than PID and JigClu",
        "Table 1",
        _cheaper("pid", "jigclu"),
        "3.36 hours against 6.53 and 11.59, 1,715 MB against 3,639 and 2,344.",
    ),
    Claim(
        "More images make its epoch and its memory grow less than PID's",
        "section 4.2",
        (
            Comparison(
                "cost",
                ("resnet18", "sid:calibrate=false", "1,000,000"),
                ("resnet18", "pid", "1,000,000"),
                EPOCH_COST,
                over=(("resnet18", "sid:calibrate=false", "10,000"), ("resnet18", "pid", "10,000")),
            ),
        ),
    ),
    Claim(
        "It is better than MoCo v2 on few images",
        "Table 2",
        tuple(
            _few_images(amount, f"as many {length}")
            for amount in (FEW, "5,000", "10,000")
            for length in ("epochs", "steps")
        ),
        "19.4 against 9.7 on Tiny-ImageNet after 10,000 images of ImageNet. Tested here on subsets of CIFAR-10.",
    ),
    Claim(
        "Its lead over MoCo v2 grows as images become fewer",
        "Tables 2, 3 and 9",
        tuple(
            Comparison(
                "data",
                (FEW, length, OURS),
                (MANY, length, OURS),
                PROBES,
                over=((FEW, length, MOCO), (MANY, length, MOCO)),
            )
            for length in ("as many epochs", "as many steps")
        ),
        "MobileNetV3-small on CIFAR-100: +3.9 after all of ImageNet, +6.9 after 100,000 images, +12.2 after 10,000."
        " Tested here on subsets of CIFAR-10.",
    ),
    Claim(
        "It is better than SimCLR and MoCo v2 with small networks",
        "Tables 1 and 3",
        tuple(
            Comparison("nets", (net, OURS), (net, other), PROBES) for net in NETS for other in (NAMES["simclr"], MOCO)
        ),
        "MobileNetV2 on CIFAR-100: 65.5 against 62.4 and 51.6.",
    ),
    Claim(
        "With little data MobileNetV3-small is better than MobileNetV3-large",
        "Tables 3 and 9",
        (
            *_subsets("table3", "cifar100", ("10,000", "100,000")),
            *_subsets("table9", "cifar10", ("10,000", "100,000")),
            Comparison("nets", ("mobilenet_v3_small", OURS), ("mobilenet_v3_large", OURS), PROBES),
        ),
        "34.0 against 31.5 and 39.9 against 36.1 on CIFAR-100.",
    ),
    Claim(
        "Muon is better than SGD",
        "ours",
        _setting(
            "optimizers", "Muon lr .02 wd .05", "SGD lr 1 wd 1e-4, as released", "SGD lr .3 wd 5e-4", columns=PROBES
        ),
    ),
    Claim(
        "Neighbours in the bank as soft targets are better than none",
        "ours",
        _setting("relation", "0.5", "0", columns=PROBES) + _setting("relation", "growing to 0.9", "0", columns=PROBES),
    ),
    Claim(
        "10,000 drawn rows do as well as all, 1,000 too",
        "the released code draws 10,000",
        _setting("rows", "10,000", "all", columns=PROBES, or_equal=True)
        + _setting("rows", "1,000", "all", columns=PROBES, or_equal=True),
    ),
)
