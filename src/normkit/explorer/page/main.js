/** The page: one state, and for every change of it one frame: compute -> frame -> commands -> paint. */
import { paint } from "explorer/canvas.js";
import { compute } from "explorer/computation.js";
import { mountControls } from "explorer/controls.js";
import { byId, element, put } from "explorer/elements.js";
import { mountExports } from "explorer/exports.js";
import { frame } from "explorer/frames.js";
import { mountPointer } from "explorer/pointer.js";
import { commands } from "explorer/projection.js";
import { decode, mountHash } from "explorer/link.js";
import { createStore, startFrom } from "explorer/state.js";
import { summary } from "explorer/summary.js";
import { mountTable } from "explorer/table.js";
import { mountTimeline } from "explorer/timeline.js";
import { mountWalk } from "explorer/walk.js";

const QUIET = 300; // milliseconds without a change, after which the picture is put into words
const SCHEMES = ["(prefers-color-scheme: dark)", "(forced-colors: active)", "(prefers-contrast: more)", "print"];

const data = JSON.parse(byId("data").textContent);
const start = startFrom(data.start ?? {});
const known = { models: data.models, clouds: { ...data.clouds, ...(data.given && { given: data.given }) } };
const { state: first, problems } = decode(location.hash, start, known);
const store = createStore(first, known);
const canvas = byId("canvas");
const brush = canvas.getContext("2d");
const palette = new Map();
const size = { width: 1, height: 1 };
/** What the last frame showed: state, computed, frame. @type {any} */
let shown = {};
let [scheduled, settling] = [0, 0];

const context = {
  data,
  canvas,
  colours,
  say,
  size: () => size,
  computed: () => compute(store.get(), data),
  frame: () => (shown.state === store.get() ? shown.frame : frame(store.get(), context.computed())),
  commands: () => commands(context.frame(), store.get(), size),
};

/** The colour that a name of the palette has in the scheme of the moment. */
function colours(name) {
  if (!palette.has(name)) {
    canvas.style.color = `var(--${name})`;
    palette.set(name, getComputedStyle(canvas).color);
  }
  return palette.get(name);
}

/** Tells the reader something, in a line that screen readers speak. */
function say(message) {
  byId("message").textContent = message;
}

/** Whether the state differs from the last frame's in the camera alone. */
const turned = (state) =>
  shown.state &&
  Object.keys(state).every((key) => ["yaw", "pitch", "zoom"].includes(key) || state[key] === shown.state[key]);

function draw() {
  cancelAnimationFrame(scheduled);
  scheduled = 0;
  const state = store.get();
  const updates = turned(state) ? [pointer] : all;
  const computed = compute(state, data);
  shown = { state, computed, frame: updates === all ? frame(state, computed) : shown.frame };
  const ratio = Math.min(devicePixelRatio, 3);
  const [width, height] = [Math.round(size.width * ratio), Math.round(size.height * ratio)];
  put(canvas, { width, height });
  paint(brush, commands(shown.frame, state, size), colours, { ratio });
  for (const update of updates) update(state, computed);
  clearTimeout(settling);
  settling = setTimeout(describe, document.documentElement.dataset.ready ? QUIET : 0);
}

/** Once it rests: into words, and into the address. */
function describe() {
  put(byId("summary"), { textContent: summary(shown.state, shown.computed) });
  writeAddress();
}

const pointer = mountPointer(store, context);
const timeline = mountTimeline(store);
const walk = mountWalk(store, timeline.play);
const all = [pointer, mountControls(store, data), timeline.update, mountTable(store, context), walk];
mountExports(store, context);
const writeAddress = mountHash(store, start, say, known);
byId("notes").append(...(data.notes ?? []).map((textContent) => element("li", { textContent })));
if (problems.length) say(problems.join(" "));
store.subscribe(() => {
  scheduled ||= requestAnimationFrame(draw);
});
for (const query of SCHEMES) {
  matchMedia(query).addEventListener("change", () => {
    palette.clear();
    draw();
  });
}
new ResizeObserver(
  ([
    {
      contentRect: { width, height },
    },
  ]) => {
    Object.assign(size, { width, height });
    draw();
    document.documentElement.dataset.ready = "true";
  },
).observe(byId("view"));

Object.assign(globalThis.normkitExplorer, { store, frame: context.frame, commands: context.commands });
