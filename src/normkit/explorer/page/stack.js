// Depth: what a stack of layers does to its signal and to its gradient; five stacks on one logarithmic axis.
import { ARMS, number } from "explorer/formulas.js";

/** @typedef {{low: number, high: number}} Axis powers of ten at both ends */

/** @type {{key: "rms" | "mean" | "gradient", name: string, colour: string, dash?: number[]}[]} */
const SERIES = [
  { key: "rms", name: "rms", colour: "accent" },
  { key: "mean", name: "|mean|", colour: "contrast", dash: [2, 4] },
  { key: "gradient", name: "gradient", colour: "third", dash: [8, 4] },
];
const LEADING = 15;
// Narrower panels have their readings below.
const NARROW = 320;

/** @type {(exponent: number) => string} */
const power = (exponent) =>
  exponent === 0
    ? "1"
    : `10${[...String(exponent)].map((sign) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(sign)]).join("")}`;

/** The axis that all panels share: whole decades around every rms and gradient, as far as they can be told apart.
 * @type {(stacks: any) => Axis} */
export function decades(stacks) {
  const values = Object.values(stacks).flatMap(({ rms, gradient }) => [...rms, ...gradient]);
  const powers = values.filter((value) => value > 0 && value < Infinity).map(Math.log10);
  const [low, high] = [Math.floor(Math.min(-1, ...powers)), Math.ceil(Math.max(1, ...powers))];
  return { low: Math.max(-9, low), high: Math.min(12, high) };
}

/** Where a value lies on the axis, from 0 at its bottom to 1; 0 and Infinity well beyond its ends, NaN nowhere.
 * @type {(value: number, axis: Axis) => number} */
export const height = (value, { low, high }) =>
  Math.min(3, Math.max(-2, (Math.log10(Math.abs(value)) - low) / (high - low)));

/** The layers and heights of a line from one layer to another (or to between two), as far as there are numbers.
 * @type {(values: number[], axis: Axis, from: number, to: number) => number[][]} */
export function path(values, axis, from, to) {
  const inner = values.map((_, layer) => layer).filter((layer) => layer > from && layer < to);
  return [...new Set([from, ...inner, to])]
    .map((layer) => {
      const [below, above] = [Math.floor(layer), Math.ceil(layer)].map((k) => height(values[k], axis));
      return [layer, below + (above - below) * (layer % 1)];
    })
    .filter(([, share]) => !Number.isNaN(share));
}

/** What is said of a series at a layer, with an arrow if that lies beyond the panel; of layer -1 the last value, or
 * from which layer on there is none. @type {(values: number[], axis: Axis, layer: number) => string} */
export function reading(values, axis, layer) {
  const lost = layer < 0 ? values.findIndex((value) => !Number.isFinite(value)) : -1;
  const value = Math.abs(values[layer < 0 ? (lost < 0 ? values.length - 1 : lost) : layer]);
  const share = height(value, axis);
  const text = Number.isNaN(value) ? "not a number" : number(value);
  return (share > 1 ? "↑ " : share < 0 ? "↓ " : "") + text + (lost < 0 ? "" : ` from ${lost}`);
}

/** @type {(arm: any, axis: Axis, state: any, box: any) => Record<string, any>[]} */
function panel(arm, axis, { stage: t, layer }, box) {
  const depth = arm.rms.length - 1;
  const [left, top, stretch] = [box.x + 44, box.y + 12, axis.high - axis.low];
  const narrow = box.width < NARROW;
  const width = Math.max(1, box.width - 44 - (narrow ? 14 : 130));
  const tall = Math.max(1, box.height - (narrow ? 80 : 54));
  const bottom = top + tall;
  const x = (at) => left + (width * at) / depth;
  const y = (share) => bottom - tall * share;
  const inside = (value) => y(Math.min(1, Math.max(0, height(value, axis) || 0)));
  const text = (x, y, words, colour = "muted", style = {}) => ({
    type: "text",
    x,
    y,
    text: words,
    colour,
    size: 11.5,
    ...style,
  });
  const line = (places, colour, style = {}) => ({
    type: "line",
    at: places.flatMap(([at, share]) => [x(at), y(share)]),
    colour,
    width: 1.2,
    ...style,
  });
  const [ahead, back] = [Math.min(1, t / 2) * depth, depth * Math.min(1, 2 - t / 2)];
  const out = [];
  out.push(text(left, bottom + 15, "layer 0"), text(x(depth) - 6, bottom + 15, `${depth}`));
  for (let exponent = axis.low; exponent <= axis.high; exponent++) {
    if (exponent % Math.ceil((stretch * 30) / tall)) continue;
    const share = (exponent - axis.low) / stretch;
    out.push(
      line(
        [
          [0, share],
          [depth, share],
        ],
        exponent ? "line" : "muted",
        { width: 1 },
      ),
    );
    out.push(text(left - 6, y(share), power(exponent), "muted", { anchor: "end" }));
  }
  out.push({ type: "clip", x: left, y: top, width: width + 2, height: tall });
  for (const { key, colour, dash } of SERIES) {
    const [from, to] = key === "gradient" ? [back, depth] : [0, ahead];
    out.push(line(path(arm[key], axis, 0, depth), colour, { dash, alpha: 0.4 }));
    out.push(line(path(arm[key], axis, from, to), colour, { dash, width: 2.6 }));
  }
  out.push({ type: "clip", ...box });
  if (t > 0 && t < 4) {
    const [at, words, colour] = t < 2 ? [ahead, "signal →", "accent"] : [back, "← gradient", "third"];
    out.push(
      line(
        [
          [at, 0],
          [at, 1],
        ],
        colour,
      ),
    );
    if (!narrow) out.push(text(x(at), bottom + 30, words, colour, { anchor: "middle", bold: true }));
  }
  if (layer >= 0)
    out.push(
      line(
        [
          [layer, 0],
          [layer, 1],
        ],
        "ink",
        { dash: [3, 3] },
      ),
    );
  const names = SERIES.map(({ key, name, colour }) => {
    // A gradient is given at the output and ends at layer 0: its name stands there.
    const first = key === "gradient" && layer < 0;
    const at = inside(arm[key][first ? 0 : layer < 0 ? depth : layer]);
    if (layer >= 0) out.push({ type: "marker", x: x(layer), y: at, size: 4, marker: 0, colour });
    return { words: `${name} ${reading(arm[key], axis, first ? 0 : layer)}`, colour, at, first };
  });
  if (narrow) {
    names.forEach(({ words, colour }, k) =>
      out.push(text(box.x + 14, bottom + 32 + 13 * k, words, colour, { bold: true, size: 11 })),
    );
    return out;
  }
  const beside = names.filter(({ first }) => !first).sort((a, b) => a.at - b.at);
  beside.forEach((name, k) => {
    const above = k ? beside[k - 1].at + LEADING : 0;
    name.at = Math.min(bottom - LEADING * (beside.length - 1 - k), Math.max(name.at, above));
  });
  for (const { words, colour, at, first } of names) {
    const where = first ? [left + 6, Math.max(top + 8, at - 10)] : [x(depth) + 8, at];
    out.push(text(where[0], where[1], words, colour, { bold: true }));
  }
  return out;
}

/** @type {import("explorer/space.js").Scene} */
export function stack(state, computed) {
  const axis = decades(computed.stack);
  const panels = Object.entries(ARMS).map(([key, title]) => ({
    kind: "chart",
    title,
    draw: (box) => panel(computed.stack[key], axis, state, box),
  }));
  return { panels, handles: [], drag: () => ({}), radius: 1 };
}
