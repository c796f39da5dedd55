// From the numbers to the picture: which scene describes what is drawn, and the cross of a question in it.
import { activations } from "explorer/activations.js";
import { attention } from "explorer/attention.js";
import { clusters } from "explorer/clusters.js";
import { hyperplane } from "explorer/hyperplane.js";
import { add, helmert, scale } from "explorer/linear.js";
import { label, line, progress, see } from "explorer/marks.js";
import { FEATURES, gradient, three } from "explorer/space.js";
import { stack } from "explorer/stack.js";
import { asks, stepOf } from "explorer/steps.js";

/** @typedef {import("explorer/marks.js").Item} Item */
/** @typedef {{panels: {kind: string, title: string, items?: Item[], draw?: (box: any) => any[],
 *   strip?: (box: any) => any[]}[],
 *   handles: {id: string, label: string, at: number[], panel: number}[], radius: number,
 *   drag: (id: string, delta: number[]) => object}} Frame */

const SCENES = { three, four: hyperplane, model: activations, clusters, gradient, attention, depth: stack };

/** Of a question that is answered with the cross: where the selected point starts, where it lands, and the cross.
 * @param {any} state @param {any} computed */
export function guessed(state, { stages, norm }) {
  const step = stepOf(state);
  if (!step || step.motion || !stages[0][state.selected]) return null;
  const axes = state.scene === "four" ? helmert(4) : FEATURES;
  const at = (stage) => see(axes, stages[stage][state.selected], scale(norm.bias, progress(stage, 3)));
  const start = at(step.state.stage);
  return { start, lands: at(step.to), cross: add(start, state.guess.slice(0, 3)) };
}

/** What to draw, in world coordinates, and what can be taken hold of.
 * @param {any} state @param {any} computed @returns {Frame} */
export function frame(state, computed) {
  const made = SCENES[computed.scene](state, computed);
  const found = guessed(state, computed);
  if (!found) return made;
  const open = asks(state);
  const { cross, lands } = found;
  made.panels[0].items?.push(
    { kind: "points", at: [cross], colours: "ink", markers: 4, radius: 7 },
    ...label(cross, "your cross", "ink", [10, 10]),
    ...(state.stage >= stepOf(state).to ? [line(cross, lands, "ink", 1.4, { dash: [3, 3] })] : []),
  );
  if (!open) return made;
  return {
    ...made,
    handles: [{ id: "guess", label: "The cross", at: cross, panel: 0 }],
    drag: (_, delta) => ({ guess: [...add(state.guess.slice(0, 3), delta), 0] }),
  };
}
