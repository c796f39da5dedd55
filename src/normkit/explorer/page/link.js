// The state as text in the address bar: a link that others can open.
import { DEFAULTS, FIELDS, KEYS, next, same } from "explorer/state.js";

const VERSION = 1;
const [LONGEST, MOST_PROBLEMS] = [40000, 6];

const write = (value) =>
  typeof value === "object" && !Array.isArray(value)
    ? Object.entries(value)
        .map(([row, at]) => `${row}:${at}`)
        .join(";")
    : String(value);
// Text as a value of the type of `like`.
const read = (text, like) => {
  if (typeof like === "string") return text;
  if (typeof like === "number") return /^-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text) ? Number(text) : undefined;
  if (typeof like === "boolean") return text === "true" || (text === "false" ? false : undefined);
  if (Array.isArray(like)) return text.split(",").map((each) => read(each, 0));
  const pairs = text
    .split(";")
    .filter(Boolean)
    .map((edit) => edit.split(/:(.*)/s));
  return Object.fromEntries(pairs.map(([row, at = ""]) => [row, read(at, [])]));
};

/** The state as text: what differs from the start of the page. */
export const encode = (state, start) => {
  const { scene, mode, cloud, model } = state;
  const there = next(start, { scene, mode, cloud, model });
  const differs = (key) =>
    !same(state[key], start[key]) ||
    !same(state[key], there[key]) ||
    (key === "cloud" && cloud !== next(start, { scene }).cloud);
  return `#v=${VERSION}${KEYS.filter(differs)
    .map((key) => `&${key}=${write(state[key])}`)
    .join("")}`;
};

/** The state that a link asks for, and sentences on what it cannot use or what the page lacks; it never throws. */
export const decode = (hash, start, { clouds = null, models = null } = {}) => {
  const text = hash.replace(/^#/, "");
  if (text.length > LONGEST) return { state: start, problems: [`A link of ${text.length} characters was left aside.`] };
  const problems = [];
  const patch = {};
  const quoted = (word) => `"${word.length > 30 ? `${word.slice(0, 30)}…` : word}"`;
  for (const part of text.split("&").filter(Boolean)) {
    const [name] = part.split("=", 1);
    let value = part.slice(name.length + 1);
    try {
      value = decodeURIComponent(value);
    } catch {
      /* A stray percent sign: the text counts as it stands. */
    }
    if (name === "v" && value === String(VERSION)) continue;
    if (name === "v") {
      problems.push(`The link is of version ${quoted(value)}, this page of ${VERSION}: what both know is used.`);
    } else if (!Object.hasOwn(FIELDS, name)) {
      problems.push(`The link sets ${quoted(name)}, which this page does not have.`);
    } else {
      const { says, clean } = FIELDS[name];
      const wanted = read(value, DEFAULTS[name]);
      const used = clean(wanted, start[name]);
      const shown = quoted(write(used ?? start[name]));
      if (used !== undefined) patch[name] = used;
      if (used === undefined || Math.abs(wanted - used) > 1e-3) {
        problems.push(`${name} should be ${says}, not ${quoted(value)}: it is ${shown} here.`);
      }
    }
  }
  const rest = problems.length - MOST_PROBLEMS;
  if (rest > 0) problems.splice(MOST_PROBLEMS, rest, `${rest} more such mistakes are in the link.`);
  if (patch.cloud && clouds && !Object.hasOwn(clouds, patch.cloud)) {
    problems.push(`The points ${quoted(patch.cloud)} of the link are not in this page.`);
    delete patch.cloud;
  }
  const { model, site } = { ...start, ...patch };
  if (("model" in patch || "site" in patch) && models && !models[model]?.sites[site]) {
    problems.push(`The activations of the link (model ${model}, site ${site}) are not in this page.`);
    Object.assign(patch, { model: start.model, site: start.site });
  }
  const state = next(start, patch);
  if (patch.mode && state.mode !== patch.mode) problems.push(`The scene ${state.scene} has no mode ${patch.mode}.`);
  return { state, problems };
};

/** Takes over a link that is pasted into the address bar, and returns what writes the state there. */
export const mountHash = (store, start, say, page) => {
  let known = location.hash;
  addEventListener("hashchange", () => {
    // A jump within the page is no link to a state.
    if (location.hash === known || document.getElementById(location.hash.slice(1))) return;
    known = location.hash;
    const { state, problems } = decode(known, start, page);
    store.set(state);
    say(problems.join(" "));
  });
  return () => {
    const text = encode(store.get(), start);
    if (text === (known || `#v=${VERSION}`)) return;
    known = text;
    const address = location.href.split("#")[0] + known;
    // A frame without an origin may not touch its history; where the address cannot change either, nothing is lost.
    for (const put of [() => history.replaceState(null, "", known), () => location.replace(address)]) {
      try {
        return put();
      } catch {
        /* The next way. */
      }
    }
  };
};
