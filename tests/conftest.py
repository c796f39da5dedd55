"""One thread, fixed seeds, a fixed order of hypothesis' examples, models that ship, a browser's window, a GPU."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from known_norms import examined_once
from normkit import demo

# Triton reads this when it is imported: without a GPU its kernels are run by its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# As under nohup: whoever starts the tests with SIGINT ignored hands that on to what they start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# readline, which pytest imports, sets the width of the terminal for every child, and `os.environ` may not know of it.
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page

# Examples are the same on every machine; time limits are not a property of the code.
settings.register_profile(
    "fixed", deadline=None, derandomize=True, print_blob=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thinned", settings.get_profile("fixed"), max_examples=25)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("thinned" if config.pluginmanager.has_plugin("thinned") else "fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA GPU"))


@pytest.fixture(autouse=True)
def _single_thread_and_seed() -> None:
    torch.set_num_threads(1)
    # `torch.manual_seed` also notes a stack trace for each device that is not there yet.
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _norms_are_examined_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the norms of libraries compute is tested in tests/identification, and found out once elsewhere."""
    with nullcontext() if request.path.parent.name == "identification" else examined_once():
        yield


@pytest.fixture(scope="session")
def demo_directories() -> dict[str, Path]:
    """The folders of the two models that ship: "layernorm" (a GPT-2) and "rmsnorm" (a Llama)."""
    return {name: demo.directory(name) for name in ("layernorm", "rmsnorm")}


@pytest.fixture(scope="session")
def real_models() -> Path:
    """The folder with trained models of other people, which NORMKIT_REAL_MODELS names; tests of them are exhaustive."""
    if "NORMKIT_REAL_MODELS" not in os.environ:
        pytest.skip("NORMKIT_REAL_MODELS names no folder of real models")
    return Path(os.environ["NORMKIT_REAL_MODELS"])


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium without a window. Where there is none, its tests are skipped, but never in CI."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        message = "no Chromium was found: `apt-get install chromium` lets the tests of the pages run"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--in-process-gpu"]
        browser = playwright.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


# A context of its own takes the browser more than a second of work, a window that another test has left a third of it.
@pytest.fixture(scope="session")
def _only_window(chromium: Browser) -> Iterator[tuple[Page, CDPSession]]:
    page = chromium.new_page()
    yield page, page.context.new_cdp_session(page)
    page.close()


@pytest.fixture
def window(_only_window: tuple[Page, CDPSession]) -> Iterator[Callable[..., Page]]:
    """`window(viewport=..., color_scheme=...)` is the one window of all tests, empty, set up as asked, else as usual.

    Listeners, {event: listener}, hear it until the window is asked for again or the test ends.
    """
    page, session = _only_window
    heard: dict[str, Callable[..., Any]] = {}

    def set_up(
        *,
        listeners: dict[str, Callable[..., Any]] | None = None,
        viewport: dict[str, int] | None = None,
        java_script_enabled: bool = True,
        permissions: Sequence[str] = (),
        color_scheme: str = "light",
        reduced_motion: str = "no-preference",
        forced_colors: str = "none",
    ) -> Page:
        for event, listener in heard.items():
            page.remove_listener(event, listener)
        heard.clear()
        page.goto("about:blank")
        page.set_viewport_size(viewport or {"width": 1280, "height": 720})
        page.emulate_media(
            media="null", color_scheme=color_scheme, reduced_motion=reduced_motion, forced_colors=forced_colors
        )
        session.send("Emulation.setScriptExecutionDisabled", {"value": not java_script_enabled})
        page.context.clear_permissions()
        if permissions:
            page.context.grant_permissions(permissions)
        heard.update(listeners or {})
        for event, listener in heard.items():
            page.on(event, listener)
        return page

    yield set_up
    page.mouse.move(0, 0)
    set_up()
