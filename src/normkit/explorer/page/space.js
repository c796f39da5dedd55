// The space of the features: three axes as they are (scenes "three", "gradient", "clusters"), or any three through
// which more of them are seen ("four").
import { number } from "explorer/formulas.js";
import {
  add,
  cross,
  dot,
  hyperplaneBasis,
  matrixVector,
  mean,
  minus,
  norm as length,
  scale,
  times,
  transpose,
  unit,
} from "explorer/linear.js";
import { arrow, blend, farthest, fit, image, label, line, points, progress, see } from "explorer/marks.js";
import { divisor } from "explorer/norms.js";
import { plane } from "explorer/surfaces.js";

/** @typedef {import("explorer/marks.js").Item} Item */
/** @typedef {import("explorer/norms.js").Norm} Norm */
/** @typedef {(state: import("explorer/state.js").State, computed: import("explorer/computation.js").Computed) =>
 *   import("explorer/frames.js").Frame} Scene */

const ORIGIN = [0, 0, 0];
export const FEATURES = [
  [1, 0, 0],
  [0, 1, 0],
  [0, 0, 1],
];
const SNAP = Math.cos(Math.PI / 45);
// Two edges of a drawn plane lie level for the eye of the first view.
const UPRIGHT = [-0.43, 0.21, 0.88];

/** @type {(n: number) => number[]} */
export const ones = (n) => Array(n).fill(1 / Math.sqrt(n));

/** What a norm has made of its sphere at stage t: `radius` long along each vector of `basis`, times d, at `centre`.
 * @param {Norm} norm @param {number} t */
function sphereOf({ mode, gain, bias, normal }, t) {
  const n = gain.length;
  const u = mode === "plane" ? unit(normal) : ones(n);
  const flat = mode === "layer" || mode === "plane";
  const all = gain.map((_, i) => gain.map((__, j) => Number(i === j)));
  const d = gain.map((value) => blend(1, value, progress(t, 2)));
  const [radius, name] = mode === "length" ? [1, "1"] : [Math.sqrt(n), n === 4 ? "2" : `√${n}`];
  const centre = scale(bias, progress(t, 3));
  return { n, u, flat, all, basis: flat ? hyperplaneBasis(u) : all, radius, name, d, centre };
}

/** Orthogonal to d * y for all y orthogonal to u: u / d, without dividing, so that a gain of 0 is no exception.
 * @type {(u: number[], d: number[]) => number[]} */
export const imageNormal = (u, d) =>
  unit(u.map((value, i) => d.reduce((product, gain, j) => (j === i ? product : product * gain), value)));

/** The edges of the box of one deviation to either side of the mean, which BatchNorm moves and stretches.
 * @type {(norm: Norm, raw: number[][], t: number) => number[][][]} */
function deviations(norm, raw, t) {
  const { d, centre } = sphereOf(norm, t);
  const sides = transpose(raw).map((column, axis) => {
    const middle = mean(column);
    const size = length(column.map((value) => value - middle)) / Math.sqrt(column.length);
    const scaled = size / divisor(size, norm.eps, norm.place) || 0;
    const reach = d[axis] * blend(size, scaled, progress(t, 1));
    return [-reach, reach].map((value) => value + d[axis] * middle * (1 - progress(t, 0)) + centre[axis]);
  });
  const corner = (bits) => sides.map((side, axis) => side[(bits >> axis) & 1]);
  return [...Array(1 << sides.length).keys()].flatMap((bits) =>
    sides.flatMap((_, axis) => (bits & (1 << axis) ? [] : [[corner(bits), corner(bits | (1 << axis))]])),
  );
}

/** All but the points: axes, plane, sphere, and what becomes of them. brief: fewer words; bare: none; shell: how far
 * eps lets the selected row come. @type {(norm: Norm, raw: number[][], t: number, world: number, axes: number[][],
 *   options?: {brief?: boolean, bare?: boolean, shell?: number}) => Item[]} */
