"""docs/report.png: the report of the faulty model of the demo, its first section opened, in Debian's Chromium.

    make demo && python census/report_picture.py normkit-out/gpt2-converted/report.html

It also says how high the page is with its sections closed, and what it weighs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

_WIDTH, _HEIGHT = 1280, 1500
_PICTURE = Path(__file__).parents[1] / "docs" / "report.png"


def main(report: Path) -> None:
    """Take the picture."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": _WIDTH, "height": 600})
        page.goto(report.resolve().as_uri())
        height = page.evaluate("document.documentElement.scrollHeight")
        print(f"{report}: {height:,} pixels high at {_WIDTH}, {report.stat().st_size:,} bytes")
        page.set_viewport_size({"width": _WIDTH, "height": _HEIGHT})
        page.locator("details.part").first.evaluate("part => part.open = true")
        page.screenshot(path=_PICTURE)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
