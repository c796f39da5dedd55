"""What can be taken along: PNG, SVG, clip, link and program; and the figure that stands in the page without scripts."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from PIL import Image

from drawing import set_state
from normkit.explorer import document

if TYPE_CHECKING:
    from playwright.sync_api import Download, Page

pytestmark = pytest.mark.browser

PAGE = Path(document.__file__).parent / "page"
NAMESPACE = "{http://www.w3.org/2000/svg}"
PAPER = {"light": (255, 255, 255), "dark": (19, 22, 25)}


def press(page: Page, button: str) -> None:
    page.evaluate(
        "id => { const button = document.getElementById(id); button.closest('details').open = true; }", button
    )
    page.click(f"#{button}")


def taken(page: Page, button: str) -> Download:
    with page.expect_download() as download:
        press(page, button)
    return download.value


def message(page: Page) -> str:
    return page.text_content("#message")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_png_is_the_drawing_at_twice_its_size_on_paper(lasting_page, scheme):
    page = lasting_page(viewport={"width": 900, "height": 700}, color_scheme=scheme, stage=2)
    download = taken(page, "png")
    assert download.suggested_filename == "normkit-three.png"
    image = Image.open(io.BytesIO(download.path().read_bytes()))
    box = page.locator("#canvas").bounding_box()
    assert image.size == (round(2 * box["width"]), round(2 * box["height"]))
    assert image.getpixel((2, 2))[:3] == PAPER[scheme]
    assert len(set(image.convert("RGB").resize((200, 150)).get_flattened_data())) > 300
    assert message(page) == "normkit-three.png is on its way to your downloads."


def test_the_svg_stands_alone(lasting_page):
    page = lasting_page(stage=2, selected=3, color_scheme="dark")
    download = taken(page, "svg")
    assert download.suggested_filename == "normkit-three.svg"
    text = download.path().read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == f"{NAMESPACE}svg"
    assert root.find(f"{NAMESPACE}title").text == "normkit explore"
    assert "40 points" in root.find(f"{NAMESPACE}desc").text
    assert "var(" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert root.find(f"{NAMESPACE}rect").get("fill") == "rgb(19, 22, 25)"
    assert "all-ones" in [label.text for label in root.iter(f"{NAMESPACE}text")]


def test_the_svg_is_what_is_on_the_screen(lasting_page, window):
    """Drawn by the browser, it is the canvas but for the edges of letters and lines."""
    page = lasting_page(viewport={"width": 900, "height": 700}, stage=3)
    svg = taken(page, "svg").path().read_text(encoding="utf-8")
    canvas = Image.open(io.BytesIO(taken(page, "png").path().read_bytes())).convert("L")
    other = window(viewport={"width": canvas.width, "height": canvas.height})
    other.set_content(f'<body style="margin: 0; zoom: 2">{svg}')
    drawn = Image.open(io.BytesIO(other.screenshot())).convert("L")
    pairs = zip(canvas.get_flattened_data(), drawn.get_flattened_data(), strict=True)
    different = sum(abs(a - b) > 40 for a, b in pairs) / (canvas.width * canvas.height)
    assert different < 0.01


@pytest.mark.exhaustive
def test_the_clip_is_one_run_of_the_timeline_and_the_browser_plays_it(explorer):
    page = explorer(viewport={"width": 700, "height": 600}, hash="#stage=1.25")
    page.evaluate(
        """() => {
          // A clip of a second and a half: the clock of its frames runs four times as fast.
          const real = requestAnimationFrame;
          globalThis.requestAnimationFrame = (callback) => real((now) => callback(4 * now));
          globalThis.seen = [];
          normkitExplorer.store.subscribe(({ stage }) => seen.push(stage));
        }"""
    )
    download = taken(page, "webm")
    assert download.suggested_filename == "normkit-three.webm"
    content = download.path().read_bytes()
    assert content[:4] == b"\x1aE\xdf\xa3"
    assert b"webm" in content[:64]
    assert len(content) > 5000
    seen = page.evaluate("seen")
    assert seen[0] == 0
    assert seen[-2:] == [4, 1.25]
    assert seen[:-1] == sorted(seen[:-1])
    assert page.evaluate("normkitExplorer.store.get().stage") == 1.25
    shape = page.evaluate(
        """async (bytes) => {
          const video = document.createElement("video");
          video.src = URL.createObjectURL(new Blob([new Uint8Array(bytes)], { type: "video/webm" }));
          video.muted = true;
          await video.play();
          await new Promise((done) => video.requestVideoFrameCallback(done));
          const canvas = Object.assign(document.createElement("canvas"), { width: 4, height: 4 });
          canvas.getContext("2d").drawImage(video, 0, 0, 400, 400);
          return [video.videoWidth, video.videoHeight, [...canvas.getContext("2d").getImageData(0, 0, 1, 1).data]];
        }""",
        list(content),
    )
    box = page.locator("#canvas").bounding_box()
    assert shape[:2] == pytest.approx([box["width"], box["height"]], abs=2)
    assert min(shape[2]) > 245


def test_a_second_press_ends_the_clip(lasting_page):
    page = lasting_page(stage=3)
    press(page, "webm")
    assert message(page).startswith("Recording one run of the timeline: 6 seconds.")
    page.wait_for_function("() => normkitExplorer.store.get().stage < 3")
    # How much of it the encoder has written by now depends on the machine: the whole clip is held above.
    assert taken(page, "webm").suggested_filename == "normkit-three.webm"
    assert page.evaluate("normkitExplorer.store.get().stage") == 3


def test_the_link_and_the_program_are_copied(explorer):
    page = explorer(hash="#stage=2", permissions=["clipboard-read", "clipboard-write"])
    set_state(page, eps=0.5)
    press(page, "link")
    page.wait_for_function("() => document.getElementById('message').textContent !== ''")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.url.split("#")[0] + "#v=1&stage=2&eps=0.5"
    assert message(page) == "The link is in the clipboard."
    assert page.locator("#copy").count() == 0
    press(page, "python")
    page.wait_for_function("() => document.getElementById('message').textContent !== 'The link is in the clipboard.'")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert "layer_norm" in copied
    compile(copied, "program", "exec")


def test_without_a_recorder_and_a_clipboard_it_says_what_to_do(explorer):
    page = explorer()
    page.evaluate(
        """() => {
          delete globalThis.MediaRecorder;
          navigator.clipboard.writeText = () => Promise.reject(new DOMException('no', 'NotAllowedError'));
        }"""
    )
    press(page, "webm")
    assert "normkit explore --animation" in message(page)
    press(page, "link")
    page.wait_for_selector("#copy")
    assert page.input_value("#copy") == page.url.split("#")[0] + "#v=1"
    assert message(page).startswith("The clipboard is closed to this page. The link stands below the buttons")
    assert page.evaluate("getSelection().toString()") == page.input_value("#copy")
    assert page.evaluate("document.activeElement.id") == "copy"
    press(page, "python")
    page.wait_for_function("() => document.getElementById('copy').value.includes('import')")
    assert page.locator("#copy").count() == 1
    assert page.get_attribute("#copy", "aria-label") == "The program"


# The first scene, standing still: a quarter of its points, no axes, and of each surface its outline.
STILL = """async (clouds) => {
  const [{ compute }, { frame }, { lens }, { commands }, { startFrom }, { svg }] = await Promise.all(
    ["computation.js", "frames.js", "camera.js", "projection.js", "state.js", "vector.js"].map(load));
  const some = (list, step) => list.filter((_, index) => index % step === 0);
  const { n, points, groups } = clouds.scatter;
  const data = { models: [], clouds: { ...clouds, scatter: { n, points: some(points, 4), groups: some(groups, 4) } } };
  const [state, size] = [startFrom({ stage: 2 }), { width: 640, height: 440 }];
  const picture = frame(state, compute(state, data));
  const { right, up } = lens(state, { x: 0, y: 0, ...size }, picture.radius);
  const circle = Array.from({ length: 60 }, (_, k) => right.map((value, axis) =>
    Math.sqrt(3) * (value * Math.cos(k * Math.PI / 30) + up[axis] * Math.sin(k * Math.PI / 30))));
  const flat = ({ outline, colour, alpha }) => {
    const places = outline ? some(outline, outline.length / 4) : circle;
    return [{ kind: "surface", colour, alpha, places, faces: [places.map((_, k) => k)], lines: [] },
      { kind: "curve", at: places, colour, alpha: 0.4, closed: true, layer: "behind" }];
  };
  const items = picture.panels[0].items.flatMap((item) => {
    if (item.kind === "surface") return flat(item);
    if (item.kind === "curve") return [{ ...item, layer: "behind", at: item.closed ? some(item.at, 2) : item.at }];
    return item.kind === "segments" || item.markers === 5 || item.text?.startsWith("x") ? [] : [item];
  });
  const bent = ([x, y], [u, v], [s, t]) => Math.abs((u - x) * (t - y) - (v - y) * (s - x)) > 3;
  const kept = (at) => {
    const places = at.flatMap((x, i) => i % 2 ? [] : [[x, at[i + 1]]]);
    const ends = (i) => !places[i - 1] || !places[i + 1];
    return places.filter((place, i) => ends(i) || bent(places[i - 1], place, places[i + 1])).flat();
  };
  const all = commands({ ...picture, panels: [{ ...picture.panels[0], items }] }, state, size);
  const text = svg(all.map((command) => command.type === "line" ? { ...command, at: kept(command.at) } : command), size,
    (name) => `var(--${name})`, { title: "LayerNorm in three dimensions",
      description: "Points fall along the all-ones direction onto the plane of mean 0, and there onto a circle." });
  return text.replace(/-?\\d+\\.\\d+/g, (number) => String(Math.round(10 * Number(number)) / 10));
}"""


def test_the_figure_without_scripts_is_what_the_page_draws(modules, tmp_path):
    clouds = json.loads((PAGE / "clouds.json").read_text(encoding="utf-8"))
    fresh = tmp_path / "static.svg"
    fresh.write_text(modules.run(STILL, clouds), encoding="utf-8")
    committed = PAGE / "static.svg"
    assert committed.read_text(encoding="utf-8") == fresh.read_text(encoding="utf-8"), (
        f"static.svg is not what the page draws now. Look at the new one, then: cp {fresh} {committed}"
    )


def test_the_figure_without_scripts_is_small_and_follows_the_scheme():
    text = (PAGE / "static.svg").read_text(encoding="utf-8")
    assert len(text.encode()) <= 6000
    ElementTree.fromstring(text)
    colours = set(re.findall(r'(?:fill|stroke)="([^"]+)"', text)) - {"none"}
    assert colours
    assert all(re.fullmatch(r"var\(--[a-z]+(-\d)?\)", colour) for colour in colours)
