"""Where the page is opened: from a disk, in a sandboxed frame of a notebook, and with scripts off."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import pytest

from normkit.explorer import document

if TYPE_CHECKING:
    from playwright.sync_api import Frame, Page

pytestmark = pytest.mark.browser

READY = "html[data-ready='true']"


def test_from_a_disk_it_is_one_file_that_asks_for_nothing_and_is_as_it_was_when_reloaded(explorer):
    page = explorer(hash="#stage=2")
    assert page.url.startswith("file:")
    assert page.evaluate("normkitExplorer.store.get().stage") == 2
    asked = "performance.getEntriesByType('resource').filter(({ name }) => !name.startsWith('data:'))"
    assert page.evaluate(asked) == []
    page.evaluate("normkitExplorer.store.set({ edits: { 3: [1, -2.5, 0.125] }, eps: 0, yaw: 1.25 })")
    page.wait_for_function("() => location.hash.includes('yaw')")
    before = page.evaluate("normkitExplorer.store.get()")
    page.reload()
    page.wait_for_selector(READY, state="attached")
    assert page.evaluate("normkitExplorer.store.get()") == before


def test_the_address_follows_and_a_pasted_link_is_taken_over(explorer):
    page = explorer()
    assert page.evaluate("location.hash") == ""
    entries = page.evaluate("history.length")
    page.evaluate("normkitExplorer.store.set({ stage: 2, mode: 'rms' })")
    page.wait_for_function("() => location.hash === '#v=1&mode=rms&stage=2'")
    page.evaluate("normkitExplorer.store.set({ stage: 0, mode: 'layer' })")
    page.wait_for_function("() => location.hash === '#v=1'")
    assert page.evaluate("history.length") == entries
    page.evaluate("location.hash = '#scene=depth&depth=99'")
    page.wait_for_function("() => normkitExplorer.store.get().scene === 'depth'")
    assert page.text_content("#message") == 'depth should be a whole number from 1 to 48, not "99": it is "48" here.'


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hash", ["#v=7&stage=2&future=1", "#scene=<script>alert(1)</script>", "#" + "k=1&" * 3000])
def test_a_bad_link_opens_the_page_and_is_told(explorer, hash):
    page = explorer(hash=hash)
    assert page.text_content("#message").endswith(".")
    assert page.evaluate("normkitExplorer.store.get().scene") == "three"
    assert page.evaluate("normkitExplorer.commands().length") > 10
    assert page.evaluate("({}).stage === undefined")


@pytest.fixture
def framed(window, tmp_path, page_data: dict[str, Any]):
    """The page as a notebook shows it: `framed(sandbox) -> (page, frame, complaints)`."""

    def framed(sandbox: str = "allow-scripts allow-downloads") -> tuple[Page, Frame, list[str]]:
        host = tmp_path / "notebook.html"
        inner = html.escape(document.document(page_data))
        host.write_text(
            f'<!doctype html><title>notebook</title><iframe sandbox="{sandbox}" srcdoc="{inner}" '
            'width="1000" height="900"></iframe>',
            encoding="utf-8",
        )
        complaints: list[str] = []
        listeners = {
            "pageerror": lambda error: complaints.append(f"error: {error}"),
            "console": lambda message: complaints.append(f"{message.type}: {message.text}"),
        }
        page = window(listeners=listeners, viewport={"width": 1050, "height": 950})
        page.goto(host.as_uri())
        frame = page.frames[1]
        if "allow-scripts" in sandbox:
            frame.wait_for_selector(READY, state="attached")
        return page, frame, complaints

    return framed


def press(frame: Frame, button: str) -> None:
    frame.evaluate("id => { document.getElementById(id).closest('details').open = true; }", button)
    frame.click(f"#{button}")


def test_in_a_sandboxed_frame_it_works_and_shows_the_link_that_it_may_not_copy(framed):
    page, frame, complaints = framed()
    assert frame.evaluate("() => { try { return localStorage && 'open'; } catch { return 'closed'; } }") == "closed"
    assert frame.evaluate(
        "() => { try { history.replaceState(null, '', '#a'); } catch (error) { return error.name; } }"
    ) == ("SecurityError")
    entries = page.evaluate("history.length")
    frame.evaluate("normkitExplorer.store.set({ stage: 2 })")
    frame.wait_for_function("() => location.hash === '#v=1&stage=2'")
    frame.evaluate("normkitExplorer.store.set({ stage: 3 })")
    frame.wait_for_function("() => location.hash === '#v=1&stage=3'")
    assert frame.evaluate("normkitExplorer.store.get().stage") == 3
    assert page.evaluate("history.length") == entries
    assert complaints == []
    # Here the browser itself complains.
    press(frame, "link")
    frame.wait_for_selector("#copy")
    assert frame.input_value("#copy") == "#v=1&stage=3"
    assert "The clipboard is closed to this page" in frame.text_content("#message")


@pytest.mark.exhaustive
def test_a_sandboxed_frame_saves_pictures(framed):
    page, frame, complaints = framed()
    for button in ("png", "svg"):
        with page.expect_download() as download:
            press(frame, button)
        assert download.value.suggested_filename == f"normkit-three.{button}"
        assert download.value.path().stat().st_size > 1000
    assert complaints == []


def test_without_scripts_it_says_so_and_shows_a_figure(window, tmp_path, page_data):
    path = tmp_path / "page.html"
    path.write_text(document.document(page_data), encoding="utf-8")
    for scheme, paper in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(19, 22, 25)")):
        page = window(java_script_enabled=False, color_scheme=scheme, viewport={"width": 320, "height": 600})
        page.goto(path.as_uri())
        assert page.locator(".noscript").is_visible()
        assert "JavaScript, which is off" in page.text_content(".noscript")
        figure = page.locator("svg[role=img]")
        assert figure.is_visible()
        assert figure.bounding_box()["width"] <= 320
        assert figure.locator("text").all_text_contents() == ["all-ones", "mean = 0", "radius √3"]
        assert figure.locator("rect").evaluate("rect => getComputedStyle(rect).fill") == paper
        assert page.locator("main").is_hidden()
        assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_a_frame_without_scripts_shows_the_figure(framed):
    _, frame, _ = framed("allow-downloads")
    assert frame.locator("svg[role=img]").is_visible()
