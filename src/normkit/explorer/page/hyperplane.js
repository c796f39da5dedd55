// Four dimensions, seen from inside the hyperplane in which the centred points lie: the world is the Helmert
// coordinates of a point, and what leaves the hyperplane stands on it as a needle.
import {
  add,
  dot,
  helmert,
  hyperplaneBasis,
  matrixVector,
  norm as length,
  scale,
  transpose,
  unit,
} from "explorer/linear.js";
import { arrow, fit, label, points, progress, see } from "explorer/marks.js";
import { ones, reaches, sets, snapped, view } from "explorer/space.js";

const ORIGIN = [0, 0, 0];

/** The unit normal whose Helmert coordinates (its tilt against all-ones) have moved by `delta`.
 * @type {(u: number[], delta: number[]) => number[]} */
export function tilted(u, delta) {
  const tilt = add(matrixVector(helmert(4), u), delta);
  const kept = scale(tilt, 1 / Math.max(1, length(tilt)));
  const upright = Math.sqrt(Math.max(0, 1 - dot(kept, kept))) * (dot(u, ones(4)) < 0 ? -1 : 1);
  return add(matrixVector(transpose(helmert(4)), kept), scale(ones(4), upright));
}

/** @type {import("explorer/space.js").Scene} */
export function hyperplane(state, computed) {
  const { norm, raw, rows, shown } = computed;
  const free = norm.mode === "plane";
  const u = free ? unit(norm.normal) : ones(4);
  const axes = free ? hyperplaneBasis(u) : helmert(4);
  const radius = fit(state, computed, reaches(norm));
  const centre = scale(norm.bias, progress(state.stage, 3));
  const needles = shown
    .map((row) => {
      const foot = see(axes, row, centre);
      return [foot, add(foot, [0, 0, dot(u, row)])];
    })
    .filter(([foot, tip]) => Math.abs(tip[2] - foot[2]) > 1e-9);
  const [highest] = needles.map(([, tip]) => tip).sort((a, b) => b[2] - a[2]);
  const items = [
    ...sets(norm, raw, state.stage, radius, axes, { shell: rows[state.selected]?.shrink }),
    { kind: "segments", pairs: needles, colours: "contrast", width: 1.3, alpha: 0.7 },
    ...(highest ? label(highest, `each needle: the part along ${free ? "u" : "all-ones"}`, "contrast") : []),
    ...points(state, computed, axes),
  ];
  const tilt = scale(matrixVector(helmert(4), u), 2);
  const turns = free && state.stage <= 2;
  if (turns) items.push(...arrow(ORIGIN, tilt, "third", "tilt of u"));
  return view(
    state,
    computed,
    axes,
    radius,
    "Inside the hyperplane of four dimensions",
    items,
    turns
      ? {
          handle: ["normal", "Tilt of the normal", tilt],
          patch: (delta) => ({ normal: snapped(tilted(u, scale(delta, 0.5))) }),
        }
      : null,
  );
}
