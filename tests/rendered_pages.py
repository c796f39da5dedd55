"""Pages of inspections and their figures, each drawn once for all tests that only read or open it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from normkit.inspection import figures
from normkit.inspection.report import description as page
from normkit.inspection.result import Inspection
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


@contextmanager
def figures_drawn_once() -> Iterator[None]:
    """Inspections that differ in what no figure of norms shows, as their findings or their run, share these figures."""
    drawn: dict[object, Drawing] = {}

    def once(draw: Callable[[Inspection], Drawing]) -> Callable[[Inspection], Drawing]:
        def shared(inspection: Inspection) -> Drawing:
            shown = replace(inspection, findings=(), checks=(), training=None, foldedness=None, foldedness_unknown="")
            if (draw, shown) not in drawn:
                drawn[draw, shown] = draw(inspection)
            return drawn[draw, shown]

        return shared

    svg = functools.cache(lambda figure, name, scheme: _svg(Drawing(figure=figure, name=name, scheme=scheme, **_WORDS)))
    with pytest.MonkeyPatch.context() as patch:
        for draw in _OF_NORMS:
            patch.setattr(figures, draw.__name__, once(draw))
        patch.setattr(Drawing, "svg", lambda drawing: svg(drawing.figure, drawing.name, drawing.scheme))
        yield


_svg = Drawing.svg
_WORDS = dict.fromkeys(("title", "caption", "description"), "")
