"""A plugin of pytest, `-p thinned`: of each test function so few cases that each value of each parameter stands in one.

For tests that are asked again under other circumstances, where what two values do together has been asked before.
"""

from __future__ import annotations

from collections import defaultdict

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that hold no value which others do not hold."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    kept = {id(item) for cases in functions.values() for item in _thinned(cases)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def _thinned(cases: list[pytest.Item]) -> list[pytest.Item]:
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
