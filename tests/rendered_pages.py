"""Pages of inspections and their figures, each drawn once for all tests that only read or open it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from normkit.inspection import figures
from normkit.inspection.report import description as page
from normkit.inspection.result import Inspection
from normkit.show import theme
from normkit.show.drawing import Drawing

_OF_NORMS = (
    figures.input_scale,
    figures.mean_direction,
    figures.gain_spectrum,
    figures.ellipsoid_depth,
    figures.attention_logits,
    figures.attention_entropy,
)


@functools.cache
def rendered(inspection: Inspection) -> str:
    """The page of an inspection; equal inspections share it."""
    return page.render(inspection)


_DRAWN: dict[object, Drawing] = {}
_draw_svg = Drawing.svg


def _once(draw: Callable[[Inspection], Drawing]) -> Callable[[Inspection], Drawing]:
    def shared(inspection: Inspection) -> Drawing:
        shown = replace(inspection, findings=(), checks=(), training=None, foldedness=None, foldedness_unknown="")
        key = draw, shown, theme.scheme()
        if key not in _DRAWN:
            _DRAWN[key] = draw(inspection)
        return _DRAWN[key]

    return shared


@functools.cache
def _svg(figure: Any, name: str, scheme: Any) -> str:
    return _draw_svg(Drawing(figure=figure, name=name, scheme=scheme, title="", caption="", description=""))


@contextmanager
def figures_drawn_once() -> Iterator[None]:
    """Inspections that differ in what no figure of norms shows, as their findings or their run, share these figures."""
    with pytest.MonkeyPatch.context() as patch:
        for draw in _OF_NORMS:
            patch.setattr(figures, draw.__name__, _once(draw))
        patch.setattr(Drawing, "svg", lambda drawing: _svg(drawing.figure, drawing.name, drawing.scheme))
        yield
