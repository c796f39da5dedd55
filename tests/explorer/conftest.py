"""The page's own modules in a real browser, one by one; and the whole page."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from drawing import as_opened, set_state
from normkit.explorer import document

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_PAGE = Path(document.__file__).parent / "page"

# What a module returns comes back as JSON: typed arrays as arrays, numbers that JSON has no word for as {"$": word}.
_BRIDGE = """
globalThis.load = (name) => normkitExplorer[name];
const plain = (key, value) =>
  typeof value === "number" && (!Number.isFinite(value) || Object.is(value, -0))
    ? { $: Object.is(value, -0) ? "-0" : String(value) }
    : ArrayBuffer.isView(value) ? Array.from(value) : value;
globalThis.answer = async (script, argument) => {
  const result = await (0, eval)(`(${script})`)(argument);
  return JSON.stringify(result, plain) ?? "null";
};
"""
_EACH = """async ([file, name, cases]) => {
  const exported = (await load(file))[name];
  return cases.map((given) => (typeof exported === "function" ? exported(...given) : exported));
}"""
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf, "-0": -0.0}


class Modules:
    """Calls what the page's modules export. Numbers arrive as they are, NaN and the infinities too."""

    def __init__(self, page: Page) -> None:
        """Around a page that holds the modules."""
        self.page = page

    def __call__(self, file: str, name: str, *arguments: Any) -> Any:
        """What the export returns (or is, if it is no function)."""
        return self.each(file, name, [arguments])[0]

    def each(self, file: str, name: str, cases: list[Any]) -> list[Any]:
        """What it returns for each list of arguments; all in one message to the browser."""
        return self.run(_EACH, [file, name, [list(arguments) for arguments in cases]])

    def run(self, script: str, argument: Any = None) -> Any:
        """What a function of the page, given as text, returns; `await load("norms.js")` in it is a module."""
        text = self.page.evaluate("([script, argument]) => answer(script, argument)", [script, argument])
        return json.loads(text, object_hook=lambda found: _NUMBERS[found["$"]] if set(found) == {"$"} else found)


@pytest.fixture(scope="session")
def _sheet(chromium: Browser) -> Iterator[Page]:
    page = chromium.new_page()
    yield page
    page.close()


@pytest.fixture(scope="session")
def modules(_sheet: Page) -> Modules:
    """`modules("norms.js", "normalize", points, norm)`: what they return depends on their arguments alone."""
    _sheet.goto("about:blank")
    _sheet.set_content("<!doctype html>")
    parts = [part for name, part in document.modules().items() if name != "main.js"]
    _sheet.add_script_tag(content="".join(["globalThis.normkitExplorer = {};", *parts, _BRIDGE]))
    return Modules(_sheet)


def _page_data() -> dict[str, Any]:
    clouds = json.loads((_PAGE / "clouds.json").read_text(encoding="utf-8"))
    return {"schema": 1, "title": "normkit explore", "notes": [], "start": {}, "clouds": clouds, "models": []}


@pytest.fixture
def page_data() -> dict[str, Any]:
    """What the page holds without a model: its own clouds of points."""
    return _page_data()


@pytest.fixture
def explorer(window: Callable[..., Page], tmp_path: Path, page_data: dict[str, Any]) -> Iterator[Callable[..., Page]]:
    """`explorer(data, hash="#...", viewport=..., color_scheme=...)` opens the whole page from a file and waits for it.

    The test fails on any error of a script, any message of the browser's console, any dialog, and any request.
    """
    yield from _explorer(window, tmp_path, page_data)


@pytest.fixture(scope="module")
def lasting_explorer(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Page]]:
    """The same for pages that the tests of a file share; the last of these tests fails on what went wrong."""
    contexts = []

    def window(listeners: dict[str, Callable[..., Any]], **options: Any) -> Page:
        contexts.append(chromium.new_context(**options))
        page = contexts[-1].new_page()
        for event, listener in listeners.items():
            page.on(event, listener)
        return page

    yield from _explorer(window, tmp_path_factory.mktemp("explorer"), _page_data())
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def _lasting_page(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, list[str]]]:
    page, complaints = chromium.new_page(), []
    for event, listener in _listeners(complaints).items():
        page.on(event, listener)
    yield _opened(page, tmp_path_factory.mktemp("explorer") / "explorer.html", _page_data()), complaints
    page.close()


@pytest.fixture
def lasting_page(_lasting_page: tuple[Page, list[str]]) -> Iterator[Callable[..., Page]]:
    """`lasting_page(viewport=..., color_scheme=..., stage=2)`: what `explorer()` opens, opened once, in a state.

    For tests that change nothing of it but state, focus, scrolling, and what is folded and said.
    """
    page, complaints = _lasting_page

    def set_up(
        viewport: dict[str, int] | None = None,
        color_scheme: str = "light",
        reduced_motion: str = "no-preference",
        **patch: Any,
    ) -> Page:
        page.set_viewport_size(viewport or {"width": 1280, "height": 720})
        page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
        as_opened(page)
        set_state(page, **patch)
        return page

    yield set_up
    found = complaints.copy()
    complaints.clear()
    assert found == []


def _opened(page: Page, path: Path, data: dict[str, Any], hash: str = "") -> Page:
    path.write_text(document.document(data), encoding="utf-8")
    page.goto(path.as_uri() + hash)
    page.wait_for_selector("html[data-ready='true']", state="attached")
    return page


def _listeners(complaints: list[str]) -> dict[str, Callable[..., Any]]:
    def leaves(request: Any) -> bool:
        is_document = request.is_navigation_request() and request.url.startswith("file:")
        return not is_document and not request.url.startswith(("data:", "blob:"))

    return {
        "pageerror": lambda error: complaints.append(f"error: {error}"),
        "console": lambda message: complaints.append(f"{message.type}: {message.text}"),
        "dialog": lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()),
        "request": lambda request: complaints.append(f"request: {request.url}") if leaves(request) else None,
    }


def _explorer(window: Callable[..., Page], folder: Path, page_data: dict[str, Any]) -> Iterator[Callable[..., Page]]:
    complaints: list[str] = []
    files = itertools.count()

    def open_page(data: dict[str, Any] | None = None, hash: str = "", **options: Any) -> Page:
        page = window(listeners=_listeners(complaints), **options)
        return _opened(page, folder / f"explorer-{next(files)}.html", page_data | (data or {}), hash)

    yield open_page
    assert complaints == []