export function sets(norm, raw, t, world, axes, { brief = false, bare = false, shell = 1 } = {}) {
  const { n, u, flat, all, basis, radius, name, d, centre } = sphereOf(norm, t);
  const [appears, gained] = [progress(t, 1), progress(t, 2)];
  const free = norm.mode === "plane";
  const at = (row) => see(axes, row);
  const arms = (rows, size = radius) => rows.map((row) => at(scale(times(row, d), size)));
  const middle = at(centre);
  const far = 1.08 * world;
  const words = bare ? () => [] : label;
  const tips = transpose(axes).map((axis) => scale(unit(axis), far));
  const items = [
    { kind: "segments", pairs: tips.map((tip) => [ORIGIN, tip]), colours: "muted", width: 1, alpha: 0.55 },
    ...tips.flatMap((tip, i) => words(scale(tip, 1.04), `x${"₁₂₃₄"[i]}`, "muted", [0, 0])),
  ];
  if (norm.mode === "batch") {
    if (!raw.length) return items;
    const edges = deviations(norm, raw, t).map((edge) => edge.map(at));
    const corner = edges[edges.length - 1][1];
    const centroid = scale(add(edges[0][0], corner), 0.5);
    items.push(
      { kind: "segments", pairs: edges, colours: "accent", width: 2, alpha: 0.8 },
      { kind: "points", at: [centroid], colours: "ink", markers: 5, radius: 7 },
    );
    if (!brief) items.push(...label(centroid, "centroid", "ink", [12, 4]), ...label(corner, "one deviation", "accent"));
    return items;
  }
  const e = scale(at(ones(n)), brief ? far : 1.2 * far);
  if (length(e) > 1e-9 * far && norm.mode !== "length") {
    items.push(line(scale(e, -1), e, "contrast", 1.6, { dash: [7, 5], alpha: norm.mode === "layer" ? 0.9 : 0.45 }));
    items.push(...label(e, "all-ones", "contrast", [6, 12]));
  }
  if (flat && n === 3) {
    const upright = imageNormal(u, d);
    const level = unit(cross(UPRIGHT, upright));
    const reach = Math.max(...arms(basis).map(length));
    const size = blend(Math.max(0.6 * world, 1.03 * reach), 1.03 * reach, appears);
    const sheet = plane(middle, level, cross(upright, level), size);
    const text = free ? "u · x = 0" : gained ? "image of mean = 0" : "mean = 0";
    const along = scale(upright, 0.95 * radius * (free ? 1 : gained));
    items.push(
      { kind: "surface", ...sheet, colour: "third", alpha: 0.07 + 0.06 * progress(t, 0), edge: "third" },
      ...words(sheet.places[0], text, "third", [0, 14]),
      image(arms(all), middle, { alpha: appears, colour: "muted", fill: 0.06, edge: 0.16 }),
      ...arrow(middle, add(middle, along), "third", brief ? "" : `normal ${free ? "u" : "1"}${gained ? "/g" : ""}`),
    );
  }
  const curve = basis.length === 2;
  const end = (size = radius) => add(middle, farthest(arms(basis, size), [0, 0, curve ? -1 : 1]));
  const shadow = basis.length > 3 ? "shadow of the " : "";
  const text = shadow + (gained ? (curve ? "ellipse" : "ellipsoid") : `${shadow && "sphere, "}radius ${name}`);
  items.push(image(arms(basis), middle, { alpha: appears }));
  items.push(line(middle, end(), "accent", 1.2, { alpha: 0.8 * appears * (1 - gained) }));
  if (!brief || !gained) items.push(...words(end(), text, "accent", [8, curve ? 12 : -10], appears));
  if (shell < 0.995) {
    const dashed = curve ? { width: 1.6, dash: [5, 4] } : { fill: 0.05, edge: 0.45 };
    items.push(image(arms(basis, radius * shell), middle, { alpha: appears, colour: "error", ...dashed }));
    items.push(...label(end(radius * shell), `ε: ${number(shell, 3)} · ${name}`, "error", [8, 4], appears));
  }
  return [...items, ...arrow(ORIGIN, middle, "ink", brief ? "" : "bias")];
}

/** How far the sets of a norm reach at the five stages. @type {(norm: Norm) => number[]} */
export function reaches(norm) {
  const { radius } = sphereOf(norm, 0);
  const whole = 1.04 * radius;
  const gained = Math.max(whole, ...norm.gain.map((gain) => radius * Math.abs(gain)));
  return [whole, whole, whole, gained, gained + 0.5 * length(norm.bias)];
}

/** The direction, but within four degrees of all-ones all-ones. @type {(direction: number[]) => number[]} */
export function snapped(direction) {
  const e = ones(direction.length);
  const along = dot(unit(direction), e);
  return Math.abs(along) > SNAP ? scale(e, Math.sign(along)) : unit(direction);
}

/** A frame of one panel, in which the selected point can be dragged, and one thing more.
 * @type {(state: any, computed: any, axes: number[][], radius: number, title: string, items: Item[],
 *   more?: {handle: [id: string, label: string, at: number[]], patch: (delta: number[]) => any} | null)
 *   => import("explorer/frames.js").Frame} */
