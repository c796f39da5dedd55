"""What takes long and is tested elsewhere: the figures of a page."""

from __future__ import annotations

import pytest


@pytest.fixture
def blank_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are written, with nothing on them."""
    monkeypatch.setattr("normkit.inspection.report.description.render", lambda *_, **__: "<html></html>")
