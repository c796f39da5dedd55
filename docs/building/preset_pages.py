"""The page of presets: each with its formula and where it was read."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

from marking import marked, table
from normkit import specs
from normkit.spec import NormSpec

PAGE = "reference/presets.md"


def pages() -> dict[str, str]:
    """The page, by path."""
    rows = [(f"`{name}`", f"`{getattr(specs, name)}`", marked(words)) for name, words in _described().items()]
    parts = [
        "# Presets",
        f"The conventions of {len(rows)} norms as `NormSpec`s: the formula of each, and the code it was read "
        "from. `nk.specs.LLAMA.replace(eps=1e-5)` is one with another eps; [`NormSpec`](api/specs.md#normkit.NormSpec) "
        "says what each convention means. Sources are module paths of transformers 5.23 and torch 2.13 unless another "
        "is named.",
        table(("preset", "formula", "read from"), rows),
    ]
    return {PAGE: "\n\n".join(parts) + "\n"}


def _described() -> dict[str, str]:
    """The docstring under each preset in the source, in its order."""
    body = ast.parse(Path(specs.__file__).read_text(encoding="utf-8")).body
    found = {}
    for statement, after in pairwise(body):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if isinstance(getattr(specs, name), NormSpec):
                found[name] = " ".join(ast.literal_eval(after.value).split())
    return found
