import re
from html.parser import HTMLParser

import pytest

from normkit.plots import theme
from normkit.plots.epsilons import two_epsilons
from normkit.plots.page import page
from normkit.plots.spectrum import jacobian_spectra

pytestmark = pytest.mark.slow


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
    import torch

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


def test_names_are_escaped_and_files_linked(text):
    assert "<title>Figures &amp; &lt;&#34;more&#34;&gt;</title>" in text
    links = [attributes["href"] for attributes in Elements(text).attributes("a")]
    assert links == ["#figure-two-epsilons", "#figure-jacobian-spectrum", "a.svg", "a-dark.svg", "b.svg"]


def test_nothing_is_loaded_and_no_script_runs(text):
    elements = Elements(text)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in elements.found}
    policy = next(a["content"] for a in elements.attributes("meta") if a.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert not re.search(r"url\((?!#)|@import", text)


def test_both_schemes_stand_in_one_page(text):
    for name in theme.LIGHT:
        assert f"--{name}: {theme.LIGHT[name]};" in text
        assert f"--{name}: {theme.DARK[name]};" in text
    assert "prefers-color-scheme: dark" in text


def test_ids_are_unique_and_the_bytes_repeat(text, drawings):
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert page('Figures & <"more">', drawings, [["a.svg", "a-dark.svg"], ["b.svg"]]) == text
