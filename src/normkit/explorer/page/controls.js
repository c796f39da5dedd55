/** The controls beside the drawing: each shows a part of the state, in the scenes where it matters, and sets it. */
import { byId, element, put } from "explorer/elements.js";
import { NORMS } from "explorer/formulas.js";
import { normals, uniform } from "explorer/random.js";
import { modesOf, startFrom } from "explorer/state.js";

/** The largest slider value of every vector. */
const REACH = { normal: 1, gain: 3, bias: 3, upstream: 3, query: 3 };
const FREE = "three four gradient";
const NORMED = `${FREE} model clusters attention`;
/** A factor shown as a power of two. */
const factor = (key, scenes) => ({
  scenes,
  show: (state) => Math.log2(state[key]).toFixed(2),
  set: (power) => ({ [key]: 2 ** power }),
  text: (state) => `× ${state[key].toPrecision(3)}`,
});

/** Where epsilon stands on its slider: 0 is exactly 0, then a tenth of a decade a step. */
export const epsilonPosition = (eps) => (eps > 0 ? Math.round(10 * Math.log10(eps)) + 121 : 0);
/** The epsilon of a position, to three digits. */
export const epsilonAt = (position) => (position > 0 ? Number((10 ** ((position - 121) / 10)).toPrecision(3)) : 0);
/** "exactly 0", "1e-5", "0.1". */
export const epsilonText = (eps) => (eps === 0 ? "exactly 0" : eps < 0.01 ? eps.toExponential() : String(eps));

/** The clouds that mean nothing but groups of points. */
const REDRAWN = ["scatter", "clusters", "four"];

/** Other points in place of a cloud's, by index: as widely spread about the middle of each group, in tenths. */
export const redrawn = ({ points, groups, n }, seed) => {
  const noise = normals(points.length * n + ((points.length * n) % 2), uniform(seed));
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  return Object.fromEntries(
    points.map((row, i) => {
      const own = points.filter((_, k) => groups[k] === groups[i]);
      const drawn = row.map((_, axis) => {
        const values = own.map((other) => other[axis]);
        const middle = mean(values);
        const spread = Math.sqrt(mean(values.map((value) => (value - middle) ** 2)));
        return Math.round(10 * (middle + spread * noise[i * n + axis])) / 10;
      });
      return [i, drawn];
    }),
  );
};

/** A patch that shows a site of a model by the norm that it has there. */
const shown = ({ models }, model, site) => {
  const { mode, eps, place } = models[model]?.sites[site] ?? {};
  return { model, site, ...(mode && { mode, eps, place }) };
};

/**
 * By id: the scenes where it matters, what it shows, what it sets, and how that reads. One that has the name of its
 * part of the state shows and sets just that.
 * @type {Record<string, {scenes: string, show?: Function, set?: Function, text?: Function}>}
 */
const CONTROLS = {
  model: { scenes: "model", set: (model, data) => shown(data, Number(model), 0) },
  site: { scenes: "model", set: (site, data, state) => shown(data, state.model, Number(site)) },
  modes: { scenes: `${FREE} model attention`, show: (state) => state.mode, set: (mode) => ({ mode }) },
  colour: { scenes: "model" },
  cloud: { scenes: FREE },
  eps: {
    scenes: NORMED,
    show: (state) => epsilonPosition(state.eps),
    set: (position) => ({ eps: epsilonAt(position) }),
    text: (state) => epsilonText(state.eps),
  },
  place: { scenes: NORMED },
  normal: { scenes: FREE },
  gain: { scenes: `${FREE} clusters` },
  bias: { scenes: `${FREE} clusters` },
  upstream: { scenes: "gradient" },
  query: { scenes: "attention" },
  size: factor("size", "attention"),
  depth: { scenes: "depth", text: (state) => state.depth },
  spread: factor("spread", "depth"),
  layer: { scenes: "depth", text: (state) => (state.layer < 0 ? "none" : `layer ${state.layer}`) },
  residual: { scenes: "depth" },
  seed: { scenes: "depth" },
};

/** Rewrites the options of a select that changed; each is [value, text, reason why it cannot be chosen]. */
function fill(id, choices) {
  const select = byId(id);
  if (select.dataset.choices === String(choices)) return;
  select.dataset.choices = choices;
  select.replaceChildren(
    ...choices.map(([value, text, reason]) =>
      reason
        ? element("option", { value, textContent: `${text} (${reason})`, title: reason, disabled: true })
        : element("option", { value, textContent: text }),
    ),
  );
}

