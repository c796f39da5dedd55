"""Every norm class of transformers, identified, against what its source says: docs/reference/coverage.md.

    python census/norm_classes.py            write the table
    python census/norm_classes.py --check    say whether the table is up to date

The expected answers are in expected.toml, read from the source of each body and not from any answer of `identify`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from answers import Answer, ask
from coverage_page import Census, table
from definitions import Definition, find
from pages import settle

EXPECTED = Path(__file__).parent / "expected.toml"
TABLE = Path(__file__).parents[1] / "docs" / "reference" / "coverage.md"


class ExpectationError(Exception):
    """A class that no expectation covers, or whose source is not the one that was read."""


def take() -> Census:
    """Find all classes, build them and identify them."""
    expected = tomllib.loads(EXPECTED.read_text())
    also, kinds_apart = expected.pop("also"), expected.pop("apart")
    cases = {entry["source"]: entry["cases"] for entry in expected.values()}
    examples = {entry["source"]: name for name, entry in expected.items()}
    definitions = find(also)
    _check_sources(expected, definitions)
    answers: list[Answer] = []
    apart: dict[str, list[Definition]] = {kind["what"]: [] for kind in kinds_apart}
    for definition in definitions:
        kinds = [kind["what"] for kind in kinds_apart if re.search(kind["names"], definition.name)]
        if kinds:
            apart[kinds[0]].append(definition)
        elif definition.body in cases:
            answers += [ask(definition, case) for case in cases[definition.body]]
        else:
            raise ExpectationError(f"{definition} has a source that was not read: {definition.body}")
    return Census(
        answers=tuple(answers), apart={what: tuple(found) for what, found in apart.items()}, examples=examples
    )


def _check_sources(expected: Mapping[str, Any], definitions: list[Definition]) -> None:
    found = {str(definition): definition.body for definition in definitions}
    for name, entry in expected.items():
        if found.get(name) != entry["source"]:
            raise ExpectationError(f"{name} was read as {entry['source']}, transformers has {found.get(name)}")


def main() -> None:
    """Write the table, or compare it with what would be written."""
    torch.set_num_threads(1)
    settle(TABLE, table(take()), check=sys.argv[1:] == ["--check"])


if __name__ == "__main__":
    main()
