"""The ledger, and the two shipped models that several claims are measured on."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import normkit as nk
from helpers import ROOT
from normkit import demo

COLUMNS = ("number", "verdict", "statement", "precise", "measured", "check", "notes")


@pytest.fixture(scope="session")
def claims() -> dict[str, dict[str, str]]:
    """Rows of docs/explanation/claims.md by number, each a dictionary of its cells."""
    lines = (ROOT / "docs" / "explanation" / "claims.md").read_text(encoding="utf-8").splitlines()
    rows = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in lines if re.match(r"\| C\d\d ", line)]
    # A bar inside a cell is escaped.
    return {cells[0]: dict(zip(COLUMNS, (cell.replace("\\|", "|") for cell in cells), strict=True)) for cells in rows}


@pytest.fixture
def measured(request: pytest.FixtureRequest, claims: dict[str, dict[str, str]]) -> Callable[[str], None]:
    """Holds the words for what a test `test_cNN_...` measured against the ledger's cell."""

    def hold(words: str) -> None:
        number = re.match(r"test_(c\d\d)_", request.node.name)[1].upper()
        assert claims[number]["measured"] == words

    return hold


@pytest.fixture(scope="session")
def inspections() -> dict[str, nk.Inspection]:
    """The models that ship, inspected on 1,024 tokens of the text that ships."""
    found = {}
    for name in ("layernorm", "rmsnorm"):
        folder = demo.directory(name)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        ids = torch.tensor(tokenizer(demo.text())["input_ids"][:1024]).reshape(4, 256)
        found[name] = nk.inspect(model, {"input_ids": ids}, name=name)
    return found
