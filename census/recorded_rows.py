"""What recorded rows show of every plain norm class of transformers: docs/reference/recorded-rows.md.

    python census/recorded_rows.py            write the page
    python census/recorded_rows.py --check    say whether it is up to date

Each body of source is built once with random parameters and called on 512 rows; `identify_rows` sees the inputs, the
outputs and, in one of two runs, the parameters as stored. The truth is expected.toml, read from the source.
"""

from __future__ import annotations

import copy
import math
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import normkit as nk
from answers import build, call_of, judge
from definitions import Definition, find
from norm_classes import EXPECTED
from normkit.conventions.eps import EPS
from normkit.identification.recorded_rows import identify_rows
from normkit.identification.spec_readings import CONVENTIONS
from pages import settle

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "recorded-rows.md"
ROWS = 512
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = {"1": (0.0, 0.0), "1e-4 to 10": (-4.0, 1.0)}
"""Root mean squares of the rows -> the decimal logarithms between which they lie."""

HEAD = """\
# What recorded rows show of every norm class of transformers

Written by `python census/recorded_rows.py`. {bodies} bodies of source, of {classes} classes in transformers that
normalize the last axis, are built with random parameters and called on {rows} rows. `nk.identify_rows` is given what
went in, what came out and, where the table says so, the parameters as stored. Each decided field is held against what
the source says (`census/expected.toml`).

**Result**: {answers} answers, {wrong} with a wrong field. {without} gave no spec and said why.

A convention that the rows cannot show stays open, with the rows that would show it. The table says how often each
convention was decided, in per cent of the norms that have it. Rows of one size do not feel eps. A bias that is open was
not added, or is zero. Casts are open here in part only: rows and parameters have one dtype, so a cast to the weight's
dtype and one to the input's give the same bits.

| rows | root mean square | parameters | {names} |
|---|---|---|{lines}
"""


def bodies() -> Iterator[tuple[Definition, Mapping[str, Any], int]]:
    """A class of each body with each of its cases that a spec over the last axis describes, and how many share it."""
    expected = tomllib.loads(EXPECTED.read_text())
    also, apart = expected.pop("also"), expected.pop("apart")
    plain = [each for each in find(also) if not any(re.search(kind["names"], each.name) for kind in apart)]
    shared = Counter(each.body for each in plain)
    for definition in plain:
        # The class that was read stands for those of the same body.
        for case in expected.get(str(definition), {}).get("cases", ()):
            if case.get("verdict", "norm") == "norm" and "spec" in case:
                spec = nk.NormSpec.from_json(case["spec"])
                if spec.axes == (-1,):
                    yield definition, case, shared[definition.body]


def recorded(norm: torch.nn.Module, case: Mapping[str, Any], dtype: torch.dtype, size: str) -> tuple[Tensor, Tensor]:
    """What goes into a norm and what comes out."""
    shape = case["shape"][1:]
    count = max(2, ROWS // math.prod(shape[:-1]))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, *shape, generator=generator)
    x = (x * torch.logspace(*SIZES[size], count).reshape(count, *([1] * len(shape)))).to(dtype)
    with torch.no_grad():
        return x, call_of(case)(copy.deepcopy(norm).to(dtype), x)


def main() -> None:
    """Write the page, or compare it with what would be written."""
    torch.set_num_threads(1)
    decided: Counter[tuple[str, ...]] = Counter()
    asked: Counter[tuple[str, ...]] = Counter()
    outcomes: Counter[str] = Counter()
    classes: dict[str, int] = {}
    for definition, case, count in bodies():
        norm = build(definition, case)
        spec = nk.NormSpec.from_json(case["spec"])
        passport = nk.identify(copy.deepcopy(norm), tuple(case["shape"]), call=call_of(case))
        parts = (passport.weight if spec.has_weight else None, passport.bias if spec.has_bias else None)
        for size in SIZES:
            for name, dtype in DTYPES.items():
                if spec.eps == EPS["float32"] and dtype != torch.float32:
                    # Such a norm takes the machine epsilon of its input's dtype, and the source was read for float32.
                    continue
                try:
                    x, y = recorded(norm, case, dtype, size)
                except RuntimeError:  # parameters that must stay in float32
                    continue
                stored = tuple(None if part is None else part.flatten().to(dtype) for part in parts)
                if any(part is not None and part.shape != x.shape[-1:] for part in stored):
                    # A gain for each head: recordings hold one vector for each norm.
                    continue
                classes[definition.body] = count
                for given in (True, False) if any(part is not None for part in stored) else (True,):
                    found = identify_rows(x, y, *(stored if given else ()))
                    outcome, remark = judge(found, {key: value for key, value in case.items() if key != "readings"})
                    outcomes["wrong" if outcome == "wrong" else "none" if found.spec is None else "spec"] += 1
                    if outcome == "wrong":
                        print(f"{definition}, {name}, {size}: {remark}")
                    row = (name, size, "given" if given else "not given")
                    for convention in set(CONVENTIONS) & set(found.readings):
                        asked[*row, convention] += 1
                        decided[*row, convention] += found.readings[convention].undecidable is None
    names = [name for name in CONVENTIONS if any(key[-1] == name for key in asked)]
    rows = []
    for row in dict.fromkeys(key[:-1] for key in asked):
        shares = [f"{100 * decided[*row, name] / asked[*row, name]:.0f}" if asked[*row, name] else "" for name in names]
        rows.append(f"| {' | '.join(row)} | {' | '.join(shares)} |")
    page = HEAD.format(
        bodies=len(classes),
        classes=sum(classes.values()),
        rows=ROWS,
        answers=outcomes.total(),
        wrong=outcomes["wrong"],
        without=outcomes["none"],
        names=" | ".join(names),
        lines="---:|" * len(names),
    )
    settle(PAGE, "\n".join([page.rstrip("\n"), *rows]) + "\n", check=sys.argv[1:] == ["--check"])


if __name__ == "__main__":
    main()
