"""The SVG: the picture of the canvas, equal bytes, and text that stays text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

pytestmark = pytest.mark.browser

PALETTE = {
    "paper": "#ffffff", "ink": "#1b1e22", "accent": "#0072b2", "contrast": "#d55e00", "third": "#009e73",
    "error": "#b03a00", "good": "#006b4e"
}  # fmt: skip
SIZE = {"width": 300, "height": 200}
ABOUT = {"title": "A picture", "description": "What it shows"}
NAMESPACE = "{http://www.w3.org/2000/svg}"
HOSTILE = ["</text><script>alert(1)</script>", "\" onload='x'", "]]>&amp;&#0;", "a\x00\x0b\ud800\uffff\U0001f600b"]
_SVG = """async ({ commands, size, palette, about }) =>
  (await load("vector.js")).svg(commands, size, (name) => palette[name], about)"""
_BOTH = """async ({ commands, size, palette, about }) => {
  const [{ svg }, { paint }] = [await load("vector.js"), await load("canvas.js")];
  const colours = (name) => palette[name];
  const contexts = [0, 1].map(() => {
    const canvas = Object.assign(document.createElement("canvas"), size);
    return canvas.getContext("2d", { willReadFrequently: true });
  });
  paint(contexts[0], commands, colours, { ratio: 1 });
  const image = new Image();
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(svg(commands, size, colours, about));
  await image.decode();
  contexts[1].drawImage(image, 0, 0);
  return contexts.map((context) => Array.from(context.getImageData(0, 0, size.width, size.height).data));
}"""


def written(modules, commands, *, palette=PALETTE, about=ABOUT, script=_SVG):
    return modules.run(script, {"commands": commands, "size": SIZE, "palette": palette, "about": about})


def everything(modules):
    """One of each kind of item, through the projection, and one of each marker."""
    items = [
        {"kind": "surface", "quadric": {"centre": [0, 0, 0], "matrix": np.diag([1.6, 1, 1.3]).tolist()},
         "colour": "accent", "alpha": 0.2, "edge": "accent"},
        {"kind": "surface", **modules("surfaces.js", "plane", [0, 0, 0], [1, 0, 0], [0, 1, 0], 1.8),
         "colour": "third", "alpha": 0.1, "edge": "third"},
        {"kind": "points", "at": np.random.default_rng(0).normal(size=(30, 3)).tolist(), "colours": "contrast",
         "markers": [k % 6 for k in range(30)], "selected": 3},
        {"kind": "curve", "at": [[-2, 0, 0], [2, 0, 0]], "colour": "ink", "dash": [5, 3]},
        {"kind": "arrow", "from": [0, 0, 0], "to": [0, 1, 1.5], "colour": "contrast"},
        {"kind": "label", "at": [0, 1, 1.5], "text": "tip", "colour": "contrast"},
    ]  # fmt: skip
    panel = {"kind": "space", "title": "A panel", "items": items}
    frame = {"radius": 2.2, "panels": [panel, panel]}
    return modules("projection.js", "commands", frame, {"yaw": 0.7, "pitch": 0.5, "zoom": 1}, SIZE)


def test_it_is_the_picture_of_the_canvas(modules):
    canvas, image = np.array(written(modules, everything(modules), script=_BOTH)).reshape(2, 200, 300, 4)
    # The two differ in the edges of things, by rounding of places to a hundredth of a pixel.
    assert np.abs(canvas - image).mean() < 1
    assert (np.abs(canvas - 255).max(axis=2) > 20).mean() > 0.2
    different = (np.abs(canvas - image).max(axis=2) > 40).mean()
    assert different < 0.01, f"{different:.2%} of the pixels are another colour"


def test_equal_commands_give_equal_bytes_with_two_decimals_and_shared_styles(modules):
    commands = everything(modules)
    text = written(modules, commands)
    assert written(modules, commands) == text
    assert re.findall(r"\d\.\d{3,}", text) == []
    assert re.search(r'[" ]-0[" ]', text) is None
    assert "NaN" not in text
    assert len(text) < 200_000


def test_it_says_what_it_shows(modules):
    root = ElementTree.fromstring(written(modules, []))
    assert root.tag == NAMESPACE + "svg"
    assert root.get("viewBox") == "0 0 300 200"
    assert root.get("role") == "img"
    assert [root.findtext(NAMESPACE + tag) for tag in ("title", "desc")] == ["A picture", "What it shows"]
    assert root.find(NAMESPACE + "rect").get("fill") == PALETTE["paper"]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_text_stays_text(modules, hostile):
    text = {"type": "text", "x": 1, "y": 2, "text": hostile, "colour": "ink"}
    root = ElementTree.fromstring(written(modules, [text], about={"title": hostile, "description": hostile}))
    shown = re.sub("[\x00\x0b\ud800\uffff]", "\ufffd", hostile)
    assert {element.tag.removeprefix(NAMESPACE) for element in root.iter()} == {"svg", "title", "desc", "rect", "text"}
    assert root.findtext(NAMESPACE + "text") == root.findtext(NAMESPACE + "title") == shown
    assert not any(name.startswith("on") for element in root.iter() for name in element.attrib)


def test_a_colour_cannot_break_out_of_its_attribute(modules):
    line = {"type": "line", "at": [0, 0, 5, 5], "colour": "ink"}
    root = ElementTree.fromstring(written(modules, [line], palette={**PALETTE, "ink": '"/><script/>'}))
    assert root.find(NAMESPACE + "path").get("stroke") == '"/><script/>'


def test_clips_nest_and_close(modules):
    clip = {"type": "clip", "x": 0, "y": 0, "width": 10, "height": 20}
    marker = {"type": "marker", "x": 3, "y": 4, "size": 5, "marker": 0, "colour": "ink"}
    root = ElementTree.fromstring(written(modules, [marker, clip, marker, clip, marker]))
    groups = root.findall(NAMESPACE + "g")
    assert [len(group) for group in groups] == [1, 1]
    ids = {clip.get("id") for clip in root.iter(NAMESPACE + "clipPath")}
    assert {group.get("clip-path") for group in groups} == {f"url(#{name})" for name in ids}
