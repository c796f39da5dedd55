/** The formula of the step that is shown, as MathML, and what holds after it, measured on the points shown. */
import { element } from "explorer/elements.js";
import { dot, mean, norm as length, unit } from "explorer/linear.js";

export const NORMS = {
  layer: "LayerNorm",
  rms: "RMSNorm",
  batch: "BatchNorm",
  length: "Scale only",
  plane: "Any hyperplane",
};
export const ARMS = { none: "no norm", post: "Post-LN", pre: "Pre-LN", rms: "Pre-RMSNorm", batch: "BatchNorm" };

/** A number for reading: four digits (half as many if it is tiny or huge); NaN is 0/0 here. */
export const number = (value, digits = 4) => {
  if (Number.isNaN(value)) return "0/0";
  const far = value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5);
  const text = far ? Number(value.toPrecision(digits / 2)).toExponential() : String(Number(value.toPrecision(digits)));
  return text.replace("Infinity", "∞").replace(/^-/, "−");
};

/** 12345 as "12,345". Intl would take 90 ms to make its first formatter. */
export const grouped = (count) => String(count).replace(/\B(?=(\d{3})+$)/g, ",");

const math = (tag, ...children) =>
  element(`math:${tag}`, {}, ...children.flatMap((child) => (typeof child === "string" ? tokens(child) : child)));

/** "z_j^2 = 1" as elements: letters are names, digits numbers, the rest operators. */
const tokens = (text) =>
  text
    .split(" ")
    .filter(Boolean)
    .map((word) => {
      const parts = word.split(/(?!^)[_^]/).map((textContent) => {
        const kind = /^−?[\d.𝟏]/u.test(textContent) ? "mn" : /^\p{L}/u.test(textContent) ? "mi" : "mo";
        const part = element(`math:${kind}`, { textContent });
        if (kind === "mo") part.setAttribute("stretchy", "false");
        return part;
      });
      return parts.length === 1
        ? parts[0]
        : math(parts.length === 3 ? "msubsup" : word.includes("_") ? "msub" : "msup", ...parts);
    });

const row = (...children) => math("mrow", ...children);
const fraction = (above, below) => math("mfrac", row(above), row(below));
const said = (textContent) => element("math:mtext", { textContent });
const table = (...lines) => math("mtable", ...lines.map((line) => math("mtr", math("mtd", line))));
/** 1e-5 as 10 to the −5. */
const power = (value) => number(value).replace(/e\+?/, " · 10^").replace("^-", "^−").replace(/^1 · /, "");

/** What a row (batch: column) is divided by. */
const divisor = ({ eps, place }, share, mode) => {
  const squares = row(...(mode === "length" ? [] : [share]), mode === "batch" ? "∑_k c_kj^2" : "∑_j c_j^2");
  const more = `+ ${power(eps)}`;
  return place === "inside" ? math("msqrt", squares, more) : row(math("msqrt", squares), more);
};

/** One step of one mode, with the numbers of the state; those of a model are too many. */
const stepFormula = (state, mode, step) => {
  const n = { four: 4, model: 0 }[state.scene] ?? 3;
  const given = (name, values) => (n ? ` , ${name} = ( ${values.map((value) => number(value)).join(" , ")} )` : "");
  const batch = mode === "batch";
  const share = fraction("1", batch ? "N" : n ? String(n) : "n");
  const [x, c, z, y, times] = batch ? ["x_ij", "c_ij", "z_ij", "y_ij", "g_j z_ij"] : ["x", "c", "z", "y", "g ⊙ z"];
  if (step === 0) return row(batch ? "x_ij , i = 1 , … , N" : `x = ( x_1 , … , x_${n || "n"} )`);
  if (step === 1) {
    if (mode === "plane") return row(`c = x − ( u · x ) u${given("u", unit(state.normal.slice(0, n)))}`);
    if (mode === "rms" || mode === "length") return row("c = x ,", said("nothing is centred"));
    return row(`${c} = ${x} −`, share, batch ? "∑_k x_kj" : "∑_j x_j 𝟏");
  }
  if (step === 2) return row(`${z} =`, fraction(c, divisor(state, share, mode)));
  const [gain, bias] = [given("g", state.gain.slice(0, n)), given("b", state.bias.slice(0, n))];
  return row(`${y} = ${times}`, step === 3 ? gain : `${batch ? "+ b_j" : "+ b"}${gain}${bias}`);
};

