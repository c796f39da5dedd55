"""In `make test`, gradients are added up over fewer rows, but in the file that tests sums over many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from normkit.testing import derivatives


@pytest.fixture(scope="module", autouse=True)
def _few_rows(request: pytest.FixtureRequest) -> Iterator[None]:
    """A third of what a norm takes is its 65,536 rows."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.pluginmanager.hasplugin("thinned") and request.path.name != "test_derivatives.py":
            patch.setattr(derivatives, "_ROWS", 1 << 12)
        yield
