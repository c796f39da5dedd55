// From the numbers to the picture: which scene describes what is drawn.
import { activations } from "explorer/activations.js";
import { clusters } from "explorer/clusters.js";
import { hyperplane } from "explorer/hyperplane.js";
import { gradient, three } from "explorer/space.js";
import { stack } from "explorer/stack.js";

/** @typedef {import("explorer/marks.js").Item} Item */
/** @typedef {{panels: {kind: string, title: string, items?: Item[], draw?: (box: any) => any[]}[],
 *   handles: {id: string, label: string, at: number[], panel: number}[], radius: number,
 *   drag: (id: string, delta: number[]) => object}} Frame */

const SCENES = { three, four: hyperplane, model: activations, clusters, gradient, depth: stack };

/** What to draw, in world coordinates, and what can be taken hold of.
 * @param {any} state @param {any} computed @returns {Frame} */
export function frame(state, computed) {
  return SCENES[computed.scene](state, computed);
}
