"""The synthetic inspections; and norms of libraries are examined once: what they compute is tested elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from imagined_inspections import *  # noqa: F403
from known_norms import examined_once


@pytest.fixture(scope="module", autouse=True)
def _norms_are_examined_once() -> Iterator[None]:
    with examined_once():
        yield
