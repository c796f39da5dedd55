"""The built site holds together: no dead link or anchor, and nothing that a page loads from the network.

python docs/building/built_site.py    exits with 1 and one line per fault of build/site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).parents[2] / "build" / "site"
# A browser loads a link with one of these rel values only.
_LOADED = {"stylesheet", "icon", "preload", "modulepreload", "manifest", "shortcut"}
_SOURCES = {"src", "srcset", "poster", "data"}


class Page(HTMLParser):
    """The anchors of one page, where its links go and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note what one element says."""
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and _LOADED & set(given.get("rel", "").split()):
            self.loaded.append(given["href"])
        self.loaded += [
            part.split()[0]
            for name in _SOURCES & given.keys()
            for part in (given[name].split(",") if name == "srcset" else [given[name]])
            if part.strip()
        ]


def faults(site: Path) -> list[str]:
    """One line per dead link and per external resource."""
    # The page of a missing address has links from the root of wherever the site is served.
    paths = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in paths}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        found += [f"{name} loads {address}" for address in page.loaded if _is_external(address)]
        for address in {*page.links, *(each for each in page.loaded if not _is_external(each))}:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if not target.exists():
                found.append(f"{name} links to {address}, which is not there")
            # The explorer's fragments are views.
            elif parts.fragment.startswith("v=1&"):
                continue
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name} links to {address}, which has no such anchor")
    for path in sorted(site.rglob("*.css")):
        addresses = re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(site)} loads {each}" for each in addresses if _is_external(each)]
    return found


def _is_external(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def main() -> None:
    """Print each fault."""
    found = faults(SITE)
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
