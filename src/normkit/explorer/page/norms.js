/**
 * The norms: what PyTorch computes, stage by stage, in float64.
 * @typedef {{mode: string, eps: number, place: string, gain: number[], bias: number[], normal: number[]}} Norm
 *   mode "layer", "rms", "batch", "length" (x / |x|) or "plane" (any normal); eps "inside" or "outside" the root
 */

import { add, dot, mean, minus, norm as length, scale, times, transpose, unit } from "explorer/linear.js";

const ROUNDING = 4 * Number.EPSILON;

/** A row less its mean; twice, as a mean is rounded in proportion to itself. */
const centre = (row) => {
  const first = mean(row);
  const once = row.map((value) => value - first);
  const second = mean(once);
  return once.map((value) => value - second);
};

/** The first map, for rows of n numbers. */
const centring = ({ mode, normal }, n) => {
  if (mode !== "layer" && mode !== "plane") return (row) => row;
  const given = normal.slice(0, n);
  if (mode === "layer" || given.every((value) => value === given[0])) return centre;
  const u = unit(given);
  const project = (row) => minus(row, scale(u, dot(row, u)));
  return (row) => {
    const left = project(project(row));
    // Of a row along u only its rounding is left, which has no direction.
    return length(left) > ROUNDING * length(row) ? left : left.map(() => 0);
  };
};

/** s, which a row is divided by: sqrt(root^2 + eps) or root + eps, with the root of its mean (length: total) square. */
export const divisor = (root, eps, place) => (place === "outside" ? root + eps : Math.hypot(root, Math.sqrt(eps)));

const rootOf = (row, mode) => length(row) / (mode === "length" ? 1 : Math.sqrt(row.length));

const standardize = (points, norm) => {
  if (norm.mode === "batch" && points.length) {
    // Each column is a row to be centred and scaled.
    const columns = standardize(transpose(points), { ...norm, mode: "layer" });
    return { centred: transpose(columns.centred), scaled: transpose(columns.scaled) };
  }
  const centred = points.map(centring(norm, points[0]?.length));
  const scaled = centred.map((row) => {
    const s = divisor(rootOf(row, norm.mode), norm.eps, norm.place);
    return row.map((value) => value / s);
  });
  return { centred, scaled };
};

/** Five lists of points: raw, centred, scaled, times gain, plus bias. 0/0 is NaN. Batch: with the biased variance. */
export const normalize = (points, norm) => {
  const { centred, scaled } = standardize(points, norm);
  const gained = scaled.map((row) => times(row, norm.gain));
  return [points, centred, scaled, gained, gained.map((row) => add(row, norm.bias))];
};

/** The points at stage t of 0..4; between two stages they travel straight. */
export const at = (stages, t) => {
  const from = Math.floor(t);
  const share = t - from;
  if (share === 0) return stages[from];
  return stages[from].map((row, i) => row.map((value, j) => (1 - share) * value + share * stages[from + 1][i][j]));
};

/**
 * The way of a gradient back from the output of a row (any mode but batch). scaledGradient = g * upstream is alongOnes
 * (along the normal of the plane) + alongRow (along the centred row) + tangent (to the sphere). `kept` is the share of
 * alongRow that eps lets through, and input = (tangent + kept alongRow) / s the gradient at x.
 */
export const vjp = (x, norm, upstream) => {
  const project = centring(norm, x.length);
  const centred = project(x);
  const s = divisor(rootOf(centred, norm.mode), norm.eps, norm.place);
  const scaledGradient = x.map((_, i) => norm.gain[i] * upstream[i]);
  const inPlane = project(scaledGradient);
  const direction = unit(centred);
  const alongRow = scale(direction, dot(direction, inPlane));
  const tangent = minus(inPlane, alongRow);
  const kept = norm.eps / s / (norm.place === "outside" ? 1 : s);
  const input = tangent.map((value, i) => (value + kept * alongRow[i]) / s);
  return { scaledGradient, alongOnes: minus(scaledGradient, inPlane), alongRow, tangent, kept, input };
};

/** Facts of a row of n numbers: from its mean, its length without it, and the scaled length over the sphere's. */
export const factsOf = (n, mean, across, shrink) => {
  const along = Math.sqrt(n) * mean;
  const whole = Math.hypot(along, across);
  return {
    mean,
    rms: whole / Math.sqrt(n),
    deviation: across / Math.sqrt(n),
    length: whole,
    angleToOnes: whole === 0 ? NaN : (Math.atan2(across, along) * 180) / Math.PI,
    shrink,
    undefined: Number.isNaN(shrink),
  };
};

/** Facts of a row x, from the row and its second stage. */
export const facts = (x, { mode }, scaled) => factsOf(x.length, mean(x), length(centre(x)), rootOf(scaled, mode));
