"""Verdicts on claims: from numbers alone, and about rows that the tables have."""

import json
import math
from pathlib import Path

import pytest
import torch

from onecrop.errors import UserError
from onecrop.report.claims import (
    EQUAL,
    FAILS,
    HOLDS,
    STUDENT,
    Claim,
    Comparison,
    Measured,
    compare_rows,
    verdict,
    write_claims,
)
from onecrop.report.results import write_results
from onecrop.reproduce import TABLES, numbers
from onecrop.reproduce.statements import CLAIMS

FACTS = {"command": "onecrop reproduce", "date": "2026-11-18", "device": "cpu", "torch": "2.15", "rows": []}


def cell(row, ours, std=None, seeds=1, column="linear", **more):
    facts = {"num_test": 10_000, "epochs": 100, "images": 50_000}
    return {"row": list(row), "column": column, "ours": ours, "std": std, "seeds": seeds, **facts, **more}


def table(*cells, name="rivals", **more):
    return {
        **FACTS,
        "title": f"{name}: a title",
        "table": name,
        "recipe": "paper",
        "differences": [],
        "heads": ["row"],
        "cells": list(cells),
        **more,
    }


def judge(comparison, *cells):
    return list(compare_rows(comparison, Measured("A", table(*cells))))


A_OVER_B = Comparison("rivals", ("a",), ("b",), ("linear",))


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.says)
def test_claims_are_about_cells_that_the_tables_have(claim):
    for comparison in claim.comparisons:
        if comparison.table == "cost":  # of benchmarks/cost.py, which takes any method and backbone
            continue
        made = {(made.row, made.column) for made in TABLES[comparison.table]().cells if made.training is not None}
        for row in (comparison.ahead, comparison.behind, *comparison.over):
            for column in comparison.columns:
                assert (row, column) in made, f"{claim.says}: {comparison.table} has no {row}, {column}"


def test_by_the_paper_s_own_numbers_its_ablation_holds_where_it_prints_a_difference():
    cells = [
        cell(["yes" if part else "no" for part in parts], accuracies[0], std=0.1, seeds=2, column="cifar10")
        for parts, accuracies in numbers.ABLATION.items()
    ]
    claims = {claim.says: claim for claim in CLAIMS}
    words = {}
    for says, claim in claims.items():
        found = [
            f for comparison in claim.comparisons if comparison.table == "table6" for f in judge(comparison, *cells)
        ]
        words[says] = [finding.verdict for finding in found]
    assert words["Feature Calibrate improves accuracy"] == [HOLDS]
    assert words["Grad Update improves accuracy, without SqrtKL and with it"] == [HOLDS, EQUAL]  # 91.1 and 91.1
    assert words["SqrtKL improves accuracy"] == [HOLDS, HOLDS]


def test_the_noise_is_what_chance_rarely_exceeds():
    (one,) = judge(A_OVER_B, cell("a", 90.0), cell("b", 80.0))
    assert one.noise == pytest.approx(2 * math.sqrt(90 * 10 / 10_000 + 80 * 20 / 10_000))
    # with seeds: the spread that all rows have in common, a third one with three seeds included
    (two,) = judge(A_OVER_B, cell("a", 90.0, 0.1, 2), cell("b", 80.0, 0.3, 2), cell("c", 70.0, 0.2, 3), cell("d", 60.0))
    pooled = (0.1**2 + 0.3**2 + 2 * 0.2**2) / 4
    assert two.noise == pytest.approx(2.78 * math.sqrt(pooled / 2 + pooled / 2))  # t for four repeats
    assert two.seeds == 2
    # a single repeat says next to nothing, and seeds that changed nothing say nothing at all
    (three,) = judge(A_OVER_B, cell("a", 90.0, 0.1, 2), cell("b", 80.0))
    assert three.noise == pytest.approx(12.71 * 0.1 * math.sqrt(1 / 2 + 1))
    (four,) = judge(A_OVER_B, cell("a", 90.0, 0.0, 2), cell("b", 80.0))
    assert four.noise == one.noise


def test_student_s_t_is_what_chance_exceeds_in_one_case_of_twenty():
    draw = torch.Generator().manual_seed(0)
    for repeats in (1, 4, 10):
        normal = torch.randn(400_000, repeats + 1, generator=draw, dtype=torch.float64)
        t = normal[:, 0].abs() / normal[:, 1:].square().mean(1).sqrt()
        assert (t > STUDENT[repeats - 1]).double().mean() == pytest.approx(0.05, abs=0.002)


