// Attention: the same keys as they are and after a norm, one query, and what its softmax makes of them.
import { NORMS, number } from "explorer/formulas.js";
import { add, scale } from "explorer/linear.js";
import { arrow, fit, label, points } from "explorer/marks.js";
import { FEATURES, reaches, sets, view } from "explorer/space.js";

const ORIGIN = [0, 0, 0];

/** The weights as bars, a key each, up to the largest one, and the entropy.
 * @type {(found: any, groups: number[], largest: number, box: any) => any[]} */
function bars({ weights, entropy, selectable }, groups, largest, box) {
  const [left, right, bottom] = [box.x + 14, box.x + box.width - 10, box.y + box.height - 22];
  const top = box.y + 34;
  const step = (right - left) / weights.length;
  const words = (x, y, text, colour = "muted", style = {}) => ({ type: "text", x, y, text, colour, size: 11.5, ...style });
  const line = (y, colour) => ({ type: "line", at: [left, y, right, y], colour, width: 1 });
  const most = Math.log(weights.length);
  const wide = box.width > 300;
  const note = wide && selectable.includes(false) ? "; ×: no query selects it" : "";
  return [
    words(left, box.y + 8, `${wide ? "Softmax: " : ""}entropy ${number(entropy, 3)} of ${number(most, 3)}${note}`, "ink"),
    line(top, "line"),
    line(bottom, "muted"),
    words(right, top - 8, number(largest, 2), "muted", { anchor: "end" }),
    ...weights.flatMap((weight, i) => {
      if (Number.isNaN(weight)) return [];
      const [x, y] = [left + step * (i + 0.15), bottom - ((bottom - top) * weight) / largest];
      const at = [x, bottom, x, y, x + 0.7 * step, y, x + 0.7 * step, bottom];
      const middle = x + 0.35 * step;
      return [
        { type: "polygon", at, colour: `group-${groups[i] % 8}`, alpha: 1 },
        ...(wide ? [words(middle, y - 8, number(weight, 2), "ink", { anchor: "middle", size: 10.5 })] : []),
        words(middle, bottom + 12, `${i + 1}${selectable[i] ? "" : wide ? " ×" : "×"}`, selectable[i] ? "muted" : "error", {
          anchor: "middle",
        }),
      ];
    }),
  ];
}

/** @type {import("explorer/space.js").Scene} */
export function attention(given, computed) {
  const { norm, raw, stages, groups, before, after, query } = computed;
  // The three stages of the keys take the whole timeline.
  const state = { ...given, stage: given.stage / 2 };
  const bare = { ...computed, shown: stages[0] };
  const arms = [
    [{ ...state, stage: 0 }, bare, before, { ...norm, mode: "rms" }, "As they are"],
    [state, computed, after, norm, `${state.stage < 2 ? "On the way through" : "After"} ${NORMS[norm.mode]}`],
  ];
  const radius = Math.max(...arms.map(([at, of]) => fit(at, of, reaches(norm))));
  const largest = Math.max(...[...before.weights, ...after.weights].filter(Number.isFinite)) || 1;
  const tip = scale(query, 0.5 * radius);
  const panels = arms.map(([at, of, found, kind, title]) => {
    const hidden = of.shown.filter((at, i) => !found.selectable[i] && at.every(Number.isFinite));
    return {
      kind: "space",
      title,
      items: [
        ...sets(kind, raw, at.stage, radius, FEATURES, { brief: true }),
        { kind: "segments", pairs: found.hull, colours: "note", width: 1.6, alpha: 0.8 },
        ...arrow(ORIGIN, tip, "ink", "query"),
        ...points(at, of, FEATURES),
        ...of.shown.flatMap((at, i) => label(at, `${i + 1}`, "ink", [7, -7])),
        { kind: "points", at: hidden, colours: "error", markers: 5, radius: 8 },
      ],
      strip: (box) => bars(found, groups, largest, box),
    };
  });
  const handle = ["query", "Query", tip];
  const own = view({ ...state, stage: 0 }, bare, FEATURES, radius, "", [], {
    handle,
    patch: (delta) => ({ query: [...scale(add(tip, delta), 2 / radius), 0] }),
  });
  return { ...own, panels, drag: (id, delta) => own.drag(id, id === "query" ? delta : scale(delta, 1 / given.size)) };
}
