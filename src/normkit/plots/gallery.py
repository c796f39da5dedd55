"""The figures of `normkit figures`, drawn from fixed data and from the two models that ship, and the page with all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jinja2 import Environment, StrictUndefined
from torch import Tensor

from normkit import specs
from normkit.geometry.centring import helmert
from normkit.geometry.figures import (
    interlacing,
    invariance_marks,
    jacobian_spectra,
    normalized_together,
    quotient_paths,
    two_epsilons,
)
from normkit.geometry.invariance import invariances
from normkit.geometry.space_figures import centred_clusters, hyperplane_steps, rms_sphere, three_steps, upright
from normkit.inspection.figures import ellipsoid_depth, input_scale, mean_direction
from normkit.inspection.result import Inspection
from normkit.show.drawing import Drawing, labelled
from normkit.show.theme import DARK, LIGHT

_COUNT = 11
GROUPS_OF_CLOUD = tuple(group for group in range(3) for _ in range(_COUNT))
# Seed, centres and spread of three groups each: about a plane, about the origin, off a plane.
_CLOUDS = {
    "steps": (5, ((1.43, -0.25, 0.95), (-0.61, 1.31, 0.35), (-0.83, -1.19, -0.65)), (0.5, 0.5, 0.33)),
    "sphere": (2, ((1.65, 0.55, 0.3), (0.1, -1.3, -0.75), (-1.1, 0.45, 1.3)), (0.35, 0.35, 0.35)),
    "clusters": (7, ((1.7, -0.5, 2.7), (0.2, 1.8, 1.1), (2.5, 1.5, 1.9)), (0.3, 0.3, 0.45)),
}
_KINDS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark;{% for name, code in light.items() %} --{{ name }}: {{ code }};{% endfor %} }
@media (prefers-color-scheme: dark) {
:root {{ "{" }}{% for name, code in dark.items() %} --{{ name }}: {{ code }};{% endfor %} }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 50rem; padding: 3rem 1.5rem 5rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 "Segoe UI", "Helvetica Neue", Arial, "Liberation Sans", sans-serif; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 0.5rem; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 0 0 1.2rem; }
nav ol { columns: 20rem 2; column-gap: 3rem; padding-left: 1.6rem; font-size: 0.92rem; }
nav a { text-decoration: none; }
nav a:hover { text-decoration: underline; }
a { color: var(--note); }
figure { margin: 4rem 0 0; scroll-margin-top: 1rem; }
.scroll { overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 32rem; height: auto; }
figure text { font-family: "DejaVu Sans", Verdana, "Segoe UI", sans-serif; }
figcaption { color: var(--muted); margin-top: 1.2rem; }
figcaption p { margin: 0 0 0.4rem; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; }
</style>
</head>
<body>
<header>
<h1>{{ title }}</h1>
<p>Every point and number is computed by normkit; the files beside this page hold the same figures.</p>
<nav aria-label="Figures"><ol>
{% for figure in figures %}
<li><a href="#figure-{{ figure.drawing.name }}">{{ figure.drawing.title }}</a></li>
{% endfor %}
</ol></nav>
</header>
<main>
{% for figure in figures %}
<figure id="figure-{{ figure.drawing.name }}">
<h2>{{ figure.drawing.title }}</h2>
<div class="scroll">{{ figure.svg }}</div>
<figcaption>
<p>{{ figure.drawing.caption }}</p>
<p>{% for file in figure.files %}<a href="{{ file }}">{{ file }}</a>{{ " " }}{% endfor %}</p>
</figcaption>
</figure>
{% endfor %}
</main>
</body>
</html>
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Twin:
    """One of the two models that ship, as the figures need it."""

    inspection: Inspection
    gains: Mapping[str, Tensor]
    """Path of each norm -> its gain as stored."""


def gallery(twins: Mapping[str, Twin]) -> tuple[Callable[[], Drawing], ...]:
    """The figures in the order of a lesson, each drawn when it is called, under the `theme.style` around that call.

    Args:
        twins: "layernorm" and "rmsnorm".
    """
    sites = twins["layernorm"].inspection.sites
    middle = sites[len(sites) // 2]
    name = f"{middle.path} of the small LayerNorm model"
    layer_norm, rms_norm = specs.TORCH_LAYER_NORM.replace(eps=0.0), specs.LLAMA.replace(eps=0.0)
    return (
        partial(
            three_steps,
            cloud("steps") @ upright().T,
            layer_norm,
            vector(1.3, 0.6, 1.0),
            vector(0.3, 0.1, 0.9),
            GROUPS_OF_CLOUD,
        ),
        partial(
            hyperplane_steps,
            cloud("sphere") @ helmert(4).T,
            layer_norm,
            vector(0.9, 1.5, 0.6, 1.0),
            vector(0.5, 0.0, 0.0, 0.2),
            GROUPS_OF_CLOUD,
        ),
        partial(
            rms_sphere,
            (cloud("sphere") + vector(0, 0, 0.35)) @ upright().T,
            rms_norm,
            vector(0.65, 1.35, 1),
            GROUPS_OF_CLOUD,
        ),
        partial(
            centred_clusters,
            cloud("clusters") @ upright().T,
            GROUPS_OF_CLOUD,
        ),
        normalized_together,
        partial(invariance_marks, invariances()),
        two_epsilons,
        partial(quotient_paths, vector(2.2, -1.6, 0.3), vector(2.0, 2.1, -1.6), 0.5),
        partial(jacobian_spectra, vector(2.1, 0.9, -0.6, 1.4, -1.1, 0.3, 1.7, 0.1), 0.5),
        partial(
            interlacing,
            twins["layernorm"].gains[middle.path],
            middle.spec,
            name,
        ),
        *(
            partial(_of_twin, draw, name, twins[name])
            for draw in (ellipsoid_depth, mean_direction, input_scale)
            for name in _KINDS
        ),
    )


def vector(*entries: float) -> Tensor:
    """Numbers in float64."""
    return torch.tensor(entries, dtype=torch.float64)


def cloud(name: str) -> Tensor:
    """Three groups of points around their centres: (33, 3)."""
    seed, centres, spread = _CLOUDS[name]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(3, _COUNT, 3, generator=generator, dtype=torch.float64)
    return (vector(*sum(centres, ())).reshape(3, 1, 3) + vector(*spread) * drawn).reshape(-1, 3)


def _of_twin(draw: Callable[[Inspection], Drawing], name: str, twin: Twin) -> Drawing:
    drawing = draw(twin.inspection)
    return replace(
        drawing,
        name=f"{drawing.name}-{name}",
        title=f"{drawing.title}: {_KINDS[name]}",
        caption=f"{drawing.caption} Measured on the small {_KINDS[name]} model that ships with normkit.",
    )


def page(title: str, drawings: Sequence[Drawing], files: Sequence[Sequence[str]]) -> str:
    """The page as text; the same bytes for the same figures.

    Args:
        title: Its heading.
        drawings: The figures, each of its own name.
        files: For each figure the names of its files, to link to.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    figures = [
        {"drawing": drawing, "svg": labelled(drawing, f"{drawing.caption} {drawing.description}"), "files": names}
        for drawing, names in zip(drawings, files, strict=True)
    ]
    return environment.from_string(_TEMPLATE).render(title=title, figures=figures, light=LIGHT, dark=DARK) + "\n"