@pytest.mark.parametrize(
    ("lead", "strict", "or_equal"),
    [(0.5, HOLDS, HOLDS), (0.1, EQUAL, HOLDS), (-0.1, EQUAL, HOLDS), (-0.5, FAILS, FAILS)],
)
def test_a_difference_counts_beyond_the_noise(lead, strict, or_equal):
    cells = cell("a", 80 + lead, 0.1, 2), cell("b", 80.0, 0.1, 2)  # noise .43
    assert judge(A_OVER_B, *cells)[0].verdict == strict
    assert judge(A_OVER_B._replace(or_equal=True), *cells)[0].verdict == or_equal


@pytest.mark.parametrize(("column", "least"), [("memory, MB", 0.05), ("epoch seconds", 0.05), ("hours", 0.2)])
def test_less_cost_is_better_and_counts_from_some_percent_on(column, least):
    costs = Comparison("rivals", ("a",), ("b",), (column,))

    def verdict_of(a, b):
        return judge(costs, cell("a", a, column=column), cell("b", b, column=column))[0].verdict

    assert verdict_of(1.0, 1 + 1.3 * least) == HOLDS
    assert verdict_of(1.0, 1 + 0.8 * least) == verdict_of(1 + 0.8 * least, 1.0) == EQUAL
    assert verdict_of(1 + 1.3 * least, 1.0) == FAILS


def test_cost_is_compared_on_one_device_alone():
    both = Comparison("rivals", ("a",), ("b",), ("linear", "hours"))
    cells = [
        cell(row, 80.0, column=column, device=device)
        for row, device in (("a", "cpu"), ("b", "NVIDIA H200"))
        for column in ("linear", "hours")
    ]
    assert [found.column for found in judge(both, *cells)] == ["linear"]


def test_a_lead_is_compared_with_a_lead():
    leads = Comparison("data", ("few", "ours"), ("many", "ours"), ("linear",), over=(("few", "moco"), ("many", "moco")))
    scores = {("few", "ours"): 70.0, ("few", "moco"): 60.0, ("many", "ours"): 90.0, ("many", "moco"): 86.0}
    (found,) = judge(leads, *(cell(row, score, 0.5, 2) for row, score in scores.items()))
    assert found.difference == pytest.approx((70 - 60) - (90 - 86))
    assert found.noise == pytest.approx(2.78 * math.sqrt(4 * 0.5**2 / 2))


def test_what_is_not_measured_gets_no_verdict():
    assert judge(A_OVER_B, cell("a", 90.0), cell("b", None)) == []
    assert judge(A_OVER_B, cell("a", 90.0)) == []
    assert verdict([], {}) == "not measured"


