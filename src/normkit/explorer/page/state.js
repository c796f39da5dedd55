// The state of the page: one plain frozen object, and what each of its parts may be.

/** @typedef {{[key in keyof typeof FIELDS]: any}} State   FIELDS says what each part may be */
/** @typedef {{get(): State, set(patch: Partial<State>): void, subscribe(listener: any): void}} Store */

const MODES = ["layer", "rms", "batch", "length", "plane"];

/** The modes that a scene offers; none where it shows several at once. */
export const modesOf = (scene) =>
  ({
    three: MODES,
    four: MODES,
    model: MODES.filter((mode) => mode !== "batch" && mode !== "plane"),
    clusters: [],
    gradient: MODES.filter((mode) => mode !== "batch"),
    attention: MODES.filter((mode) => mode !== "batch" && mode !== "plane"),
    depth: [],
  })[scene];

// The dimensions of a scene, and its cloud if the present one has others.
const CLOUDS = {
  three: [3, "scatter"],
  four: [4, "four"],
  clusters: [3, "clusters"],
  gradient: [3, "scatter"],
  attention: [3, "keys"],
};
/** Points that belong to one scene: no other keeps them. */
const OWN = ["clusters", "keys"];

const clamp = (value, low, high) => Math.min(high, Math.max(low, value)) + 0;
const isVector = (value, limit) =>
  Array.isArray(value) &&
  value.length > 0 &&
  value.length < 5 &&
  value.every((each) => typeof each === "number" && Math.abs(each) <= limit);

// A part of the state: where it starts, what it may be, and what of a value is used (undefined: nothing).
const choice = (...choices) => ({
  start: choices[0],
  says: choices.join(" or "),
  clean: (value) => (choices.includes(value) ? value : undefined),
});
const number = (start, low, high, steps = 1e4) => ({
  start,
  says: `a ${steps === 1 ? "whole " : ""}number from ${low} to ${high}`,
  clean: (value) => (Number.isFinite(value) ? Math.round(clamp(value, low, high) * steps) / steps : undefined),
});
const whole = (start, low, high) => number(start, low, high, 1);
// Four numbers; fewer leave the others as they were.
const vector = (start, least = -1) => ({
  start,
  says: `up to four numbers from -100 to 100${least < 0 ? "" : ", not all 0"}`,
  clean: (value, before) =>
    isVector(value, 100) && Math.hypot(...value.slice(0, 3)) > least
      ? [...value, ...before.slice(value.length)]
      : undefined,
});

export const FIELDS = {
  scene: choice("three", "four", "model", "clusters", "gradient", "attention", "depth"),
  mode: choice(...MODES),
  cloud: {
    start: "scatter",
    says: "the name of a cloud of points",
    clean: (value) => (/^[a-z][\w-]{0,39}$/i.test(value) ? `${value}` : undefined),
  },
  stage: number(0, 0, 4),
  eps: {
    start: 1e-5,
    says: "0 or a number from 1e-12 to 10",
    clean: (value) => (Number.isFinite(value) ? (value > 0 && clamp(value, 1e-12, 10)) || 0 : undefined),
  },
  place: choice("inside", "outside"),
  gain: vector([0.6, 1.3, 1, 0.8]),
  bias: vector([-0.3, 0.6, 0.4, 0.2]),
  // Where only three count they must have a direction, too.
  normal: vector([0.2, 0.1, 1, 0.2], 1e-9),
  edits: {
    start: {},
    says: "points such as 3:1,2,0.5;4:0,1,2",
    clean: (value) =>
      Object.entries(value ?? "?").every(([row, at]) => /^\d{1,6}$/.test(row) && isVector(at, 1e9))
        ? structuredClone(value)
        : undefined,
  },
  selected: whole(-1, -1, 999999),
  upstream: vector([0.1, 1.9, 0.3, 0.4]),
  // Of attention: the query, and how large the keys are.
  query: vector([1.5, 0.6, -0.9, 0]),
  size: number(1, 0.25, 4),
  yaw: number(-0.45, -3.1416, 3.1416),
  pitch: number(0.5, -1.5708, 1.5708),
  zoom: number(1, 0.2, 8),
  model: whole(0, 0, 9999),
  site: whole(0, 0, 9999),
  colour: choice("token", "position", "layer"),
  depth: whole(24, 1, 48),
  spread: number(1, 0.25, 4),
  residual: { start: true, says: "true or false", clean: (value) => (typeof value === "boolean" ? value : undefined) },
  seed: whole(1, 0, 4294967295),
  layer: whole(-1, -1, 48),
  walk: whole(0, 0, 7),
  // How far the cross of a question stands from where the point starts, in the drawing's three directions.
  guess: vector([0, 0, 0.5, 0]),
};
export const KEYS = Object.keys(FIELDS);

/** Whether two values of a part are one. */
export const same = (a, b) => a === b || (typeof a === "object" && JSON.stringify(a) === JSON.stringify(b));
const freeze = (value) => {
  if (typeof value === "object") Object.values(value).forEach(freeze);
  return Object.freeze(value);
};

/** The state after a patch. What cannot be used leaves the old value; what makes no sense any more goes. */
export const next = (before, patch, clouds = null) => {
  const after = { ...before };
  for (const key of Object.keys(patch)) {
    if (!Object.hasOwn(FIELDS, key)) throw new TypeError(`The state has no "${key}".`);
    const value = FIELDS[key].clean(patch[key], before[key]);
    if (value !== undefined && !same(value, before[key])) after[key] = value;
  }
  const modes = modesOf(after.scene);
  if (modes.length && !modes.includes(after.mode)) after.mode = "layer";
  const [n, own] = CLOUDS[after.scene] ?? [];
  if (own && after.scene !== before.scene && !("cloud" in patch) && after.cloud !== "given") {
    if (OWN.includes(after.cloud) || OWN.includes(own)) after.cloud = own;
  }
  const bound = clouds && own;
  if (bound && !(Object.hasOwn(clouds, after.cloud) && clouds[after.cloud].n === n)) {
    after.cloud = clouds.given?.n === n ? "given" : own;
  }
  if (after.cloud !== before.cloud && !(patch.edits && after.cloud === patch.cloud)) after.edits = {};
  const source = ({ scene, model, cloud }) => (scene === "model" ? model : cloud);
  if (source(after) !== source(before) && !("selected" in patch)) after.selected = -1;
  if (bound) {
    const last = clouds[after.cloud].points.length - 1;
    const outside = Object.keys(after.edits).filter((row) => Number(row) > last || after.edits[row].length !== n);
    if (outside.length) after.edits = { ...after.edits };
    for (const row of outside) delete after.edits[row];
    after.selected = Math.min(after.selected, last);
  }
  if (after.scene === "gradient") after.selected = Math.max(after.selected, 0);
  after.layer = Math.min(after.layer, after.depth);
  return freeze(after);
};

export const DEFAULTS = freeze(Object.fromEntries(KEYS.map((key) => [key, FIELDS[key].start])));
/** The defaults with what the maker of a page wants otherwise. */
export const startFrom = (patch) => next(DEFAULTS, patch);

/** Holds the state and tells its listeners of every change; within clouds ({n, points} by name), if given. */
export const createStore = (initial, { clouds = null } = {}) => {
  let state = next(initial, {}, clouds);
  const listeners = [];
  return {
    get: () => state,
    set: (patch) => {
      const previous = state;
      const after = next(previous, patch, clouds);
      if (KEYS.every((key) => after[key] === previous[key])) return;
      state = after;
      listeners.forEach((listener) => listener(state, previous));
    },
    subscribe: (listener) => void listeners.push(listener),
  };
};
