"""JSON in a script element and a page in a frame: whatever they hold, it stays inside."""

from __future__ import annotations

import base64
import gzip
import json
import math
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from normkit.show.embedding import bars, frame, packed_json, script_json

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


def drawn(*arguments):
    return ElementTree.fromstring(bars(*arguments))


def edges(rectangle):
    top = float(rectangle.get("y"))
    return top, top + float(rectangle.get("height"))


def test_bars_reach_from_zero_to_their_value():
    band, up, down = drawn([2.0, -1.0], 0.0).findall("rect")
    # 96 units for 3: zero stands at 64.
    assert edges(up) == (0.0, 64.0)
    assert edges(down) == (64.0, 96.0)
    assert edges(band) == (32.0, 96.0)


def test_the_mean_is_drawn_where_it_is_within_the_entries():
    assert drawn([1.0, -1.0], 0.5).find("path[@class='mean']").get("d") == "M0 24.0H160"
    assert drawn([1.0, -1.0], 7.0).find("path[@class='mean']") is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_entries_that_are_not_finite_are_left_out(value):
    assert len(drawn([1.0, value], value).findall("rect")) == 2


def test_no_entries_leave_the_band():
    assert len(drawn([], 0.0).findall("rect")) == 1


def test_each_drawing_fills_its_height_on_its_own_scale():
    # Seen on a trained model: beside a raw entry of 200 the scaled ones were flat.
    for factor in (200.0, 1.0, 0.01):
        _, up, down = drawn([0.5 * factor, -0.25 * factor], 0.0).findall("rect")
        assert (edges(up), edges(down)) == ((0.0, 64.0), (64.0, 96.0))
    band, *_ = drawn([200.0], 0.0).findall("rect")
    assert edges(band) == pytest.approx((95.5, 96.0))
