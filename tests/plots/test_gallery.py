import dataclasses
import re
from html.parser import HTMLParser

import pytest
import torch

from normkit import specs
from normkit.geometry.figures import jacobian_spectra, two_epsilons
from normkit.plots.gallery import Twin, gallery, page
from normkit.show import theme

# Draws every figure; each has a quick test of its own.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def twins(healthy):
    gains = {site.path: torch.linspace(0.5, 1.5, 64) for site in healthy.sites}
    layer = Twin(inspection=healthy, gains=gains)
    sites = tuple(dataclasses.replace(site, spec=specs.LLAMA) for site in healthy.sites)
    return {"layernorm": layer, "rmsnorm": Twin(inspection=dataclasses.replace(healthy, sites=sites), gains=gains)}


@pytest.fixture(scope="module")
def light(twins):
    """Every figure."""
    with theme.style("light"):
        return [draw() for draw in gallery(twins)]


def assert_worded(drawings, scheme):
    assert len({drawing.name for drawing in drawings}) == len(drawings) == 16
    for drawing in drawings:
        assert drawing.scheme == scheme
        assert len(drawing.title) < 66, "one line of a terminal and of a file"
        assert drawing.caption.endswith(".")
        assert drawing.description.endswith(".")


def test_every_figure_has_words_and_a_name_of_its_own(light):
    assert_worded(light, "light")


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_draws_in_either_scheme(twins, scheme):
    with theme.style(scheme):
        made = [draw() for draw in gallery(twins)]
    assert_worded(made, scheme)
    for drawing in made:
        svg = drawing.svg()
        assert len(svg.encode()) < 100_000
        assert re.findall(r"#[0-9a-fA-F]{6}\b", svg) == []


def test_figures_of_the_two_models_say_which(twins, light):
    drawings = {drawing.name: drawing for drawing in light}
    for kind, word in (("layernorm", "LayerNorm"), ("rmsnorm", "RMSNorm")):
        for name in ("ellipsoid-depth", "mean-direction", "input-scale"):
            drawing = drawings[f"{name}-{kind}"]
            assert drawing.title.endswith(f": {word}")
            assert drawing.caption.endswith(f"small {word} model that ships with normkit.")
    middle = twins["layernorm"].inspection.sites[len(twins["layernorm"].inspection.sites) // 2]
    assert middle.path in drawings["interlacing"].caption


@pytest.mark.exhaustive
def test_the_data_are_fixed(twins, light):
    torch.manual_seed(1)
    for first, second in zip(light, gallery(twins), strict=True):
        assert first.svg() == second().svg()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "scheme"), [("svg", "light"), ("png", "dark"), ("pdf", "light")])
def test_files_of_a_second_run_have_the_same_bytes(twins, kind, scheme):
    """A third of the figures in each format: all of them are held to their data above."""
    third = slice(("svg", "png", "pdf").index(kind), None, 3)
    with theme.style(scheme):
        for first, second in zip(gallery(twins)[third], gallery(twins)[third], strict=True):
            assert first().file(kind) == second().file(kind)


def overlaps(ax):
    """Pairs of words in one panel that run into each other."""
    renderer = ax.figure.canvas.get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in ax.texts if text.get_text()]
    return [(a, b) for k, (a, one) in enumerate(boxes) for b, other in boxes[:k] if one.overlaps(other)]


def test_words_do_not_run_into_each_other_nor_out_of_the_figure(light):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for drawing in light:
        FigureCanvasAgg(drawing.figure).draw()
        renderer = drawing.figure.canvas.get_renderer()
        for ax in drawing.figure.axes:
            assert overlaps(ax) == [], drawing.name
            for text in ax.texts:
                box = text.get_window_extent(renderer)
                assert box.x0 >= -1, (drawing.name, text.get_text())
                assert box.x1 <= drawing.figure.bbox.width + 1, (drawing.name, text.get_text())


class Elements(HTMLParser):
    """Every start tag with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def attributes(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def drawings():
    return two_epsilons(), jacobian_spectra(torch.tensor([1.0, 2.0, 4.0, 8.0]).double(), 0.5)


@pytest.fixture(scope="module")
def text(drawings):
    return page('Figures & <"more">', drawings, [["a.svg", "a-dark.svg"], ["b.svg"]])


def test_captions_are_text_and_alternative_text(text, drawings):
    labels = [attributes["aria-label"] for attributes in Elements(text).attributes("svg")]
    assert labels == [f"{drawing.caption} {drawing.description}" for drawing in drawings]
    for drawing in drawings:
        assert f"<h2>{drawing.title}</h2>" in text
        assert f"<p>{drawing.caption}</p>" in text.replace("&#39;", "'")


def test_the_page_escapes_names_links_files_loads_nothing_and_holds_both_schemes(text):
    assert "<title>Figures &amp; &lt;&#34;more&#34;&gt;</title>" in text
    links = [attributes["href"] for attributes in Elements(text).attributes("a")]
    assert links == ["#figure-two-epsilons", "#figure-jacobian-spectrum", "a.svg", "a-dark.svg", "b.svg"]
    elements = Elements(text)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in elements.found}
    policy = next(a["content"] for a in elements.attributes("meta") if a.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert not re.search(r"url\((?!#)|@import", text)
    for name in theme.LIGHT:
        assert f"--{name}: {theme.LIGHT[name]};" in text
        assert f"--{name}: {theme.DARK[name]};" in text
    assert "prefers-color-scheme: dark" in text


def test_ids_are_unique_and_the_bytes_repeat(text, drawings):
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert page('Figures & <"more">', drawings, [["a.svg", "a-dark.svg"], ["b.svg"]]) == text
