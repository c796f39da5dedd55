"""docs/report.png and docs/report-dark.png: the report of the demo's faulty model, in Debian's Chromium.

    python census/report_picture.py

Each picture holds the words that it shows; tests/census/test_report_picture.py compares them with those of today.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import sync_playwright

from normkit.checkpoint.loading import load_model
from normkit.cli.demonstration import demo_batches
from normkit.cli.measurement import measure
from normkit.demo import write_twins
from normkit.inspection.report.description import describe
from normkit.inspection.result import Inspection

_DOCS = Path(__file__).parents[1] / "docs"
PICTURES = {"light": _DOCS / "report.png", "dark": _DOCS / "report-dark.png"}
_WIDTH, _HEIGHT = 1100, 800
_KEY = "words"


def faulty(folder: Path) -> Inspection:
    """The inspection of the demo's faulty model, which is written to a folder."""
    model = load_model(str(write_twins(folder)[0]))
    return measure(model, demo_batches(model), progress=lambda *_: None)


def words(inspection: Inspection) -> str:
    """The words of a report's first screen, one fact per line."""
    report = describe(inspection)
    facts = [f"{fact.label}: {fact.value}" for fact in report.facts]
    found = [f"{each.severity} {each.rule} {each.title}: {each.measured}" for each in report.findings]
    return "\n".join([report.title, report.verdict.headline, report.verdict.detail, *facts, *found])


def shown(picture: Path) -> str:
    """The words that a picture holds."""
    with Image.open(picture) as image:
        return str(image.info[_KEY])


def main() -> None:
    """Take both pictures."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        inspection = faulty(Path(folder))
        report = inspection.write_html(Path(folder) / "report.html")
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for scheme, picture in PICTURES.items():
            page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT}, color_scheme=scheme)
            page.goto(report.resolve().as_uri())
            info = PngInfo()
            info.add_itxt(_KEY, words(inspection))
            Image.open(io.BytesIO(page.screenshot())).convert("P", palette=Image.Palette.ADAPTIVE).save(
                picture, pnginfo=info, optimize=True
            )
            print(f"{picture.name}: {picture.stat().st_size:,} bytes")
        browser.close()


if __name__ == "__main__":
    main()
