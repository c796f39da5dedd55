"""The page as one file, every script inside it, so that it opens from a disk or in a sandboxed frame; its clouds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from torch import Tensor

from normkit.errors import InputError
from normkit.show.embedding import packed_json, script_json
from normkit.show.theme import PALETTES

GAIN, BIAS = (0.6, 1.3, 1.0), (-0.3, 0.6, 0.4)
"""Initial positions of the sliders of the page."""

_IMPORT = re.compile(r'^import ({[^}]*}) from "explorer/([^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:const|function) (\w+))", re.MULTILINE)
_PAGE = Path(__file__).parent / "page"


def document(data: dict[str, Any]) -> str:
    """The page as text.

    Args:
        data: What the page shows beyond its own clouds of points; JSON without NaN.
    """
    environment = Environment(
        loader=FileSystemLoader(_PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("index.html").render(
        title=data["title"],
        colours=PALETTES,
        style=Markup((_PAGE / "style.css").read_text(encoding="utf-8")),
        modules=packed_json("".join(modules().values())),
        data=script_json(data),
    )


def modules() -> dict[str, str]:
    """Name of each module -> a statement that makes it a part of `normkitExplorer`, after those that it imports.

    A browser would load each module on its own, which takes longer than to run all of them as one script.
    """
    sources = {path.name: path.read_text(encoding="utf-8") for path in sorted(_PAGE.glob("*.js"))}
    imported = {name: [other for _, other in _IMPORT.findall(source)] for name, source in sources.items()}
    found = {}
    for name in TopologicalSorter(imported).static_order():
        parts = _IMPORT.sub(
            lambda match: f'const {match[1].replace(" as ", ": ")} = normkitExplorer["{match[2]}"];', sources[name]
        )
        exported = ", ".join(_EXPORT.findall(parts))
        found[name] = f"""normkitExplorer["{name}"] = (() => {{
"use strict";
{_EXPORT.sub("", parts)}return {{ {exported} }};
}})();
"""
    return found


@dataclass(frozen=True, eq=False, kw_only=True)
class Cloud:
    """Labelled points."""

    label: str
    points: Tensor
    """Shape (N, n), in float64."""
    groups: tuple[int, ...]
    """The group of each point."""


def cloud(name: str) -> Cloud:
    """One of the clouds of the page.

    Raises:
        InputError: If there is no cloud of that name.

    Example:
        >>> cloud("scatter").points.shape[1]
        3
    """
    every = clouds()
    if name not in every:
        raise InputError(f"the clouds of the page are {', '.join(every)}, got {name!r}; choose one")
    found = every[name]
    return Cloud(
        label=found["label"],
        points=torch.tensor(found["points"], dtype=torch.float64),
        groups=tuple(found["groups"]),
    )


def clouds() -> dict[str, dict[str, Any]]:
    """All clouds as the page reads them: name -> label, n, points, groups."""
    return dict(json.loads((_PAGE / "clouds.json").read_text(encoding="utf-8")))
