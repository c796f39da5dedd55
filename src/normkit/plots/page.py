"""Many figures as one page: nothing is loaded from elsewhere, both colour schemes, captions as text."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from normkit.plots.drawing import Drawing
from normkit.plots.theme import DARK, LIGHT

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


def page(title: str, drawings: Sequence[Drawing], files: Sequence[Sequence[str]]) -> str:
    """The page as text; the same bytes for the same figures.

    Args:
        title: Its heading.
        drawings: The figures, each of its own name.
        files: For each figure the names of its files, to link to.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    figures = [
        {"drawing": drawing, "svg": _named(drawing), "files": names}
        for drawing, names in zip(drawings, files, strict=True)
    ]
    return environment.from_string(_TEMPLATE).render(title=title, figures=figures, light=LIGHT, dark=DARK) + "\n"


def _named(drawing: Drawing) -> Markup:
    """The figure's element, with caption and description as accessible name."""
    words = f"{drawing.caption} {drawing.description}"
    return Markup(drawing.svg().replace("<svg", Markup('<svg role="img" aria-label="{}"').format(words), 1))
