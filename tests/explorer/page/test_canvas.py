"""What is painted, pixel by pixel."""

from __future__ import annotations

import numpy as np
import pytest

from normkit.show.theme import PALETTES

pytestmark = pytest.mark.browser

PALETTE = {"paper": "#ffffff", "ink": "#000000", "accent": "#0000ff", "contrast": "#ff0000"}
_PAINT = """async ({ commands, palette, width, height, ratio, times }) => {
  const { paint } = await load("canvas.js");
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const asked = [];
  for (let k = 0; k < times; k++) paint(context, commands, (name) => asked.push(name) && palette[name], { ratio });
  const data = canvas.width && canvas.height ? context.getImageData(0, 0, canvas.width, canvas.height).data : [];
  return { pixels: Array.from(data), asked };
}"""


def painted(modules, commands, *, width=40, height=40, ratio=1, times=1, palette=PALETTE):
    argument = {
        "commands": commands, "palette": palette, "width": width, "height": height, "ratio": ratio, "times": times
    }  # fmt: skip
    pixels = modules.run(_PAINT, argument)["pixels"]
    return np.reshape(pixels, (round(height * ratio), round(width * ratio), 4))


def marker(kind, **options):
    return {"type": "marker", "x": 20, "y": 20, "size": 9, "marker": kind, "colour": "ink", **options}


def test_every_frame_starts_from_paper(modules):
    pixels = painted(modules, [marker(0)], times=1)
    assert (painted(modules, [marker(0)], times=3) == pixels).all()
    assert pixels[0, 0].tolist() == [255, 255, 255, 255]
    assert pixels[20, 20].tolist() == [0, 0, 0, 255]


@pytest.mark.parametrize("ratio", [1, 2, 1.5])
def test_places_are_those_of_the_page_at_any_pixel_ratio(modules, ratio):
    square = {"type": "polygon", "at": [10, 10, 30, 10, 30, 20, 10, 20], "colour": "accent", "alpha": 1}
    dark = painted(modules, [square], ratio=ratio)[..., 0] < 128
    assert dark.sum() == 200 * ratio**2
    assert dark[round(10 * ratio) : round(20 * ratio), round(10 * ratio) : round(30 * ratio)].all()


def test_overlapping_faces_both_tell_and_lines_of_one_style_only_once(modules):
    corners = [0, 0, 40, 0, 40, 40, 0, 40]
    back = [0, 40, 40, 40, 40, 0, 0, 0]
    faces = [{"type": "polygon", "at": at, "colour": "ink", "alpha": 0.5} for at in (corners, back)]
    assert painted(modules, faces)[20, 20, 0] == pytest.approx(64, abs=2)
    lines = [
        {"type": "line", "at": at, "colour": "ink", "alpha": 0.5, "width": 6}
        for at in ([0, 20, 40, 20], [20, 0, 20, 40])
    ]
    assert painted(modules, lines)[20, 20, 0] == pytest.approx(128, abs=2)


@pytest.mark.parametrize("ratio", [1, 2])
def test_a_clip_ends_between_two_pixels_of_the_screen(modules, ratio):
    whole = {"type": "polygon", "at": [0, 0, 40, 0, 40, 40, 0, 40], "colour": "ink", "alpha": 1}
    clip = {"type": "clip", "x": 10.3, "y": 0, "width": 20.4, "height": 40.2}
    row = painted(modules, [clip, whole], ratio=ratio)[5, :, 0]
    assert set(row.tolist()) == {0, 255}
    assert (row == 0).sum() == {1: 21, 2: 40}[ratio]


def test_dashes_leave_gaps_and_do_not_stay(modules):
    dashed = {"type": "line", "at": [0, 10, 40, 10], "colour": "ink", "width": 4, "dash": [10, 10], "offset": 10}
    whole = {"type": "line", "at": [0, 30, 40, 30], "colour": "ink", "width": 4}
    pixels = painted(modules, [dashed, whole])
    assert (pixels[10, [5, 15, 25, 35], 0] < 128).tolist() == [False, True, False, True]
    assert (pixels[30, :, 0] < 128).all()


