"""A figure's SVG in a page: a fraction of Matplotlib's bytes, and the same picture."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import pytest

from normkit.plots import theme
from normkit.plots.element import element


@pytest.fixture(scope="module")
def both() -> tuple[str, str]:
    """Matplotlib's file of many lines, bars and markers, and the element made of it."""
    with theme.style():
        ax = theme.new_axes()
        ax.vlines(range(40), range(40), range(40, 80), colors=theme.colour("accent"), alpha=0.3)
        ax.bar(range(40), range(40), color=theme.colour("contrast"))
        ax.plot(range(40), range(40), linestyle="none", marker="o", color=theme.colour("third"))
        ax.set_ylabel("0.12345 of it")
        buffer = io.StringIO()
        ax.figure.savefig(buffer, format="svg", transparent=True, metadata=dict(theme._NO_METADATA["svg"]))
    return buffer.getvalue(), element(buffer.getvalue(), "many", theme.LIGHT)


def shapes(text: str, name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(re.sub(r'xmlns(:\w+)?="[^"]*"|xlink:', "", text)).iter(name))


def points(found: list[ElementTree.Element]) -> list[float]:
    return [float(number) for path in found for number in re.findall(r"-?\d+\.?\d*", path.get("d", ""))]


@pytest.mark.slow
def test_it_is_small_and_nests(both: tuple[str, str]) -> None:
    file, made = both
    assert len(made) < len(file) / 2.2
    assert shapes(made, "svg")[0].get("viewBox")
    assert re.findall(r"<g[^>]*>\s*</g>", made) == []


@pytest.mark.slow
def test_every_point_is_where_it_was_to_a_tenth(both: tuple[str, str]) -> None:
    file, made = both
    before = [path for path in shapes(file, "path") if path.get("d")]
    after = [path for path in shapes(made, "path") if path.get("d")]
    assert len(after) < len(before) / 1.5
    # Joined lines keep their order; what is left out are metadata, not points.
    assert points(after) == pytest.approx(points(before), abs=0.0501)
    markers = [(float(use.get("x", "")), float(use.get("y", ""))) for use in shapes(made, "use")]
    assert len(markers) >= 40


@pytest.mark.slow
def test_every_style_is_kept(both: tuple[str, str]) -> None:
    _, made = both
    classes = dict(re.findall(r"\.(many-\d+)\{([^}]*)\}", made))
    used = set(re.findall(r'class="([^"]*)"', made))
    assert used == set(classes)
    styles = " ".join([*classes.values(), *re.findall(r'style="([^"]*)"', made)])
    assert "stroke-opacity: 0.3" in styles
    assert {"var(--accent)", "var(--contrast)", "var(--third)"} <= set(re.findall(r"var\(--\w+\)", styles))


def test_ids_are_those_referred_to_under_the_prefix(both: tuple[str, str]) -> None:
    _, made = both
    ids = re.findall(r' id="([^"]+)"', made)
    referred = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', made))
    assert set(ids) == {one or other for one, other in referred}
    assert len(ids) == len(set(ids))
    assert all(name.startswith("many-") for name in ids)
    assert ">0.12345 of it<" in made