export function view(state, computed, axes, radius, title, items, more) {
  const { shown, raw, norm, labels } = computed;
  const index = state.selected;
  const handles = [];
  if (more) handles.push({ id: more.handle[0], label: more.handle[1], at: more.handle[2], panel: 0 });
  if (shown[index]) {
    const at = see(axes, shown[index], scale(norm.bias, progress(state.stage, 3)));
    handles.push({ id: "point", label: `Point ${labels[index]}`, at, panel: 0 });
  }
  return {
    panels: [{ kind: "space", title, items }],
    handles,
    radius,
    drag(id, delta) {
      if (id !== "point") return more?.patch(delta);
      // As many digits as the world of that radius shows.
      const step = 10 ** Math.floor(Math.log10(radius) - 3);
      const to = add(raw[index], matrixVector(transpose(axes), delta));
      const rounded = to.map((value) => Number((Math.round(value / step) * step).toPrecision(12)));
      return { edits: { ...state.edits, [index]: rounded } };
    },
  };
}

/** @type {Scene} */
export function three(state, computed) {
  const { norm, raw, rows } = computed;
  const radius = fit(state, computed, reaches(norm));
  const tip = scale(unit(norm.normal), 0.95 * Math.sqrt(3));
  const items = [
    ...sets(norm, raw, state.stage, radius, FEATURES, { shell: rows[state.selected]?.shrink }),
    ...points(state, computed, FEATURES),
  ];
  const turns = norm.mode === "plane" && state.stage <= 2;
  return view(
    state,
    computed,
    FEATURES,
    radius,
    "The space of the features",
    items,
    turns
      ? {
          handle: ["normal", "Normal of the plane", tip],
          patch: (delta) => ({ normal: [...snapped(add(tip, delta)), state.normal[3]] }),
        }
      : null,
  );
}

/** The way back at one point: the gradient that arrives, what the norm takes out of it, what is left at x.
 * @type {Scene} */
export function gradient(state, computed) {
  const { norm, raw, rows, stages, gradient: found } = computed;
  const known = found && !rows[state.selected].undefined;
  // The world is that of this point alone, and the same at every stage; it does not run away from the pointer.
  const own = stages.map((rows) => [rows[state.selected] ?? []]);
  const edits = state.selected in state.edits ? [0] : [];
  const sizes = [0, 2, 4].map((stage) => fit({ stage, edits }, { stages: own }, Array(5).fill(reaches(norm)[2])));
  const fitted = Math.max(...sizes);
  const wanted = known ? [add(found.at, found.input), add(found.output, found.upstream)].map(length) : [];
  const radius = Math.min(1.6 * fitted, Math.max(fitted, ...wanted)) || fitted;
  const items = [
    ...sets(norm, raw, 2, radius, FEATURES, { bare: true }),
    ...points(state, computed, FEATURES, { alpha: 0.22, radius: 3.2, selected: -1 }),
  ];
  if (!known) {
    if (found) items.push(...label(ORIGIN, "0/0: no gradient", "error"));
    return view(state, computed, FEATURES, radius, "Gradients", items);
  }
  const { at: x, output, upstream } = found;
  const row = stages[2][state.selected];
  const [end, kept, whole] = [add(output, upstream), add(row, found.tangent), add(row, found.scaledGradient)];
  const without = add(kept, found.alongRow);
  const removed = (from, to, text) =>
    length(minus(to, from)) < 1e-6
      ? []
      : [
          line(from, to, "contrast", 2.2, { dash: [5, 4] }),
          ...label(scale(add(from, to), 0.5), text, "contrast", [9, 0]),
        ];
  if (length(minus(end, whole)) > 1e-9) {
    const { basis, radius: size, d, centre } = sphereOf(norm, 4);
    const arms = basis.map((vector) => scale(times(vector, d), size));
    items.push(image(arms, centre, { alpha: 0.35, width: 1.4, fill: 0.05, edge: 0.12 }));
    items.push(...arrow(row, whole, "accent", "times gain"));
  }
  items.push(
    { kind: "points", at: [x, row, output], colours: "ink", markers: 5, radius: 7 },
    ...[
      [x, row],
      [row, output],
    ].map(([from, to]) => line(from, to, "muted", 1, { dash: [2, 3] })),
    ...arrow(output, end, "accent", "gradient that arrives"),
    ...arrow(row, kept, "third", "what is left"),
    ...removed(kept, without, "removed: along the row"),
    ...removed(without, whole, `removed: along ${norm.mode === "plane" ? "u" : "all-ones"}`),
    ...arrow(x, add(x, found.input), "third", "gradient at x"),
    ...label(x, "x", "ink", [-10, 12]),
    ...label(row, "z", "ink", [-10, 12]),
    ...label(output, "y", "ink", [-10, 12]),
  );
  return view(state, { ...computed, shown: raw }, FEATURES, radius, "Gradients", items, {
    handle: ["upstream", "Gradient that arrives at the output", end],
    patch: (delta) => ({ upstream: [...add(upstream, delta), state.upstream[3]] }),
  });
}
