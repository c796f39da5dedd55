"""The package: every public name resolves, is documented on its page, and has an example that runs."""

from __future__ import annotations

import ast
import re

import pytest

from helpers import ROOT, SOURCE
from normkit import geometry


def test_all_is_sorted_and_defined_here():
    public = set()
    for path in (SOURCE / "geometry").glob("*.py"):
        if path.stem not in ("__init__", "rows"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            public |= {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert geometry.__all__ == sorted(geometry.__all__)
    assert set(geometry.__all__) <= {name for name in public if not name.startswith("_")}


def test_every_name_is_documented_and_nothing_else():
    lines = (ROOT / "docs" / "reference" / "api" / "geometry.md").read_text(encoding="utf-8").splitlines()
    documented = [
        name for line in lines if line.startswith("- `") for name in re.findall(r"`(\w+)`", line.split(":")[0])
    ]
    assert sorted(documented) == geometry.__all__


@pytest.mark.parametrize("name", geometry.__all__)
def test_what_is_called_has_an_example(name):
    value = getattr(geometry, name)
    assert value.__doc__
    assert isinstance(value, type) or ">>>" in value.__doc__
