/** The scene in at most 60 words, for whoever does not see it: what is shown, where it lies, what epsilon does. */
import { ARMS, NORMS, grouped, number } from "explorer/formulas.js";
import { dot, norm as length, unit } from "explorer/linear.js";

const vector = (values) => `(${values.map((value) => number(value)).join(", ")})`;
const short = (text, most = 30) => (text.length > most ? `${text.slice(0, most - 1)}…` : text).replace(/\s/g, " ");
const counted = (count, name) => `${grouped(count)} ${name}${count === 1 ? "" : "s"}`;

/** Where the points of a finished step lie. */
const place = ({ mode, eps, gain, bias }, n, step) => {
  const flat = step > 2 ? gain.indexOf(0) : -1;
  const [normal, name] = { layer: ["all-ones", "1"], plane: ["the chosen normal", "the normal"] }[mode] ?? [];
  const centre = step > 3 ? `, centre ${vector(bias)}` : "";
  if (step === 0) return "where they were given";
  if (step === 1) {
    return normal
      ? `in the ${n > 3 ? "hyper" : ""}plane orthogonal to ${normal}`
      : mode === "batch"
        ? "about the origin, their mean"
        : "where they were given: nothing is centred";
  }
  if (mode === "batch") {
    return step === 2
      ? "about the origin with deviations up to 1, on no sphere"
      : `about ${step > 3 ? vector(bias) : "the origin"}, stretched by ${vector(gain)}`;
  }
  if (flat >= 0) return `flattened along axis ${flat + 1}, where the gain is 0${centre}`;
  const round = step === 2 || gain.every((value) => value === 1);
  const shape = (round ? ["circle", "sphere", "3-sphere"] : ["ellipse", "ellipsoid", "3-ellipsoid"])[
    normal ? n - 3 : n - 2
  ];
  const radius = round ? ` of radius ${number(mode === "length" ? 1 : Math.sqrt(n))}` : "";
  const plane = normal ? `, orthogonal to ${round ? normal : `${name} / gain`}` : "";
  return `${eps === 0 ? "on" : "on or inside"} the ${shape}${radius}${plane}${centre}`;
};

const depthWords = ({ depth, spread, residual }, stack) => {
  const each = (of, at) =>
    Object.entries(stack)
      .map(([arm, found]) => `${ARMS[arm]} ${number(found[of][at])}`)
      .join(", ");
  return (
    `${counted(depth, "random layer")}, weights times ${number(spread)}, ${residual ? "with" : "without"} residual. ` +
    `Rms after the last: ${each("rms", depth)}. Gradient at the input: ${each("gradient", 0)}.`
  );
};

/** The selected row, and what epsilon leaves of it. */
const selectedWords = ({ selected, stage, scene }, { rows, norm, shown, labels }) => {
  const row = rows[selected];
  if (!row || row.undefined) return "";
  const name = scene === "model" ? `Token ${JSON.stringify(short(labels[selected]))}` : `Point ${selected + 1}`;
  const percent = stage < 2 || norm.mode === "batch" ? "100" : number(100 * row.shrink);
  const kept = percent === "100" ? "" : `: epsilon keeps ${percent} % of its radius`;
  return `${name} is at ${vector(shown[selected])}${kept}.`;
};

/** The gradient, and that it is tangent. */
const gradientWords = ({ selected }, { norm, stages }, input) => {
  if (!input.every(Number.isFinite)) return `The gradient at point ${selected + 1} is 0/0.`;
  const u = unit(norm.mode === "plane" ? norm.normal : input.map(() => 1));
  const plane = norm.mode === "layer" || norm.mode === "plane" ? `${number(dot(input, u))} along the normal, ` : "";
  return (
    `The gradient at point ${selected + 1} has length ${number(length(input))}: ` +
    `${plane}${number(dot(input, unit(stages[1][selected])))} along the row.`
  );
};

/** (state, computed) -> the scene in short sentences. */
export const summary = (state, computed) => {
  const { n, norm, shown, stack, arms, site, gradient, undefinedRows, before, after } = computed;
  if (stack) return depthWords(state, stack);
  if (after) {
    const [one, other] = [before, after].map(({ weights, selectable }) =>
      weights.some(Number.isNaN)
        ? "every weight is 0/0"
        : `key ${weights.indexOf(Math.max(...weights)) + 1} gets most, ${number(100 * Math.max(...weights), 3)} %, ` +
          `and ${selectable.filter(Boolean).length} can be selected`,
    );
    return `${counted(shown.length, "key")} and a query ${vector(computed.query)}. As they are, ${one}; after ${NORMS[norm.mode]}, ${other}.`;
  }
  if (!shown.length && state.scene === "model") {
    return (
      "This page holds no activations. " +
      "One that does is written by: normkit explore, alone or with the folder of a model."
    );
  }
  if (!shown.length) return "There are no points.";
  const step = Math.ceil(state.stage);
  const lies = (of) => {
    const stands = step === state.stage || (step === 1 && (of.mode === "rms" || of.mode === "length"));
    return `they ${stands ? "lie" : "move to lie"} ${place(of, n, step)}.`;
  };
  const what = site ? "row" : "point";
  const words = [`${counted(shown.length, what)} in ${n} dimensions${arms ? "" : `, ${NORMS[norm.mode]}`}.`];
  if (arms) words.push(...Object.values(arms).map((arm) => `${NORMS[arm.norm.mode]}: ${lies(arm.norm)}`));
  else if (site) {
    const share = number(100 * (computed.explained[0] + computed.explained[1]));
    words.push(`Site ${short(site.path, 60)}; drawn are all-ones and two directions with ${share} % of the squared length.`);
    if (step > 1) words.push(`The sphere has radius ${number(norm.mode === "length" ? 1 : Math.sqrt(n))}.`);
  } else words.push(lies(norm).replace("they", "They"));
  words.push(gradient ? gradientWords(state, computed, gradient.input) : arms ? "" : selectedWords(state, computed));
  const lost = state.stage > 1 ? undefinedRows.length : 0;
  if (lost)
    words.push(
      lost > 1 ? `${counted(lost, what)} are 0/0.` : `${site ? "Row" : "Point"} ${undefinedRows[0] + 1} is 0/0.`,
    );
  return words.filter(Boolean).join(" ");
};
