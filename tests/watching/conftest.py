"""What takes long and is tested elsewhere: the formulas of libraries' own norms, and the figures of a page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from known_norms import examined_once


@pytest.fixture(scope="module", autouse=True)
def _norms_are_examined_once() -> Iterator[None]:
    with examined_once():
        yield


@pytest.fixture
def blank_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are written, with nothing on them."""
    monkeypatch.setattr("normkit.inspection.report.description.render", lambda *_, **__: "<html></html>")
