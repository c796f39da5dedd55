import io
import re
from xml.etree import ElementTree

import pytest
from PIL import Image

from helpers import diagonal
from normkit.show import theme
from normkit.show.axes import new_axes
from normkit.show.drawing import _NO_METADATA, Drawing, element


def rising():
    words = {"title": "A line that rises", "caption": "It rises from 1 to 3.", "description": "One line."}
    with theme.style():
        ax = new_axes()
        ax.plot([0, 1], [1, 3], color=theme.colour("accent"))
        return Drawing(name="rising", figure=ax.figure, **words)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "scheme"), diagonal(["svg", "png", "pdf"], ["light", "dark"]))
def test_a_second_drawing_has_the_same_bytes(kind, scheme):
    def once():
        with theme.style(scheme):
            return rising()

    drawing = once()
    first = drawing.file(kind)
    assert once().file(kind) == first
    assert drawing.file(kind) == first


@pytest.mark.slow
def test_files_hold_title_and_caption_and_no_date():
    drawing = rising()
    svg = drawing.file("svg").decode()
    words = re.sub(r"\s+", " ", " ".join(re.findall(r">([^<]+)<", svg)))
    assert drawing.title in words
    assert drawing.caption in words
    with Image.open(io.BytesIO(drawing.file("png"))) as image:
        assert image.text == {"Title": drawing.title, "Description": drawing.caption}
    pdf = drawing.file("pdf")
    assert b"/Subject" in pdf
    assert b"CreationDate" not in pdf
    assert "date" not in svg.lower().replace("updated", "")


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_ground_of_a_file_is_that_of_its_scheme_to_the_edge(scheme):
    with theme.style(scheme):
        drawing = rising()
    with Image.open(io.BytesIO(drawing.file("png"))) as image:
        corners = [image.convert("RGB").getpixel((x, y)) for x in (1, image.width - 2) for y in (1, image.height - 2)]
    paper = {"light": theme.LIGHT, "dark": theme.DARK}[scheme]["paper"]
    assert {"#{:02x}{:02x}{:02x}".format(*corner) for corner in corners} == {paper}


def without_ids(svg):
    """The element without the names that Matplotlib makes of hashes, of colours among others."""
    return re.sub(r"rising-[mp][0-9a-f]{10}", "", svg)


@pytest.mark.slow
def test_a_dark_drawing_stands_in_a_page_like_a_light_one():
    with theme.style("dark"):
        dark = rising()
    assert dark.scheme == "dark"
    assert without_ids(dark.svg()) == without_ids(rising().svg())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_writing_a_file_leaves_the_figure_as_it_was():
    drawing = rising()
    before = without_ids(drawing.svg())
    drawing.file("png")
    assert without_ids(drawing.svg()) == before
    assert drawing.figure.texts == []


@pytest.fixture(scope="module")
def both():
    """Matplotlib's file of many lines, bars and markers, and the element made of it."""
    with theme.style():
        ax = new_axes()
        ax.vlines(range(40), range(40), range(40, 80), colors=theme.colour("accent"), alpha=0.3)
        ax.bar(range(40), range(40), color=theme.colour("contrast"))
        ax.plot(range(40), range(40), linestyle="none", marker="o", color=theme.colour("third"))
        ax.set_ylabel("0.12345 of it")
        buffer = io.StringIO()
        ax.figure.savefig(buffer, format="svg", transparent=True, metadata=dict(_NO_METADATA["svg"]))
    return buffer.getvalue(), element(buffer.getvalue(), "many", theme.LIGHT)


def shapes(text, name):
    return list(ElementTree.fromstring(re.sub(r'xmlns(:\w+)?="[^"]*"|xlink:', "", text)).iter(name))


def points(found):
    return [float(number) for path in found for number in re.findall(r"-?\d+\.?\d*", path.get("d", ""))]


@pytest.mark.slow
def test_it_is_small_with_every_point_where_it_was_to_a_tenth_and_every_style(both):
    file, made = both
    assert len(made) < len(file) / 2.2
    assert shapes(made, "svg")[0].get("viewBox")
    assert re.findall(r"<g[^>]*>\s*</g>", made) == []
    file, made = both
    before = [path for path in shapes(file, "path") if path.get("d")]
    after = [path for path in shapes(made, "path") if path.get("d")]
    assert len(after) < len(before) / 1.5
    # Joined lines keep their order; what is left out are metadata, not points.
    assert points(after) == pytest.approx(points(before), abs=0.0501)
    markers = [(float(use.get("x", "")), float(use.get("y", ""))) for use in shapes(made, "use")]
    assert len(markers) >= 40
    _, made = both
    classes = dict(re.findall(r"\.(many-\d+)\{([^}]*)\}", made))
    used = set(re.findall(r'class="([^"]*)"', made))
    assert used == set(classes)
    styles = " ".join([*classes.values(), *re.findall(r'style="([^"]*)"', made)])
    assert "stroke-opacity: 0.3" in styles
    assert {"var(--accent)", "var(--contrast)", "var(--third)"} <= set(re.findall(r"var\(--\w+\)", styles))


def test_ids_are_those_referred_to_under_the_prefix(both):
    _, made = both
    ids = re.findall(r' id="([^"]+)"', made)
    referred = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', made))
    assert set(ids) == {one or other for one, other in referred}
    assert len(ids) == len(set(ids))
    assert all(name.startswith("many-") for name in ids)
    assert ">0.12345 of it<" in made


def test_numbers_that_a_reader_reads_keep_their_digits():
    with theme.style():
        ax = new_axes()
        ax.text(0.123456, 0.5, "0.00123 of 0.0625")
    svg = Drawing(name="digits", figure=ax.figure, title="", caption="", description="").svg()
    assert ">0.00123 of 0.0625<" in svg
    assert re.findall(r"<[^>]*\d\.\d{3,}[^>]*>", svg) == []
