// Activations of a model: three of their n directions, all-ones upwards and the two in which centred rows vary most.
import { number } from "explorer/formulas.js";
import { add, norm as length, scale } from "explorer/linear.js";
import { arrow, blend, farthest, fit, label, line, points, progress, root, see, solid } from "explorer/marks.js";
import { at } from "explorer/norms.js";

/** The axes of the world in the basis (all-ones, first direction, second direction). */
const AXES = [
  [0, 1, 0],
  [0, 0, 1],
  [1, 0, 0],
];
const ORIGIN = [0, 0, 0];

/** What is seen of the sphere in n dimensions, as the square of an ellipsoid's matrix: before gain a ball (without the
 * mean a disc), after gain what the Gram matrix of the site says. Between them squares are blended: such an ellipsoid
 * contains every point on its way. @type {(site: any, mode: string, share: number) => number[][]} */
export function square({ n, gain, square: [s00, s01, s02, s11, s12, s22] }, mode, share) {
  const full = [
    [s11, s12, s01],
    [s12, s22, s02],
    [s01, s02, s00],
  ];
  const g = see(AXES, gain);
  const size = mode === "length" ? 1 : n;
  return full.map((row, i) =>
    row.map((value, j) => {
      const before = i === j && !(mode === "layer" && i === 2) ? size : 0;
      return blend(before, mode === "layer" ? n * value - g[i] * g[j] : size * value, share);
    }),
  );
}

// Rows so many times as far out as nine tenths of all are drawn at the rim, a little beyond the others.
const [FAR, RIM] = [3, 1.2];

/** Rows with those far beyond the others moved in to the rim; which ones were.
 * @type {(rows: number[][]) => {rows: number[][], moved: boolean[]}} */
export function atRim(rows) {
  const lengths = rows.map((row) => length(row.every(Number.isFinite) ? row : row.filter(Number.isFinite)));
  const usual = Float64Array.from(lengths).sort()[Math.floor(0.9 * (rows.length - 1))];
  const most = Math.max(0, ...lengths.filter((size) => size <= FAR * usual));
  const moved = lengths.map((size) => most > 0 && size > FAR * usual);
  return { rows: rows.map((row, i) => (moved[i] ? scale(row, (RIM * most) / lengths[i]) : row)), moved };
}

/** @type {import("explorer/space.js").Scene} */
export function activations(state, given) {
  const { site, norm, giant } = given;
  const none = { handles: [], drag: () => ({}) };
  if (!site) return { ...none, panels: [{ kind: "space", title: "No activations", items: [] }], radius: 1 };
  const low = Math.floor(state.stage);
  // Of all stages, fit and at read the two that the picture is between.
  const between = Math.min(3, low);
  const rim = given.stages.map((rows, k) => (k === between || k === between + 1 ? atRim(rows) : { rows, moved: [] }));
  const stages = rim.map(({ rows }) => rows);
  const computed = { ...given, stages, shown: at(stages, state.stage) };
  const isFar = (index) => rim[low].moved[index];
  const [appears, gained, shifted] = [1, 2, 3].map((stage) => progress(state.stage, stage));
  const size = norm.mode === "length" ? 1 : Math.sqrt(site.n);
  const centre = scale(see(AXES, site.bias), shifted);
  const wide = 1.04 * Math.max(...root(square(site, norm.mode, 1)).map(length));
  // A disc lies across the wide side of the window.
  const near = (norm.mode === "layer" ? 0.86 : 1.04) * size;
  const radius = fit(state, computed, [0, 0, near, wide, wide + 0.5 * length(site.bias)]);
  const tips = AXES.map((_, i) => AXES.map((__, j) => (i === j ? 0.95 * radius : 0)));
  const shape = square(site, norm.mode, gained);
  const edge = (direction) => add(centre, farthest(root(shape), direction));
  const radiusName = size === 1 ? "1" : `√${site.n} = ${number(size, 4)}`;
  const sphere = `${norm.mode === "layer" ? "disc" : "ball"} of radius ${radiusName}`;
  const rest = `points inside: the rest lies in ${site.n - 3} more directions`;
  const items = [
    { kind: "segments", pairs: tips.slice(0, 2).map((tip) => [ORIGIN, tip]), colours: "muted", width: 1, alpha: 0.55 },
    line(scale(tips[2], -1), tips[2], "contrast", 1.6, { dash: [7, 5], alpha: 0.8 }),
    ...label(tips[2], "all-ones", "contrast", [8, 4]),
    ...computed.explained.flatMap((share, i) =>
      label(tips[i], `direction ${i + 1}: ${Math.round(100 * share)} %`, "muted", [6, 14]),
    ),
    ...(appears ? [solid(centre, shape, { alpha: appears })] : []),
    ...label(edge([0, -0.6, 0.8]), gained ? "shadow of the ellipsoid" : sphere, "accent", [-8, -10], appears),
    ...label(edge([0.43, -0.21, -0.88]), rest, "muted", [-40, 20], site.n > 3 ? appears : 0),
    ...arrow(ORIGIN, centre, "ink", "bias"),
    // Without trails: rows come from far outside the ball.
    ...points(state, computed, AXES, {}),
    ...(giant
      ? label(
          see(AXES, computed.shown[giant.index], centre),
          `“${given.labels[giant.index].trim().slice(0, 20)}”${isFar(giant.index) ? `: ${number(giant.times, 3)} × the median, at the rim` : ""}`,
          "error",
        )
      : []),
  ];
  return { ...none, panels: [{ kind: "space", title: site.path, items }], radius };
}
