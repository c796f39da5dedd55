"""What the norms of libraries compute is tested elsewhere, and found out once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from known_norms import examined_once


@pytest.fixture(scope="module", autouse=True)
def _norms_are_examined_once() -> Iterator[None]:
    with examined_once():
        yield
