// What all scenes in space share: the points, where they came from, what becomes of a sphere, how large the world is.
import {
  add,
  dot,
  matrixVector,
  minus,
  norm as length,
  scale,
  symmetricEigen3,
  transpose,
  unit,
} from "explorer/linear.js";
import { ellipse, ellipsoid } from "explorer/surfaces.js";

/** @typedef {Record<string, any>} Item one thing to draw, in world coordinates */
/** @typedef {import("explorer/state.js").State} State */
/** @typedef {import("explorer/computation.js").Computed} Computed */

/** How far `t` has come from `low` to `low + 1`. @type {(t: number, low: number) => number} */
export const progress = (t, low) => Math.min(1, Math.max(0, t - low));

/** @type {(from: number, to: number, share: number) => number} */
export const blend = (from, to, share) => (1 - share) * from + share * to;

/** Where a row stands in the world, whose three axes are the rows of `axes`; what of it is not a number stands at the
 * centre. @type {(axes: number[][], row: number[], centre?: number[]) => number[]} */
export const see = (axes, row, centre) =>
  matrixVector(
    axes,
    row.map((value, i) => (Number.isFinite(value) ? value : (centre?.[i] ?? 0))),
  );

/** @type {(at: number[], text: string, colour: string, shift?: number[], alpha?: number) => Item[]} */
export const label = (at, text, colour, shift = [8, -8], alpha = 1) =>
  alpha > 0.3 ? [{ kind: "label", at, text, colour, shift, anchor: shift[0] < 0 ? "end" : "start" }] : [];

/** @type {(from: number[], to: number[], colour: string, width: number, style?: any) => Item} */
export const line = (from, to, colour, width, style) => ({ kind: "curve", at: [from, to], colour, width, ...style });

/** @type {(from: number[], to: number[], colour: string, text?: string) => Item[]} */
export const arrow = (from, to, colour, text) =>
  length(minus(to, from)) > 1e-9
    ? [{ kind: "arrow", from, to, colour, width: 2.6 }, ...(text ? label(to, text, colour) : [])]
    : [];

/** How far a sphere whose axes have become `arms` reaches in a direction: the place from its centre.
 * @type {(arms: number[][], direction: number[]) => number[]} */
export const farthest = (arms, direction) => {
  const parts = unit(arms.map((arm) => dot(arm, direction)));
  return arms.map((arm, i) => scale(arm, parts[i])).reduce(add);
};

/** The symmetric root of a matrix without negative eigenvalues. @type {(matrix: number[][]) => number[][]} */
export function root(matrix) {
  const { values, vectors } = symmetricEigen3(matrix);
  const halves = vectors.map((vector, k) => scale(vector, Math.max(0, values[k]) ** 0.25));
  return transpose(halves).map((row) => transpose(halves).map((other) => dot(row, other)));
}

/** The ellipsoid with this square of its matrix. @type {(centre: number[], square: number[][], style: any) => Item} */
export const solid = (centre, square, { alpha = 1, fill = 0.16, edge = 0.4, colour = "accent" }) => ({
  kind: "surface",
  ...ellipsoid(centre, root(square)),
  colour,
  alpha: fill * alpha,
  edge: colour,
  edgeAlpha: edge * alpha,
});

/** What a sphere looks like whose axes have become `arms`: an ellipse of two, the shadow of an ellipsoid of more.
 * @type {(arms: number[][], centre: number[], style?: any) => Item} */
export const image = (arms, centre, style = {}) => {
  if (arms.length === 2) {
    const at = ellipse(centre, arms[0], arms[1]);
    return { kind: "curve", at, closed: true, colour: "accent", width: 3, ...style };
  }
  const rows = transpose(arms);
  return solid(
    centre,
    rows.map((row) => rows.map((other) => dot(row, other))),
    style,
  );
};

/** The points of all rows, in order, 0/0 as a cross; behind them where they come from: a faint copy of the stage before
 * and a trail, which fade during the next stage.
 * @type {(state: State, computed: Computed, axes: number[][], options?: any) => Item[]} */
export function points({ stage: t, selected }, { shown, stages, groups, norm }, axes, options) {
  const seen = (rows, stage) => rows.map((row) => see(axes, row, scale(norm.bias, progress(stage, 3))));
  const at = seen(shown, t);
  const colours = groups.map((group) => `group-${group % 8}`);
  const lost = shown.map((row) => !row.every(Number.isFinite));
  const trails =
    at.length > 400 || options
      ? []
      : [0, 1, 2, 3].flatMap((stage) => {
          const alpha = Math.min(1, 8 * progress(t, stage)) * (1 - progress(t, stage + 1));
          if (alpha <= 0) return [];
          const [start, end] = [seen(stages[stage], stage), t < stage + 1 ? at : seen(stages[stage + 1], stage + 1)];
          const moved = at.flatMap((_, i) => (length(minus(start[i], end[i])) > 1e-9 ? [i] : []));
          const own = moved.map((i) => colours[i]);
          return [
            {
              kind: "points",
              at: moved.map((i) => start[i]),
              colours: own,
              markers: 5,
              radius: 2.6,
              alpha: 0.45 * alpha,
            },
            {
              kind: "segments",
              pairs: moved.map((i) => [start[i], end[i]]),
              colours: own,
              width: 1,
              alpha: 0.4 * alpha,
            },
          ];
        });
  return [
    ...trails,
    {
      kind: "points",
      at,
      pick: true,
      selected,
      radius: at.length > 800 ? 2.2 : at.length > 200 ? 3.2 : 4.6,
      colours: at.map((_, i) => (lost[i] ? "error" : colours[i])),
      markers: at.map((_, i) => (lost[i] ? 4 : groups[i] % 4)),
      ...options,
    },
    ...(lost.includes(true) ? label(at[lost.indexOf(true)], "0/0", "error", [10, -10]) : []),
  ];
}

/** The radius of the world to fit: large enough for all points at every moment, and straight between two stages. A
 * point moved by hand counts half, so that the world does not run away from the pointer; of a cloud drawn anew all count.
 * @type {(state: {stage: number, edits: any}, computed: {stages: number[][][]}, reaches: number[]) => number}
 * reaches: of the sets, by stage */
export function fit({ stage: t, edits }, { stages }, reaches) {
  const low = Math.min(3, Math.floor(t));
  const count = stages[0].length;
  const byHand = (i) => i in edits && (count === 1 || Object.keys(edits).length < count);
  const [from, to] = [low, low + 1].map((stage) =>
    stages[stage].reduce(
      (most, row, i) => Math.max(most, length(row.filter(Number.isFinite)) * (byHand(i) ? 0.5 : 1)),
      reaches[stage],
    ),
  );
  return blend(from, to, t - low) || 1;
}