/** What there is to choose. */
function choose(state, data) {
  const modes = modesOf(state.scene);
  const sites = data.models[state.model]?.sites ?? [];
  const clouds = Object.entries({
    ...(data.given && { given: { label: "your points", ...data.given } }),
    ...data.clouds,
  });
  const n = state.scene === "four" ? 4 : 3;
  const named = (list, key) => list.map((item, index) => [String(index), item[key]]);
  fill("model", named(data.models, "name"));
  fill("site", named(sites, "path"));
  fill(
    "modes",
    Object.entries(NORMS).map(([mode, name]) => [mode, name, !modes.includes(mode) && "needs whole vectors"]),
  );
  fill(
    "colour",
    ["token", "position", "layer"].map((by) => [by, by, by === "layer" && !sites[state.site]?.layers && "one layer"]),
  );
  fill(
    "cloud",
    clouds.filter(([, cloud]) => cloud.n === n).map(([name, cloud]) => [name, cloud.label]),
  );
}

/** A slider and a number for each axis of a vector. */
function mountVector(store, key) {
  const fieldset = byId(key);
  const name = fieldset.firstElementChild.textContent.toLowerCase();
  const rows = [0, 1, 2, 3].map((axis) => {
    const label = `${name}, axis ${axis + 1}`;
    const range = { type: "range", min: -REACH[key], max: REACH[key], step: REACH[key] / 60, ariaLabel: label };
    const oninput = ({ target }) => {
      const value = Number(target.valueAsNumber.toFixed(4));
      if (Number.isFinite(value)) store.set({ [key]: store.get()[key].with(axis, value) });
    };
    const inputs = [range, { type: "number", step: "any", ariaLabel: `${label}, typed` }].map((of) =>
      element("input", { ...of, oninput }),
    );
    fieldset.append(element("div", { className: "axis" }, element("span", { textContent: axis + 1 }), ...inputs));
    return inputs;
  });
  return (state, n) =>
    rows.forEach((inputs, axis) => {
      const value = state[key][axis];
      put(inputs[0].parentElement, { hidden: axis >= n });
      for (const input of inputs) if (input.valueAsNumber !== value) input.value = value;
      put(inputs[0], { ariaValueText: `${name} ${value}` });
    });
}

/** Fills the panel and listens to it. */
export function mountControls(store, data) {
  const scenes = [...byId("scenes").children];
  // Scenes that say little of raw points open where they say more.
  const enter = ({ model, site }, scene) => ({
    scene,
    walk: 0,
    ...(scene === "attention" && { stage: 4 }),
    ...(scene === "model" && { stage: 2, ...shown(data, model, site) }),
  });
  for (const button of scenes) button.onclick = () => store.set(enter(store.get(), button.dataset.scene));
  const vectors = Object.keys(REACH).map((key) => mountVector(store, key));
  const inputs = Object.entries(CONTROLS).filter(([id]) => !REACH[id]);
  for (const [id, { set = (value) => ({ [id]: value }) }] of inputs) {
    const input = byId(id);
    const read = () => (input.options ? input.value : input.type === "checkbox" ? input.checked : input.valueAsNumber);
    input.oninput = () => store.set(set(read(), data, store.get()));
  }
  byId("snap").onclick = () => store.set({ normal: [1, 1, 1, 1] });
  byId("even").onclick = () => store.set({ query: [1, 1, 1, 0] });
  let draws = 0;
  byId("draw").onclick = () => {
    const { cloud } = store.get();
    store.set({ walk: 0, edits: redrawn(data.clouds[cloud], ++draws) });
  };
  byId("reset").onclick = () => {
    const { scene } = store.get();
    put(byId("message"), { textContent: "" });
    store.set(startFrom({ ...(scene === "model" && shown(data, 0, 0)), ...data.start, scene }));
  };

  return (state, computed) => {
    choose(state, data);
    put(byId("layer"), { max: String(state.depth) });
    for (const [id, { scenes: where }] of Object.entries(CONTROLS)) {
      const idle =
        byId(id).options?.length < 2 ||
        (id === "normal" && state.mode !== "plane") ||
        (id === "colour" && Boolean(computed.site?.groups));
      put(byId(id).closest(".field, fieldset"), { hidden: idle || !where.split(" ").includes(state.scene) });
    }
    put(byId("draw"), { hidden: !`${FREE} clusters`.split(" ").includes(state.scene) || !REDRAWN.includes(state.cloud) });
    for (const [id, { show = (from) => from[id], text }] of inputs) {
      const input = byId(id);
      put(input, input.type === "checkbox" ? { checked: show(state) } : { value: String(show(state)) });
      if (text) {
        put(input, { ariaValueText: id === "eps" ? `epsilon ${text(state)}` : String(text(state)) });
        put(input.previousElementSibling, { textContent: String(text(state)) });
      }
    }
    for (const button of scenes) {
      const pressed = String(button.dataset.scene === state.scene);
      // Where the scenes do not fit, they scroll.
      if (pressed === "true" && button.ariaPressed !== pressed) byId("scenes").scrollLeft = button.offsetLeft - 60;
      put(button, { ariaPressed: pressed });
    }
    for (const update of vectors) update(state, computed.n ?? 3);
  };
}