def test_a_claim_does_not_hold_by_rows_that_are_missing(tmp_path):
    claim = Claim("a is better", "", tuple(Comparison("rivals", ("a",), (b,), ("linear", "hours")) for b in "bc"))

    def verdict_on(*cells):
        (tmp_path / "rivals.json").write_text(json.dumps(table(*cells)))
        page = write_claims(tmp_path, [claim], tmp_path / "claims.md").read_text()
        return next(line for line in page.splitlines() if line.startswith("| 1. a is better")).split(" | ")[2]

    first = [cell("a", 90.0), cell("b", 80.0)]
    failed = "**1 of 1 comparisons hold, 1 not measured, one seed** (linear A); **not measured** (hours A) |"
    assert verdict_on(*first, cell("c", None)) == failed
    assert verdict_on(*first) == failed  # passed over
    hours = [cell(row, value, column="hours", device="x") for row, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    assert verdict_on(*first, cell("c", 70.0), *hours) == "**holds, one seed** (linear A); **holds** (hours A) |"


def test_the_fast_probe_stands_for_the_paper_s_where_the_table_says_so():
    (found,) = judge(A_OVER_B, cell("a", 90.0, column="linear-fast"), cell("b", 80.0, column="linear-fast"))
    assert (found.column, found.verdict) == ("linear-fast", HOLDS)
    both = [cell("a", 90.0, column="linear-fast"), cell("b", 80.0, column="linear-fast"), cell("a", 70.0)]
    assert judge(A_OVER_B, *both) == []  # there the paper's own is a column of its own


def test_conditions_that_disagree_are_named():
    cells = [cell("a", 90.0, 0.1, 2), cell("b", 80.0, 0.1, 2)]
    under_paper = judge(A_OVER_B, *cells)
    under_sid = list(compare_rows(A_OVER_B, Measured("B", table(*reversed_scores(cells)))))
    assert verdict(under_paper, {}) == "**holds** (linear A)"
    assert verdict([*under_paper, *under_sid], {}) == "**holds** (linear A); **does not hold** (linear B)"


def reversed_scores(cells):
    return [{**one, "ours": other["ours"]} for one, other in zip(cells, reversed(cells), strict=True)]


def test_the_page(tmp_path):
    folder, claims = tmp_path / "results", [Claim("a is better", "Table 1", (A_OVER_B,), "1 against 0."), CLAIMS[0]]
    folder.mkdir()
    scores = {"a": (90.0, 91.0, 70.0), "b": (80.0, 85.0, 75.0), "c": (70.0, 60.0, 65.0)}
    probes = ("linear", "linear-fast", "knn")
    cells = [
        cell(row, value, column=probe)
        for row, values in scores.items()
        for probe, value in zip(probes, values, strict=True)
    ]
    untrained = {"row": ["d"], "column": "linear", "ours": 10.0, "std": None, "seeds": 1, "num_test": 10_000}
    (folder / "rivals.json").write_text(json.dumps(table(*cells, untrained)))
    (folder / "step.json").write_text(json.dumps({**FACTS, "title": "of a benchmark", "rows": [{"step_ms": 6.4}]}))
    page = write_claims(folder, claims, tmp_path / "claims.md").read_text()
    assert "| 1. a is better | Table 1 | **holds, one seed** (linear A) |" in page
    assert "| a | b | linear A | 90.0 | 80.0 | +10 | 1 | 1 | holds |" in page
    assert "- **A** rivals: a title, recipe paper: 100 epochs; 50,000 images; 2026-11-18; cpu; torch 2.15." in page
    assert "The paper: 1 against 0." in page
    assert "| 2. Feature Calibrate improves accuracy | Table 6 | not measured |" in page
    assert "Not measured: `onecrop reproduce table6`." in page
    assert "| a | 90.0 (1.) | 91.0 (1.) | 70.0 (2.) |" in page
    assert "knn turns 1 of 3 pairs of rows around, against linear." in page
    assert "linear-fast turns 0 of 3 pairs of rows around" in page
    assert "- not measured: table6" in page
    grows = next(claim for claim in CLAIMS if claim.says.startswith("More images make"))
    page = write_claims(folder, [grows], tmp_path / "claims.md").read_text()
    assert "Not measured: `python benchmarks/cost.py`." in page  # which no table of the paper's is


def test_the_cost_of_an_epoch_is_a_table_too(tmp_path):
    costs = {"sid": (0.6, 1.7), "byol": (1.6, 2.9), "moco": (0.61, 1.7)}
    rows = [
        {"method": method, "backbone": "resnet18", "images": 50_000, "epoch_seconds": seconds, "memory_gb": memory}
        for method, (seconds, memory) in costs.items()
    ]
    rows.append({"method": "pid", "backbone": "resnet18", "images": 50_000, "failure": "does not fit"})
    (tmp_path / "cost.json").write_text(json.dumps({**FACTS, "title": "Cost of an epoch", "rows": rows}))
    page = write_claims(tmp_path, CLAIMS, tmp_path / "claims.md").read_text()
    assert "| **1 of 2 comparisons hold** (epoch seconds A, memory gb A) |" in page  # byol costs more, moco as much
    assert "| resnet18, sid, images 50,000 | resnet18, byol, images 50,000 | epoch seconds A | 0.6 | 1.6 | +1 |" in page


def test_rows_are_named_by_what_says_something():
    one = Measured("A", table(heads=["SqrtKL", "images", "method"]))
    assert one.row(("yes", "2,500", "MoCo v2")) == "SqrtKL yes, images 2,500, MoCo v2"


def test_a_folder_without_tables_is_refused(tmp_path):
    (tmp_path / "cut.json").write_text("{")  # by a full disk, say
    with pytest.raises(UserError, match=r"cut\.json cannot be read"):
        write_claims(tmp_path, CLAIMS, tmp_path / "claims.md")
    for rows in ("none", ["none"]):
        (tmp_path / "cut.json").write_text(json.dumps({**FACTS, "title": "made by hand", "rows": rows}))
        with pytest.raises(UserError, match=r"cut\.json is not a result file: its rows are no list of objects"):
            write_claims(tmp_path, CLAIMS, tmp_path / "claims.md")
    with pytest.raises(UserError, match=r"no result files .* in .*nowhere"):
        write_claims(tmp_path / "nowhere", CLAIMS, tmp_path / "claims.md")
    assert not (tmp_path / "claims.md").exists()


def test_the_pages_of_the_docs_are_what_their_files_say(tmp_path, monkeypatch):
    """Neither was edited by hand, nor forgotten when a file was added."""
    monkeypatch.chdir(Path(__file__).parents[2])
    folder = Path("docs/results")
    for name, made in (
        ("claims.md", write_claims(folder, CLAIMS, tmp_path / "claims.md")),
        ("results.md", write_results(folder, tmp_path / "results.md")),
    ):
        assert Path("docs", name).read_text() == made.read_text(), (
            f"docs/{name}: run `onecrop {name[:-3]} docs/results`"
        )