/** A gradient on its way back; s is what c was divided by, r the same without epsilon. Two lines, for narrow windows. */
const gradientFormula = ({ mode, place, eps }) => [
  row(
    "d x =",
    fraction("1", "s"),
    "( I",
    ...(mode === "layer" ? ["−", fraction("𝟏 𝟏^T", "3")] : mode === "plane" ? ["− u u^T"] : []),
    "−",
    ...(place === "outside" && eps > 0 ? [fraction("s", "r")] : []),
    mode === "length" ? "z z^T" : fraction("z z^T", "3"),
    ") ( g ⊙ d y ) ,",
  ),
  row(
    "s =",
    divisor({ place, eps }, fraction("1", "3"), mode),
    ...(place === "outside" && eps > 0 ? [`= r + ${power(eps)}`] : []),
  ),
];

/** One layer of each stack. */
const depthFormula = ({ residual, spread }) => {
  const h = residual ? "h + " : "";
  const layers = {
    none: `${h}f ( h )`,
    post: `LN ( ${h}f ( h ) )`,
    pre: `${h}f ( LN ( h ) )`,
    rms: `${h}f ( RMS ( h ) )`,
    batch: `${h}BN ( f ( h ) )`,
  };
  return table(
    ...Object.entries(layers).map(([arm, text]) => row(said(`${ARMS[arm]}: `), `h ← ${text}`)),
    row("f ( h ) = max ( 0 , W h ) , W_ij ∼ 𝒩 ( 0 ,", fraction(`2 · ${power(spread)}^2`, "64"), ")"),
  );
};

/** What attention makes of keys; k is the last step of their norm. */
const attentionFormula = (state) =>
  table(
    row("a_i =", fraction("exp ( s_i )", "∑_j exp ( s_j )"), ",", "s_i =", fraction("q · k_i", math("msqrt", "3"))),
    stepFormula({ ...state, stage: state.stage / 2 }, state.mode, Math.ceil(state.stage / 2)),
  );

/** state -> a math element: the formula of the step that is shown; between two, of the one under way. */
export const formula = (state) => {
  const { scene, mode } = state;
  const of = (name) => stepFormula(state, name, Math.ceil(state.stage));
  const whole = math(
    "math",
    scene === "depth"
      ? depthFormula(state)
      : scene === "attention"
        ? attentionFormula(state)
        : scene === "clusters"
        ? table(...["batch", "layer", "rms"].map((name) => row(said(`${NORMS[name]}: `), of(name))))
        : scene === "gradient"
          ? table(of(mode), ...gradientFormula(state))
          : of(mode),
  );
  whole.setAttribute("display", "block");
  return whole;
};

/** What is centred, and when it is 0/0. */
const CENTRED = {
  layer: ["mean of every row", "entries all equal"],
  plane: ["part along u", "it lies along u"],
  batch: ["mean of every column", "values all equal"],
  rms: ["", "entries all 0"],
  length: ["", "entries all 0"],
};

const span = (values) => `${number(Math.min(...values))} to ${number(Math.max(...values))}`;
const largest = (values) => ` (largest error ${number(Math.max(...values.map(Math.abs)))})`;

/** What holds of means (or what else is centred) and sizes; those that are NaN are named. */
const words = ({ mode, eps }, stage, n, means, sizes, error = largest) => {
  const of = stage <= 2 ? "" : stage <= 3 ? " of y / g" : " of (y − b) / g";
  const [what, why] = CENTRED[mode];
  const [along, finite] = [means, sizes].map((values) => values.filter(Number.isFinite));
  const lost = sizes.flatMap((size, index) => (Number.isFinite(size) ? [] : [index + 1]));
  const size = mode === "batch" ? "deviation" : "length";
  const radius = mode === "batch" || mode === "length" ? 1 : Math.sqrt(n);
  const name = radius === 1 ? "1" : `√${n} = ${number(radius)}`;
  return [
    along.length &&
      (what === ""
        ? `Nothing is centred: means${of} ${span(along)}.`
        : stage < 1
          ? `The ${what}: ${span(along)}.`
          : `The ${what}${of} is 0${error(along)}.`),
    finite.length &&
      (stage < 2
        ? `Every ${size}: ${span(finite)}.`
        : `Every ${size}${of && " there"} is ${name}${
            eps === 0
              ? `${error(finite.map((value) => value - radius))}`
              : `, of which epsilon takes up to ${number(Math.max(0, radius - Math.min(...finite)))}`
          }.`),
    lost.length &&
      `0/0 at ${mode === "batch" ? "column" : "row"}${lost.length > 1 ? "s" : ""} ${lost.slice(0, 3).join(", ")}${lost.length > 3 ? ", …" : ""}: ${why}.`,
  ]
    .filter(Boolean)
    .join(" ");
};

