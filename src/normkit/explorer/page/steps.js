// The walk as data: each step asks, then shows its motion and says what it showed.
import { dot, unit } from "explorer/linear.js";

/** What a step shows if it does not say otherwise. */
const PLAIN = {
  scene: "three",
  cloud: "scatter",
  mode: "layer",
  stage: 0,
  eps: 0,
  place: "inside",
  gain: [1, 1, 1, 1],
  bias: [0, 0, 0, 0],
  edits: {},
  selected: -1,
  guess: [0, 0, 0.5, 0],
  yaw: -0.3,
  pitch: 0.3,
  zoom: 1,
};

/**
 * A step: its state at first; `to`, the stage at which its motion ends; and one way to answer. In most steps the reader
 * drags a cross to where the selected point will land. A step with `asks(state)` says itself whether its question is open,
 * and moves by `motion(state)`: share 0..1 -> patch. `choices` are answers to choose from, the first one right.
 */
const step = (title, question, answer, state, { to = state.stage ?? 0, ...more }) => ({
  title,
  question,
  answer,
  state: { ...PLAIN, ...state },
  to,
  ...more,
});

/** How steeply a normal leans from all-ones: |cos|. */
const upright = ({ normal }) => Math.abs(dot(unit(normal.slice(0, 3)), unit([1, 1, 1])));

export const WALK = [
  step(
    "Why a plane",
    "LayerNorm first subtracts the mean: the same number from every entry. Where will the ringed point land? " +
      "Drag the cross there.",
    "It drops along all-ones until its entries add up to 0. All such points form one plane: only the height " +
      "above it is lost.",
    { selected: 16 },
    { to: 1 },
  ),
  step(
    "Why this plane and no other",
    "Each colour is one point and four copies of it, with a number added to all entries. Drag the ring at the " +
      "normal until each colour lands on one spot.",
    "Only the plane orthogonal to all-ones takes such shifts away. It alone treats all features alike.",
    { cloud: "shifted", mode: "plane", stage: 1, normal: [-0.2, 0.35, 0.9, 1], yaw: 0.4, pitch: 0.5 },
    {
      asks: (state) => upright(state) < 0.9999,
      motion:
        ({ normal }) =>
        (share) => ({ normal: unit(normal.slice(0, 3)).map((value) => value + share * (1 / Math.sqrt(3) - value)) }),
    },
  ),
  step(
    "Why a sphere",
    "Four features now, seen from inside their hyperplane. Each point is divided by its own deviation: where " +
      "will the ringed one land?",
    "Every length becomes √n, here 2: a true sphere. With three features the same step leaves a circle.",
    { scene: "four", cloud: "four", stage: 1, selected: 5 },
    { to: 2 },
  ),
  step(
    "What epsilon does to small vectors",
    "With ε = 0.01, a row of deviation r is divided by √(r² + ε). The ringed row is short: where will it land, " +
      "on the circle or inside?",
    "It keeps r / √(r² + ε) of the radius: half is lost at r = 0.058, and long rows hardly notice. Equal entries " +
      "land on 0 instead of 0/0.",
    { cloud: "small", eps: 0.01, stage: 1, selected: 0 },
    { to: 2 },
  ),
  step(
    "What gain and bias do",
    "The gain multiplies the entries by 0.6, 1.3 and 1; the bias adds −0.3, 0.6 and 0.4. Where does that take " +
      "the ringed point?",
    "The gain tilts the plane to the normal 1 / g and makes the circle an ellipse. The bias moves its centre " +
      "from the origin to b.",
    { stage: 2, gain: [0.6, 1.3, 1, 1], bias: [-0.3, 0.6, 0.4, 0], selected: 24 },
    { to: 4 },
  ),
  step(
    "Why RMSNorm drops the plane",
    "RMSNorm subtracts nothing and divides by the root of the mean square. Where will the ringed point land?",
    "It does not drop: it keeps its direction, mean included, and may land anywhere on the sphere. RMSNorm loses " +
      "one dimension, LayerNorm two.",
    { mode: "rms", selected: 16 },
    { to: 2 },
  ),
  step(
    "Why BatchNorm is another thing",
    "One point is about to move far away (or drag it yourself). Under which norm do all other points move, too?",
    "BatchNorm takes mean and deviation over all points: one shift and one stretch for the cloud, onto no " +
      "sphere. LayerNorm and RMSNorm look at each point alone.",
    { scene: "clusters", cloud: "clusters", stage: 2, selected: 47 },
    {
      choices: ["BatchNorm", "LayerNorm", "RMSNorm"],
      asks: ({ edits }) => !Object.keys(edits).length,
      motion:
        ({ selected }, { raw }) =>
        (share) => ({ edits: { [selected]: raw[selected].map((value, i) => value + share * [5, -3, 2][i]) } }),
    },
  ),
];

/** The step that a state is at, if any. */
export const stepOf = ({ walk }) => WALK[walk - 1];

/** Whether the question of a step is still open. */
export const asks = (state) => {
  const { asks: own, state: first } = stepOf(state);
  return own ? own(state) : state.stage <= first.stage;
};

/** What may change on a walk: the view, the stage, the point looked at, and what its questions move. */
const FREE = ["yaw", "pitch", "zoom", "stage", "selected", "guess", "normal", "edits"];

/** Whether a state still shows its step. */
export const shows = (state) =>
  Object.entries(stepOf(state).state).every(
    ([key, value]) => FREE.includes(key) || JSON.stringify(state[key]) === JSON.stringify(value),
  );
