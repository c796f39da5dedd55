/** From the state and the page's data to all that it shows. What stays the same is not computed again. */

import { stack } from "explorer/depth.js";
import { norm as length, scale } from "explorer/linear.js";
import { at, divisor, facts, factsOf, normalize, vjp } from "explorer/norms.js";
import { attend, hull, selectable } from "explorer/selection.js";

const DIMENSIONS = { three: 3, four: 4, clusters: 3, gradient: 3, attention: 3 };
// Bars of more keys would be too thin.
const MOST_KEYS = 12;


/** The last result of a function, for as long as its keys are the same ones. */
const remember = (compute, keysOf) => {
  let last;
  return (...given) => {
    const keys = keysOf(...given);
    if (!last || keys.some((key, i) => !Object.is(key, last.keys[i]))) last = { keys, result: compute(...given) };
    return last.result;
  };
};

/** The cloud asked for, if it has n dimensions, else the first that has; with the points moved by hand. */
const cloudOf = ({ cloud, edits }, { clouds, given }, n) => {
  const all = { ...clouds, ...(given && { given }) };
  const { points = [], groups = [], labels } = [all[cloud], ...Object.values(all)].find((each) => each?.n === n) ?? {};
  const raw = points.map((point, i) => (edits[i]?.length === n ? edits[i] : point));
  return { n, raw, groups, labels: labels ?? raw.map((_, i) => String(i + 1)) };
};

const armOf = ({ eps, place, gain, bias, normal }, { n, raw }, mode) => {
  const norm = { mode, eps, place, gain: gain.slice(0, n), bias: bias.slice(0, n), normal: normal.slice(0, n) };
  const stages = normalize(raw, norm);
  return { norm, stages, rows: raw.map((x, i) => facts(x, norm, stages[2][i])) };
};

/** Seven little-endian float32 numbers a point. */
const numbersOf = remember(
  ({ floats, count }) => {
    const view = new DataView(Uint8Array.from(atob(floats), (character) => character.charCodeAt(0)).buffer);
    const number = (place) => view.getFloat32(4 * place, true);
    return Array.from({ length: count }, (_, i) => [0, 1, 2, 3, 4, 5, 6].map((j) => number(7 * i + j)));
  },
  (site) => [site],
);

/** The shares of all squared lengths of the centred rows, each divided by its own number, along the two directions. What is
 * centred of a constant row is the rounding of float32, and counts nothing. */
const explainedBy = (numbers, divisors) => {
  const sums = [0, 0, 0];
  for (const [i, [c0, ...rest]] of numbers.entries()) {
    const parts = scale(rest.slice(0, 3), 1 / divisors[i]);
    if (!(length(parts) * divisors[i] > 1e-6 * Math.abs(c0))) continue;
    parts.forEach((part, j) => {
      sums[j] += part ** 2;
    });
  }
  const total = sums[0] + sums[1] + sums[2] || 1;
  return [sums[0] / total, sums[1] / total];
};

/** The longest row, if it is ten times as long as the median row of one norm: {index, times: so many times as long,
 * feature, share: what its largest feature holds of its squared length}. */
const giantOf = (rows, { layers, longest }) => {
  if (layers) return null;
  const lengths = rows.map((row) => row.length).sort((a, b) => a - b);
  const times = lengths.at(-1) / lengths[Math.floor(lengths.length / 2)];
  const index = rows.findIndex((row) => row.length === lengths.at(-1));
  return times > 10 && times < Infinity ? { index, times, ...longest } : null;
};

/** Colours 0..7: in order of size, or of frequency, where all rare ones are 7. */
const coloursOf = (values, isOrdered) => {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  const order = [...counts].sort((a, b) => (isOrdered ? a[0] - b[0] : b[1] - a[1])).map(([value]) => value);
  const step = isOrdered ? Math.max(1, order.length / 8) : 1;
  return values.map((value) => Math.min(7, Math.floor(order.indexOf(value) / step)));
};

/**
 * The points of a site in its basis B. Of a full vector x there are c = B x, the length r of what of x - mean is not in
 * B, and d = B (g * (x - mean)): so v = x - mean (rms, length: x) has a known length, and B (g * v) = d (+ mean B g).
 */
