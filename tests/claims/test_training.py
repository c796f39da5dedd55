"""Claims C69 to C76 but C73: what needs training. What the studies and the watch measured stands in docs/."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from helpers import ROOT
from normkit.study.catalogue import NAMES, load

VERDICT = re.compile(r"reproduced|reproduced only if .+|not reproduced|undecided|not testable here|not run")


@pytest.fixture(scope="module")
def decided() -> list[tuple[str, str, str, set[str]]]:
    """Study, claim, verdict and rows of the ledger, for each claim of the index."""
    lines = (ROOT / "docs" / "explanation" / "studies" / "index.md").read_text(encoding="utf-8").splitlines()
    rows = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in lines if re.match(r"\| \[[a-z-]+\]\(", line)]
    # A bar inside a cell is escaped.
    return [
        (study[1 : study.index("]")], says.replace("\\|", "|"), verdict, set(ledger.split(", ")))
        for study, says, verdict, _, ledger in rows
    ]


@pytest.fixture
def told(decided, measured, request):
    """Holds how many of the claims that a row rests on came out how, study by study, against the ledger's cell."""
    number = request.node.name[5:8].upper()
    found: dict[str, Counter[str]] = {}
    for study, _, verdict, rows in decided:
        if number in rows:
            kind = "reproduced in a regime" if verdict.startswith("reproduced only if") else verdict
            found.setdefault(study, Counter())[kind] += 1

    def hold() -> None:
        parts = [
            f"`{study}`: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()) for study, kinds in found.items()
        ]
        measured("; ".join(parts))

    return hold


def test_the_page_has_every_claim_of_every_study(decided):
    expected = {(name, claim.says, frozenset(claim.ledger)) for name in NAMES for claim in load(name).claims}
    assert {(study, says, frozenset(rows - {""})) for study, says, _, rows in decided} == expected
    assert all(VERDICT.fullmatch(verdict) for _, _, verdict, _ in decided)


def test_c69_no_norm_explodes_and_norms_do_not(told):
    told()


def test_c70_post_norm_against_pre_norm(told):
    told()


def test_c71_smoothness_and_rates_by_layer(told):
    told()


def test_c72_centring_and_scale(told):
    told()


def test_c74_covariate_shift(told):
    told()


def test_c75_batch_norm_where_it_fails_and_where_not(told):
    told()


def test_c76_runs_that_explode_although_every_block_is_normalized(measured):
    page = (ROOT / "docs" / "explanation" / "faults.md").read_text(encoding="utf-8")
    runs = page[page.index("## In runs") : page.index("## Clean models and healthy runs")]
    explode = ("learning rate times 30", "a summed loss", "initialisation times 10", "queries and keys that grow")
    rows = [re.split(r" ?\| ?", line)[1:-1] for line in runs.splitlines() if line.startswith("| ")]
    found = [
        (int(trials), float(named.removesuffix(" %")))
        for name, _, _, trials, named, _ in rows
        if name.startswith(explode)
    ]
    trials, named = sum(trials for trials, _ in found), sum(trials * share / 100 for trials, share in found)
    assert trials >= 20
    measured(f"{len(found)} faults that break such runs: {named:.0f} of {trials} named first, with what to change")
