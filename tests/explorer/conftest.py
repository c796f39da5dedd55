"""The page's own modules in a real browser, one by one; and the whole page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from normkit.explorer import document

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_PAGE = Path(document.__file__).parent / "page"

# What a module returns comes back as JSON: typed arrays as arrays, numbers that JSON has no word for as {"$": word}.
_BRIDGE = """
globalThis.load = (name) => import(`explorer/${name}`);
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
        """Around a page that holds the import map."""
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


# A page of its own takes the browser a second of work, a page that another test has left a quarter of it.
@pytest.fixture(scope="session")
def _sheet(chromium: Browser) -> Iterator[Page]:
    page = chromium.new_page()
    yield page
    page.close()


@pytest.fixture(scope="session")
def _window(chromium: Browser) -> Iterator[Page]:
    page = chromium.new_page()
    yield page
    page.close()


@pytest.fixture(scope="module")
def modules(_sheet: Page) -> Modules:
    """`modules("norms.js", "normalize", points, norm)`; no other file's tests have asked these modules for anything."""
    imports = {name: f"data:text/javascript,{quote(source)}" for name, source in document.modules().items()}
    _sheet.goto("about:blank")
    _sheet.set_content(
        f'<!doctype html><script type="importmap">{json.dumps({"imports": imports})}</script><script>{_BRIDGE}</script>'
    )
    return Modules(_sheet)


def _page_data() -> dict[str, Any]:
    clouds = json.loads((_PAGE / "clouds.json").read_text(encoding="utf-8"))
    return {"schema": 1, "title": "normkit explore", "notes": [], "start": {}, "clouds": clouds, "models": []}


@pytest.fixture
def page_data() -> dict[str, Any]:
    """What the page holds without a model: its own clouds of points."""
    return _page_data()


@pytest.fixture
def explorer(
    chromium: Browser, _window: Page, tmp_path: Path, page_data: dict[str, Any]
) -> Iterator[Callable[..., Page]]:
    """`explorer(data, hash="#...", viewport=..., color_scheme=...)` opens the whole page from a file and waits for it.

    The test fails on any error of a script, any message of the browser's console, and any request.
    """
    yield from _explorer(chromium, tmp_path, page_data, _window)


@pytest.fixture(scope="module")
def lasting_explorer(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Page]]:
    """The same for pages that the tests of a file share; the last of these tests fails on what went wrong."""
    yield from _explorer(chromium, tmp_path_factory.mktemp("explorer"), _page_data(), None)


_MEDIA = {"color_scheme": "light", "reduced_motion": "no-preference", "forced_colors": "none"}


def _set_up(window: Page, viewport: dict[str, int], media: dict[str, Any]) -> Page:
    window.set_viewport_size(viewport)
    window.emulate_media(media="null", **_MEDIA | media)
    return window


def _explorer(
    chromium: Browser, folder: Path, page_data: dict[str, Any], window: Page | None
) -> Iterator[Callable[..., Page]]:
    """Opens the first page in the window that is there, if that can be had as asked for; others in one of their own."""
    pages: list[Page] = []
    complaints: list[str] = []
    listeners = {
        "pageerror": lambda error: complaints.append(f"error: {error}"),
        "console": lambda message: complaints.append(f"{message.type}: {message.text}"),
        "request": lambda request: complaints.append(f"request: {request.url}") if _leaves(request) else None,
    }

    def open_page(data: dict[str, Any] | None = None, hash: str = "", **options: Any) -> Page:
        path = folder / f"explorer-{len(pages)}.html"
        path.write_text(document.document(page_data | (data or {})), encoding="utf-8")
        media = {name: value for name, value in options.items() if name in _MEDIA}
        if window and window not in pages and options.keys() <= {"viewport", *media}:
            pages.append(_set_up(window, options.get("viewport", {"width": 1280, "height": 720}), media))
        else:
            pages.append(chromium.new_context(**options).new_page())
        page = pages[-1]
        for event, listener in listeners.items():
            page.on(event, listener)
        page.goto(path.as_uri() + hash)
        page.wait_for_selector("html[data-ready='true']", state="attached", timeout=5000)
        return page

    def _leaves(request: Any) -> bool:
        is_document = request.is_navigation_request() and request.url.startswith("file:")
        return not is_document and not request.url.startswith(("data:", "blob:"))

    yield open_page
    for page in pages:
        if page is not window:
            page.context.close()
            continue
        page.mouse.move(0, 0)
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        page.goto("about:blank")
    assert complaints == []
