import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from normkit.inspection.figures import drawings
from normkit.show import theme

TEXT = ("ink", "muted", "error", "warning", "note", "good")
DATA = ("accent", "contrast", "third")


def luminance(colour):
    """Relative luminance as WCAG 2 defines it."""
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_the_ratio_is_the_one_that_wcag_defines():
    assert contrast("#ffffff", "#000000") == pytest.approx(21.0)
    assert contrast("#ffffff", "#767676") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("palette", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["paper", "surface"])
def test_text_has_a_contrast_of_4_5_and_data_of_3(palette, ground):
    short = {name: contrast(palette[name], palette[ground]) for name in TEXT}
    assert {name: ratio for name, ratio in short.items() if ratio < 4.5} == {}
    faint = {name: contrast(palette[name], palette[ground]) for name in DATA}
    assert {name: ratio for name, ratio in faint.items() if ratio < 3} == {}


def test_both_schemes_name_the_same_colours_and_no_colour_twice():
    assert list(theme.LIGHT) == list(theme.DARK)
    assert len(set(theme.LIGHT.values())) == len(theme.LIGHT)


@pytest.mark.slow
def test_every_colour_of_a_figure_for_a_page_is_a_variable_and_settings_stay(faulty):
    from matplotlib import rcParams

    before = dict(rcParams)
    for drawing in drawings(faulty):
        svg = drawing.svg()
        assert re.findall(r"#[0-9a-fA-F]{6}\b", svg) == []
        assert "var(--accent)" in svg
        assert "font-family" not in svg
    assert dict(rcParams) == before


def test_a_scheme_holds_inside_its_style_and_inner_styles_keep_it():
    assert (theme.scheme(), theme.colour("accent")) == ("light", theme.LIGHT["accent"])
    with theme.style("dark"):
        assert theme.colour("accent") == theme.DARK["accent"]
        with theme.style():
            assert theme.scheme() == "dark"
        with theme.style("light"):
            assert theme.scheme() == "light"
        assert theme.scheme() == "dark"
    assert theme.scheme() == "light"


@pytest.mark.slow
def test_every_figure_of_an_inspection_can_be_dark(faulty):
    with theme.style("dark"):
        dark = drawings(faulty)
    for drawing in dark:
        assert drawing.scheme == "dark"
        svg = drawing.file("svg").decode().lower()
        assert {colour for colour in theme.LIGHT.values() if colour in svg} == set(), drawing.name
    assert re.findall(r"#[0-9a-fA-F]{6}\b", dark[0].svg()) == []


DIGEST = """
import hashlib, imagined_inspections
from normkit.inspection.figures import drawings
text = "".join(drawing.svg() for drawing in drawings(imagined_inspections.model("demo", 6)))
print(hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_another_process_draws_the_same_bytes(healthy, monkeypatch):
    # Another order of sets than here, where it is random.
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True)
    here = "".join(drawing.svg() for drawing in drawings(healthy))
    assert done.stdout.strip() == hashlib.sha256(here.encode()).hexdigest()
