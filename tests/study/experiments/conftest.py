"""Every run of an arm is inspected at its end, which takes longer than the few steps of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from normkit.study import arm_context


@pytest.fixture(scope="module", autouse=True)
def _runs_are_not_inspected(pytestconfig: pytest.Config) -> Iterator[None]:
    """In `make test`, where only test_arm_context.py tests the findings of a run."""
    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.pluginmanager.hasplugin("thinned"):
            patch.setattr(arm_context, "findings", lambda *_: ())
        yield
