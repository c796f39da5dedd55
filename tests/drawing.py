"""The drawing of an open page of the explorer, with a hand on it: what the tests of mouse, touch and keys need."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import CDPSession, Page


def as_opened(page: Page) -> Page:
    """The page in its first state, at its top, with nothing in focus, opened or told."""
    page.evaluate(
        """async () => {
          const { DEFAULTS } = normkitExplorer["state.js"];
          document.activeElement.blur();
          for (const part of document.querySelectorAll("details")) part.open = false;
          document.getElementById("message").textContent = "";
          scrollTo(0, 0);
          normkitExplorer.store.set(DEFAULTS);
          await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
        }"""
    )
    page.mouse.move(1, 1)
    return page


def settle(page: Page) -> None:
    """Two frames later: what was asked for is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def set_state(page: Page, **patch: Any) -> None:
    """Change the state of an open page and wait until that is drawn."""
    page.evaluate("(patch) => normkitExplorer.store.set(patch)", patch)
    settle(page)


class Drawing:
    """The drawing of an open page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.box = page.locator("#canvas").bounding_box()

    def state(self) -> dict[str, Any]:
        return self.page.evaluate("normkitExplorer.store.get()")

    def set(self, **patch: Any) -> None:
        set_state(self.page, **patch)

    def settle(self) -> None:
        settle(self.page)

    def markers(self) -> list[tuple[float, float]]:
        """Where the points of the cloud are on the page."""
        places = self.page.evaluate(
            """async () => {
              const { layout, screen } = normkitExplorer["projection.js"];
              const { panels, radius } = normkitExplorer.frame();
              const { width, height } = document.getElementById("canvas").getBoundingClientRect();
              const [box] = layout(panels, { width, height });
              const cloud = panels[0].items.find((item) => item.kind === "points" && item.pick);
              const state = normkitExplorer.store.get();
              return cloud.at.map((at) => screen(at, state, box, radius)).map(({ x, y }) => [x, y]);
            }"""
        )
        return [(self.box["x"] + x, self.box["y"] + y) for x, y in places]

    def lonely(self) -> int:
        """A point with no other near it."""
        places = self.markers()
        return max(
            range(len(places)), key=lambda i: min(math.dist(places[i], p) for j, p in enumerate(places) if j != i)
        )

    def corner(self) -> tuple[float, float]:
        """A place of the drawing with nothing on it."""
        return self.box["x"] + 12, self.box["y"] + self.box["height"] - 12

    def drag(self, start: tuple[float, float], by: tuple[float, float]) -> None:
        mouse = self.page.mouse
        mouse.move(*start)
        mouse.down()
        for share in (0.3, 0.7, 1.0):
            mouse.move(start[0] + share * by[0], start[1] + share * by[1])
        mouse.up()
        self.settle()


class Fingers:
    """Touches, sent as the device would."""

    def __init__(self, page: Page) -> None:
        self.session: CDPSession = page.context.new_cdp_session(page)

    def send(self, kind: str, *places: tuple[float, float]) -> None:
        points = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(places)]
        self.session.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})