/** What holds of points, gain and bias taken off again. */
const pointWords = (shown, norm, stage) => {
  if (!shown.length) return "There are no points.";
  // Between two stages the points are those of a gain, then of a bias, on its way.
  const gain = norm.gain.map((value) => 1 + (value - 1) * Math.min(1, Math.max(0, stage - 2)));
  const bias = norm.bias.map((value) => value * Math.max(0, stage - 3));
  const flat = gain.indexOf(0);
  if (flat >= 0) return `Gain 0 flattens axis ${flat + 1}: only its bias, ${number(bias[flat])}, is left there.`;
  const points = shown.map((point) => point.map((value, axis) => (value - bias[axis]) / gain[axis]));
  if (norm.mode === "batch") {
    const columns = gain.map((_, axis) => points.map((point) => point[axis]));
    const means = columns.map(mean);
    const deviations = columns.map(
      (column, axis) => length(column.map((value) => value - means[axis])) / Math.sqrt(points.length),
    );
    return words(norm, stage, gain.length, means, deviations);
  }
  const u = unit(norm.normal);
  return words(
    norm,
    stage,
    gain.length,
    points.map(norm.mode === "plane" ? (point) => dot(point, u) : mean),
    points.map(length),
  );
};

/** What holds of rows of which three coordinates are drawn. */
const projectedWords = ({ n, norm, rows, shown, stages, giant, labels }, stage) => {
  const means = (stage < 2 ? shown : stages[2]).map(([along]) => along / Math.sqrt(n));
  const sizes = stage < 2 ? [] : rows.map(({ shrink }) => shrink * (norm.mode === "length" ? 1 : Math.sqrt(n)));
  // The mean is taken off by leaving out a coordinate, and the length follows from the others: there is no error to measure.
  const told = words(norm, stage, n, means, sizes, () => "");
  const long =
    giant &&
    ` Token “${labels[giant.index].trim()}” has rms ${number(rows[giant.index].rms)}, ${number(giant.times, 3)} times the median row's; ` +
      `feature ${giant.feature} alone is ${number(100 * giant.share, 3)} % of its squared length` +
      `${giant.share > 0.5 ? ", a massive activation (Sun et al. 2024)" : ""}. The norm brings it to the length of all others.`;
  return `${told}${long ?? ""} Drawn are 3 of ${n} coordinates${stage > 2 ? ", the shadow of an ellipsoid" : ""}.`;
};

/** What a query makes of keys, measured. */
const attended = ({ entropy, scores, selectable, shares, change }, when) => {
  const lost = scores.findIndex(Number.isNaN);
  if (lost >= 0) return `${when}: key ${lost + 1} is 0/0, and with it every weight.`;
  return (
    `${when}: scores ${span(scores)}, entropy ${number(entropy, 3)} of ${number(Math.log(scores.length), 3)}; some query selects ` +
    `${selectable.filter(Boolean).length} of the ${scores.length} keys. Keys of twice the size change a weight by ` +
    `${number(Math.round(1e6 * change) / 1e6, 2)}. The first group gets ${number(100 * shares[0], 3)} %` +
    (entropy > Math.log(scores.length) - 1e-9 ? ": all keys count alike, so the majority shows (Brody et al. 2023)." : ".")
  );
};

/** (state, computed) -> what holds at the stage shown, with the numbers measured here; a line a norm. */
export const invariant = ({ stage, layer, depth, residual }, computed) => {
  const { stack, arms, before, after } = computed;
  if (after) return attended(before, "As they are") + "\n" + attended(after, "After the norm");
  if (stack) {
    const at = layer < 0 ? depth : layer;
    const each = (of) => Object.entries(stack).map(([arm, found]) => `${ARMS[arm]} ${number(of(found))}`).join(", ");
    const sizes = `Rms at layer ${at}: ${each(({ rms }) => rms[at])}.`;
    if (residual) return sizes;
    return (
      `${sizes}\nA layer back, the gradient grows by: ${each(({ gradient }) => (gradient[0] / gradient[depth]) ** (1 / depth))}. ` +
      `The norms multiply it by: ${each(({ stretch }) => stretch)}. LayerNorm and BatchNorm take off the mean that ReLU leaves and stretch ` +
      "the rest back to its size, the gradient with it: by 1 / √(1 − 1/π) = 1.211 for wide layers. RMSNorm takes nothing off. A residual goes around the norms."
    );
  }
  if (arms)
    return Object.values(arms)
      .map(({ norm, shown }) => `${NORMS[norm.mode]}: ${pointWords(shown, norm, stage)}`)
      .join("\n");
  return computed.site ? projectedWords(computed, stage) : pointWords(computed.shown, computed.norm, stage);
};
