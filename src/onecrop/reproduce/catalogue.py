"""Every table that `onecrop reproduce` makes: the paper's, and those that put its claims to the test."""

from collections.abc import Callable

from onecrop.errors import unknown
from onecrop.reproduce import claims, tables
from onecrop.reproduce.tables import Table

TABLES: dict[str, Callable[[], Table]] = {
    "table1": tables.cifar_result,
    "table2": tables.subset_detection,
    "table3": tables.subsets_to_cifar100,
    "table4": tables.transfer,
    "table5": tables.transfer_r18,
    "table6": tables.ablation,
    "table7": tables.imagenet_linear,
    "table8": tables.kl_parts,
    "table9": tables.subsets_to_cifar10,
    "figure1": tables.accuracy_and_cost,
    "figure3": tables.with_and_without_kl,
    "figure4": tables.bank_momentum,
    "figure5": tables.kl_weight,
    "figure6": tables.tsne,
    "figure7": tables.subsets_drawn,
    "optimizers": claims.optimizers,
    "relation": claims.relation,
    "rows": claims.rows,
    "proximal": claims.proximal,
    "rivals": claims.rivals,
    "data": claims.data,
    "nets": claims.nets,
}


def find_table(name: str) -> tuple[str, Table]:
    """Its name and plan; "1" and "Table 1" are "table1". Figure 2 is a drawing of the method: nothing to measure."""
    name = f"table{name}" if name.isdigit() else name.lower().replace(" ", "").replace("-", "")
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    return name, TABLES[name]()
