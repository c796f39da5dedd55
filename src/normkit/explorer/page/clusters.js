// The same three clusters under three norms, seen through one camera; below each, the means and lengths of its points.
import { NORMS, number } from "explorer/formulas.js";
import { mean, norm as length } from "explorer/linear.js";
import { fit, points } from "explorer/marks.js";
import { FEATURES, reaches, sets, view } from "explorer/space.js";

/** The values of the points on a line from low to high, a row for each colour. */
function numberLine(name, values, groups, [low, high], box) {
  const [left, width] = [box.x + 14, box.width - 28];
  const bottom = box.y + box.height - 18;
  const x = (value) => left + (width * (value - low)) / (high - low);
  const words = (at, y, text, anchor, colour) => ({ type: "text", x: at, y, text, anchor, colour, size: 11.5 });
  return [
    words(left, box.y + 6, name, "start", "ink"),
    { type: "line", at: [left, bottom, left + width, bottom], colour: "muted", width: 1 },
    ...(low ? [words(left, bottom + 11, number(low, 2), "start", "muted")] : []),
    words(x(0), bottom + 11, "0", low ? "middle" : "start", "muted"),
    words(left + width, bottom + 11, number(high, 2), "end", "muted"),
    ...values.flatMap((value, i) => {
      const y = bottom - 6 - ((bottom - box.y - 22) * (groups[i] % 4)) / 4;
      const marker = { type: "marker", x: x(value), y, size: 3, marker: groups[i] % 4, alpha: 0.8 };
      return Number.isFinite(value) ? [{ ...marker, colour: `group-${groups[i] % 8}` }] : [];
    }),
  ];
}

/** @type {import("explorer/space.js").Scene} */
export function clusters(state, computed) {
  const arms = Object.values(computed.arms ?? {}).map((arm) => ({ ...computed, ...arm }));
  // The farthest points may come near the edges of these smaller panels.
  const radius = 0.9 * Math.max(...arms.map((arm) => fit(state, arm, reaches(arm.norm))));
  const [means, lengths] = [mean, length].map((of) => arms.map(({ shown }) => shown.map(of)));
  const [most, longest] = [means, lengths].map((all) => Math.max(1, ...all.flat().map(Math.abs).filter(Number.isFinite)));
  const panels = arms.map((arm, k) => ({
    kind: "space",
    title: NORMS[arm.norm.mode],
    items: [
      ...sets(arm.norm, arm.raw, state.stage, radius, FEATURES, { brief: true }),
      ...points(state, arm, FEATURES),
    ],
    strip: ({ y, height, ...box }) => [
      ...numberLine("means", means[k], arm.groups, [-most, most], { ...box, y, height: height / 2 }),
      ...numberLine("lengths", lengths[k], arm.groups, [0, longest], { ...box, y: y + height / 2, height: height / 2 }),
    ],
  }));
  return { ...view(state, arms[0], FEATURES, radius, "", []), panels };
}
