"""The page as one file, every script inside it, so that it opens from a disk or in a sandboxed frame; its clouds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from torch import Tensor

from normkit.errors import InputError
from normkit.show.embedding import packed_json, script_json
from normkit.show.theme import PALETTES

GAIN, BIAS = (0.6, 1.3, 1.0), (-0.3, 0.6, 0.4)
"""Initial positions of the sliders of the page."""

_AS_THEY_ARE = "".join(letter for letter in map(chr, range(32, 127)) if letter not in "%#")
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
        modules=packed_json({"imports": modules()}),
        data=script_json(data),
    )


def modules() -> dict[str, str]:
    """Name under which scripts import a module -> its source as a data: URL."""
    # A URL's parser drops line ends and tabs, "#" ends the URL, "%" begins an escape; more escapes would open slower.
    return {
        f"explorer/{path.name}": "data:text/javascript," + quote(path.read_text(encoding="utf-8"), safe=_AS_THEY_ARE)
        for path in sorted(_PAGE.glob("*.js"))
    }


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
