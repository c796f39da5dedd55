"""The pages of the site: those written by hand in docs/, and those generated from the code.

python docs/building/build_site.py    writes build/docs, of which zensical builds build/site
"""

from __future__ import annotations

import shutil
from pathlib import Path

import command_pages
import json_pages
import name_pages
import preset_pages
import rule_pages
from normkit.explorer.exploration import explore_models

ROOT = Path(__file__).parents[2]
SOURCE, TARGET = ROOT / "docs", ROOT / "build" / "docs"
_COPIED = {".md", ".yml", ".png", ".svg", ".css", ".js", ".woff2", ".txt"}


def generated() -> dict[str, str]:
    """The content of each generated file by its path in the site."""
    return {
        **rule_pages.pages(),
        **command_pages.pages(),
        **name_pages.pages(),
        **preset_pages.pages(),
        **json_pages.pages(),
        "tutorials/explorer.html": explore_models([]).html(),
    }


def main() -> None:
    """Write the folder anew."""
    shutil.rmtree(TARGET, ignore_errors=True)
    for path in sorted(SOURCE.rglob("*")):
        if (path.is_file() and path.suffix in _COPIED) or path.name == ".nav.yml":
            copy = TARGET / path.relative_to(SOURCE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    for name, text in generated().items():
        page = TARGET / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
