"""JSON in a script element and a page in a frame: whatever they hold, it stays inside."""

from __future__ import annotations

import base64
import gzip
import json
from html.parser import HTMLParser

import pytest

from normkit.report.embedding import frame, packed_json, script_json

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>&amp;\u2028\"'"


def test_no_character_can_end_the_script() -> None:
    content = {HOSTILE: [HOSTILE, 1.5, None, "\ud800", "ä"]}
    text = script_json(content)
    assert not set(text) & set("<>&\u2028")
    assert text.isascii()
    assert json.loads(text) == content


def test_packed_it_is_base64_that_repeats() -> None:
    content = {HOSTILE: [HOSTILE, 1.5, None, "\ud800", "ä"] * 50}
    text = packed_json(content)
    assert json.loads(gzip.decompress(base64.b64decode(text, validate=True))) == content
    assert text == packed_json(content)
    assert len(text) < len(script_json(content)) / 5


def test_what_is_no_json_is_refused() -> None:
    for kind in (script_json, packed_json):
        with pytest.raises(ValueError, match="not JSON compliant"):
            kind([float("nan")])


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_page_in_a_frame_is_one_attribute() -> None:
    page = f"<!doctype html><p title='{HOSTILE}'>"
    ((tag, attributes),) = Tags(frame(page, HOSTILE, height=300, sandbox="allow-scripts")).found
    assert tag == "iframe"
    assert attributes == {
        "title": HOSTILE,
        "sandbox": "allow-scripts",
        "style": "width: 100%; height: 300px; border: 0",
        "srcdoc": page,
    }