const siteOf = ({ mode, eps, place, colour }, site, tokens) => {
  const { n, gain, bias, token, layers = token.map(() => site.layer) } = site;
  const isCentred = mode === "layer";
  const radius = mode === "length" ? 1 : Math.sqrt(n);
  const stages = [[], [], [], [], []];
  const numbers = numbersOf(site);
  const divisors = [];
  const rows = numbers.map(([c0, c1, c2, r, ...d]) => {
    const mean = c0 / Math.sqrt(n);
    const across = length([c1, c2, r]);
    const root = (isCentred ? across : Math.hypot(c0, across)) / radius;
    const s = divisor(root, eps, place);
    divisors.push(s);
    const centred = [isCentred ? 0 : c0, c1, c2];
    const gained = d.map((value, i) => (isCentred ? value : value + mean * gain[i]) / s);
    [
      [c0, c1, c2],
      centred,
      centred.map((value) => value / s),
      gained,
      gained.map((value, i) => value + bias[i]),
    ].forEach((row, stage) => stages[stage].push(row));
    return factsOf(n, mean, across, root / s);
  });
  const values = { token, layer: layers, position: layers.map((layer, i) => i - layers.indexOf(layer)) }[colour];
  const groups = site.groups ?? coloursOf(values, colour !== "token");
  const labels = token.map((index) => tokens[index]);
  const norm = { mode, eps, place, gain, bias, normal: [] };
  // As the rows come, and once each is scaled.
  const energies = [numbers.map(() => 1), divisors].map((by) => explainedBy(numbers, by));
  return { n, raw: stages[0], groups, labels, norm, stages, rows, energies, giant: giantOf(rows, site) };
};

/** Keys, as large as asked for, through a norm without gain and bias; what a query makes of them, and would of keys of
 * twice the size. The five stages are raw, centred and scaled, and the last one twice more. */
const keysOf = (state, { n, raw, groups, labels }) => {
  const [query, own] = [state.query.slice(0, n), raw.slice(0, MOST_KEYS)];
  const plain = { ...state, gain: [1, 1, 1, 1], bias: [0, 0, 0, 0] };
  const [keys, twice] = [1, 2].map((factor) => own.map((key) => scale(key, factor * state.size)));
  const found = { n, raw: own, groups: groups.slice(0, MOST_KEYS), labels: labels.slice(0, MOST_KEYS), query };
  const arm = armOf(plain, { n, raw: keys }, state.mode);
  const after = (stage) => {
    const [now, larger] = [arm.stages, normalize(twice, arm.norm)].map((stages) => at(stages, stage));
    const attended = attend(now, query, groups);
    const { weights } = attend(larger, query, groups);
    const change = Math.max(...weights.map((weight, i) => Math.abs(weight - attended.weights[i])));
    return { ...attended, change, selectable: selectable(now), hull: hull(now) };
  };
  return { ...found, ...arm, before: after(0), after };
};

const partsOf = (state, data) => {
  const { scene, selected } = state;
  const model = scene === "model" ? data.models[state.model] : undefined;
  const site = model?.sites[state.site];
  if (site) return { scene, site, ...siteOf(state, site, model.tokens) };
  const points = cloudOf(state, data, DIMENSIONS[scene] ?? 0);
  if (scene === "attention") return { scene, ...keysOf(state, points) };
  const arm = armOf(state, points, scene === "clusters" ? "layer" : state.mode);
  const found = { scene, ...points, ...arm };
  const x = points.raw[selected];
  if (scene === "depth") return { ...found, stack: stack(state) };
  if (scene === "clusters") {
    return { ...found, arms: { batch: armOf(state, points, "batch"), layer: arm, rms: armOf(state, points, "rms") } };
  }
  if (scene !== "gradient" || !x) return found;
  const upstream = state.upstream.slice(0, x.length);
  return { ...found, gradient: { ...vjp(x, arm.norm, upstream), at: x, output: arm.stages[4][selected], upstream } };
};

const ASIDE = { yaw: 0, pitch: 0, zoom: 0, stage: 0, layer: 0, walk: 0, guess: 0 };
/** All that does not depend on these. */
const fixed = remember(
  (state, data) => {
    const parts = partsOf(state, data);
    return { ...parts, undefinedRows: [...parts.rows.keys()].filter((row) => parts.rows[row].undefined) };
  },
  (state, data) => [data, ...Object.values({ ...state, ...ASIDE })],
);

/**
 * All that a state shows; the same object while the camera moves.
 * @typedef {{scene: string, n: number, norm: import("explorer/norms.js").Norm, raw: number[][], groups: number[],
 *   labels: string[], stages: number[][][], shown: number[][], rows: any[], undefinedRows: number[], arms?: any,
 *   gradient?: any, before?: any, after?: any, query?: number[], site?: any, explained?: number[], giant?: any, stack?: any}} Computed
 *   rows: facts; at a site they and n are of the full vectors; explained: the shares of its two directions at this stage;
 *   giant: a row far longer than the others
 */
export const compute = remember(
  (state, data) => {
    const found = fixed(state, data);
    // The three stages of keys take the whole timeline.
    const stage = found.after ? state.stage / 2 : state.stage;
    const show = (arm) => ({
      ...arm,
      shown: at(arm.stages, stage), ...(arm.after && { after: arm.after(stage) }),
      ...(arm.energies && { explained: arm.energies[stage < 2 ? 0 : 1] }),
    });
    const { batch, layer, rms } = found.arms ?? {};
    return { ...show(found), ...(batch && { arms: { batch: show(batch), layer: show(layer), rms: show(rms) } }) };
  },
  (state, data) => [fixed(state, data), state.stage],
);
