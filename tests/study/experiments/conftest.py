"""Every run of an arm is inspected at its end, which takes longer than the few steps of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from normkit.study import probing


@pytest.fixture(scope="module", autouse=True)
def _runs_are_not_inspected(pytestconfig: pytest.Config) -> Iterator[None]:
    """In `make test`, where test_probing.py and test_laboratory.py alone ask what a run's inspection finds."""
    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.pluginmanager.hasplugin("thinned"):
            patch.setattr(probing, "findings", lambda *_: ())
        yield
