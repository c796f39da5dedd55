import io
import re

import pytest
from PIL import Image

from helpers import diagonal
from normkit.plots import theme
from normkit.plots.epsilons import two_epsilons


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "scheme"), diagonal(["svg", "png", "pdf"], ["light", "dark"]))
def test_a_second_drawing_has_the_same_bytes(kind, scheme):
    def once():
        with theme.style(scheme):
            return two_epsilons()

    drawing = once()
    first = drawing.file(kind)
    assert once().file(kind) == first
    assert drawing.file(kind) == first


@pytest.mark.slow
def test_files_hold_title_and_caption_and_no_date():
    drawing = two_epsilons()
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
        drawing = two_epsilons()
    with Image.open(io.BytesIO(drawing.file("png"))) as image:
        corners = [image.convert("RGB").getpixel((x, y)) for x in (1, image.width - 2) for y in (1, image.height - 2)]
    paper = {"light": theme.LIGHT, "dark": theme.DARK}[scheme]["paper"]
    assert {"#{:02x}{:02x}{:02x}".format(*corner) for corner in corners} == {paper}


def without_ids(svg):
    """The element without the names that Matplotlib makes of hashes, of colours among others."""
    return re.sub(r"two-epsilons-[mp][0-9a-f]{10}", "", svg)


@pytest.mark.slow
def test_a_dark_drawing_stands_in_a_page_like_a_light_one():
    with theme.style("dark"):
        dark = two_epsilons()
    assert dark.scheme == "dark"
    assert without_ids(dark.svg()) == without_ids(two_epsilons().svg())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_writing_a_file_leaves_the_figure_as_it_was():
    drawing = two_epsilons()
    before = without_ids(drawing.svg())
    drawing.file("png")
    assert without_ids(drawing.svg()) == before
    assert drawing.figure.texts == []
