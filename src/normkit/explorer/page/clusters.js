// The same three clusters under three norms, seen through one camera.
import { NORMS } from "explorer/formulas.js";
import { fit, points } from "explorer/marks.js";
import { FEATURES, reaches, sets, view } from "explorer/space.js";

/** @type {import("explorer/space.js").Scene} */
export function clusters(state, computed) {
  const arms = Object.values(computed.arms ?? {}).map((arm) => ({ ...computed, ...arm }));
  // The farthest points may come near the edges of these smaller panels.
  const radius = 0.9 * Math.max(...arms.map((arm) => fit(state, arm, reaches(arm.norm))));
  const panels = arms.map((arm) => ({
    kind: "space",
    title: NORMS[arm.norm.mode],
    items: [
      ...sets(arm.norm, arm.raw, state.stage, radius, FEATURES, { brief: true }),
      ...points(state, arm, FEATURES),
    ],
  }));
  return { ...view(state, arms[0], FEATURES, radius, "", []), panels };
}
