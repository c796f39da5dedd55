"""The pages of Python names: their lists, written by hand, with links, and one page of docstrings per section."""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "reference" / "api"
FOLDER = "reference/api"
_ITEM = re.compile(r"^- (`\w+`(?:, `\w+`)*)(?=:)", flags=re.MULTILINE)
# Names that have pages of their own.
_ELSEWHERE = {"geometry": "geometry.md", "specs": "../presets.md"}


def pages() -> dict[str, str]:
    """The content of each page and their order, by path."""
    order = ["nav:", "  - index.md"]
    found = {}
    for name, prefix in (("index", "normkit"), ("geometry", "normkit.geometry")):
        opening, *sections = re.split(r"^## ", (SOURCE / f"{name}.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
        parts, linked = [], [opening]
        for section in sections:
            title, _, body = section.partition("\n")
            slug = re.sub(r"\W+", "-", title.lower())
            names = [each for item in _ITEM.findall(body) for each in re.findall(r"\w+", item)]
            linked.append(_with_links(section, f"{slug}.md", prefix))
            if names:
                found[f"{FOLDER}/{slug}.md"] = _page(title, names, prefix)
                parts.append(f"{slug}.md")
        found[f"{FOLDER}/{name}.md"] = "## ".join(linked)
        order += (
            [f"  - {part}" for part in parts]
            if name == "index"
            else ["  - Geometry:", "      - geometry.md", *(f"      - {part}" for part in parts)]
        )
    return {f"{FOLDER}/.nav.yml": "\n".join(order) + "\n", **found}


def _with_links(section: str, page: str, prefix: str) -> str:
    """A section whose names lead to their docstrings."""

    def link(item: re.Match[str]) -> str:
        return "- " + re.sub(r"`(\w+)`", lambda name: f"[{name[0]}]({_target(name[1], page, prefix)})", item[1])

    return _ITEM.sub(link, section)


def _target(name: str, page: str, prefix: str) -> str:
    return _ELSEWHERE.get(name, f"{page}#{prefix}.{name}") if prefix == "normkit" else f"{page}#{prefix}.{name}"


def _page(title: str, names: list[str], prefix: str) -> str:
    heading = title if prefix == "normkit" else f"Geometry: {title[0].lower()}{title[1:]}"
    shown = [name for name in names if prefix != "normkit" or name not in _ELSEWHERE]
    parts = [
        f"# {heading}",
        f"What each of these takes, gives and refuses: {', '.join(f'`{name}`' for name in shown)}.",
    ]
    parts += [f"::: {prefix}.{name}" for name in shown]
    return "\n\n".join(parts) + "\n"
