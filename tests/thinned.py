"""A plugin of pytest, `-p thinned`, for `make test`: every property is tested, the products of its cases are thinned.

- A test marked `exhaustive` is left out.
- Of a test marked `sampled(count)` that many cases are run, evenly spread over all.
- Of any other test function so few cases are run that each value of each parameter is in one of them.
- Hypothesis draws 25 examples for a test instead of 100 (conftest.py), unless the test says how many.

`make test-all` runs without it: all cases.
"""

from __future__ import annotations

import gc
from collections import defaultdict

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `make test-all` runs and `make test` does not."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    kept = {id(item) for cases in functions.values() for item in _thinned(cases)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def pytest_collection_finish() -> None:
    """Take what is imported and collected by now out of the garbage collector.

    It is alive to the end, and to walk it again and again takes a tenth of the processor time of all tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _thinned(cases: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of one test function that are run."""
    cases = [case for case in cases if case.get_closest_marker("exhaustive") is None]
    if cases and (sampled := cases[0].get_closest_marker("sampled")) is not None:
        (count,) = sampled.args
        # From the middle of each of `count` equal parts.
        return (
            [cases[(2 * part + 1) * len(cases) // (2 * count)] for part in range(count)]
            if len(cases) > count
            else cases
        )
    return _covering(cases)


def _covering(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Cases that hold all values together; each is the one of those left that holds most of what is missing."""
    values = {id(case): _values(case) for case in cases}
    missing, chosen = set().union(*values.values()), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(values[id(case)] & missing)))
        missing -= values[id(chosen[-1])]
    return chosen or cases


def _values(case: pytest.Item) -> set[tuple[str, str]]:
    """The parameters of a case, each with its value."""
    call = getattr(case, "callspec", None)
    return set() if call is None else {(name, repr(value)) for name, value in call.params.items()}