def test_the_six_markers_can_be_told_apart(modules):
    shapes = [painted(modules, [marker(kind)])[..., 0] < 128 for kind in range(6)]
    for k, one in enumerate(shapes):
        assert 60 < one.sum() < 400
        for other in shapes[:k]:
            assert (one ^ other).sum() > 0.15 * min(one.sum(), other.sum())
    assert not shapes[5][20, 20]


@pytest.mark.parametrize(("size", "rim"), [(9, True), (2, False)])
def test_points_have_a_rim_of_paper_unless_they_are_small(modules, size, rim):
    ground = {"type": "polygon", "at": [0, 0, 40, 0, 40, 40, 0, 40], "colour": "contrast", "alpha": 1}
    pixels = painted(modules, [ground, marker(0, size=size)], ratio=4)
    assert (pixels.min(axis=2) > 200).any() == rim


def test_clips_replace_each_other(modules):
    ground = {"type": "polygon", "at": [0, 0, 40, 0, 40, 40, 0, 40], "colour": "ink", "alpha": 1}
    left = {"type": "clip", "x": 0, "y": 0, "width": 10, "height": 40}
    right = {"type": "clip", "x": 30, "y": 0, "width": 10, "height": 40}
    pixels = painted(modules, [left, ground, right, ground])[20, :, 0]
    assert (pixels < 128).sum() == 20
    # Nor does a clip outlive its frame.
    assert (painted(modules, [left, ground, right], times=2)[20, :, 0] < 128).sum() == 10


def test_text_has_a_halo_and_its_anchor(modules):
    ground = {"type": "polygon", "at": [0, 0, 80, 0, 80, 40, 0, 40], "colour": "contrast", "alpha": 1}
    centres = []
    for anchor in ("start", "middle", "end"):
        text = {"type": "text", "x": 40, "y": 20, "text": "nnn", "colour": "ink", "anchor": anchor}
        pixels = painted(modules, [ground, text], width=80)
        rows, columns = np.nonzero(pixels[..., 0] < 100)
        centres.append(columns.mean())
        assert (pixels.min(axis=2) > 240).sum() > 20
        assert rows.mean() == pytest.approx(20, abs=3)
    assert centres[0] > centres[1] + 5 > centres[2] + 10


def test_a_colour_is_looked_up_once_a_frame(modules):
    argument = {
        "commands": [marker(0)] * 50, "palette": PALETTE, "width": 9, "height": 9, "ratio": 1, "times": 2
    }  # fmt: skip
    assert sorted(modules.run(_PAINT, argument)["asked"]) == ["ink", "ink", "paper", "paper"]


@pytest.mark.parametrize(("width", "height"), [(0, 0), (0, 10), (10, 0)])
def test_a_canvas_without_room_is_no_error(modules, width, height):
    assert painted(modules, [marker(0)], width=width, height=height).size == 0


def test_no_commands_are_an_empty_page(modules):
    assert (painted(modules, []) == 255).all()


@pytest.mark.parametrize("scheme", PALETTES)
def test_all_letters_of_the_drawings_have_a_contrast_of_4_5(modules, page_data, scheme):
    names = modules.run(
        """async (data) => {
          const files = ["computation", "frames", "projection", "state", "canvas"].map((name) => load(`${name}.js`));
          const [{ compute }, { frame }, { commands }, { startFrom }, { lettering }] = await Promise.all(files);
          const clouds = { four: "four", clusters: "clusters", attention: "keys" };
          const states = ["three", "four", "clusters", "gradient", "attention", "depth"].flatMap((scene) =>
            [0, 2, 4].map((stage) => startFrom({ scene, stage, cloud: clouds[scene] ?? "small", selected: 0 })));
          const size = { width: 900, height: 600 };
          return states.flatMap((state) => commands(frame(state, compute(state, data)), state, size)
            .filter(({ type }) => type === "text").map(({ colour }) => lettering(colour)));
        }""",
        page_data,
    )

    def light(colour):
        shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [((share + 0.055) / 1.055) ** 2.4 if share > 0.04045 else share / 12.92 for share in shares]
        return np.dot(linear, [0.2126, 0.7152, 0.0722])

    colours = PALETTES[scheme]
    assert {"ink", "muted", "accent", "good", "error"} <= set(names)
    for name in set(names):
        one, other = sorted([light(colours[name]), light(colours["paper"])])
        assert (other + 0.05) / (one + 0.05) >= 4.5, name
