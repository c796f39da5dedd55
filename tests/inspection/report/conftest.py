"""The synthetic inspections, as fixtures. Their figures have tests in tests/inspection, and are drawn once here."""

from collections.abc import Iterator

import pytest

from imagined_inspections import *  # noqa: F403
from rendered_pages import figures_drawn_once


@pytest.fixture(scope="module", autouse=True)
def _figures_are_drawn_once() -> Iterator[None]:
    with figures_drawn_once():
        yield
