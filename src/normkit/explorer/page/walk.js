/** A walk of six steps, each one picture and what it shows; touching a control ends it and leaves the picture. */
import { byId, element, put } from "explorer/elements.js";

/** What a step shows if it does not say otherwise. */
const PLAIN = {
  scene: "three",
  cloud: "scatter",
  mode: "layer",
  stage: 2,
  eps: 0,
  place: "inside",
  gain: [1, 1, 1, 1],
  bias: [0, 0, 0, 0],
  edits: {},
  selected: -1,
  yaw: -0.3,
  pitch: 0.3,
  zoom: 1,
};

const step = (title, sentence, state) => ({ title, sentence, state: { ...PLAIN, ...state } });

/** The steps: {title, sentence, state: the patch that shows it}. */
export const WALK = [
  step(
    "Why a plane",
    "Subtracting the mean moves a point parallel to the all-ones axis until its entries add up to 0. " +
      "All points of that sum form one plane, orthogonal to all-ones: only the height above it is lost.",
    { stage: 1 },
  ),
  step(
    "Why a sphere",
    "Dividing by the deviation makes the mean of the n squares 1, so every length is √n, here 2. " +
      "In the hyperplane of four dimensions that is a true sphere; in three dimensions the same step leaves a circle.",
    { scene: "four", cloud: "four" },
  ),
  step(
    "What epsilon does to small vectors",
    "A row of deviation r keeps r / √(r² + ε) of the radius: here ε is 0.01, and half is lost at r = 0.058. " +
      "Long rows hardly notice, rows of equal entries land on 0 instead of 0/0, and how deep a point lies still tells how long it was.",
    { cloud: "small", eps: 0.01, selected: 0 },
  ),
  step(
    "What gain and bias do",
    "The gain stretches along the features, which tilts the plane to the normal 1 / g and makes the circle an ellipse " +
      "whose axes are not the features'. The bias carries its centre from the origin to b.",
    { stage: 4, gain: [0.6, 1.3, 1, 1], bias: [-0.3, 0.6, 0.4, 0] },
  ),
  step(
    "Why RMSNorm drops the plane",
    "RMSNorm subtracts nothing: a point keeps its direction from the origin, its mean included, and may land anywhere on the " +
      "sphere: of n dimensions it loses one, LayerNorm two. Where the mean is 0 both agree.",
    { mode: "rms" },
  ),
  step(
    "Why BatchNorm is another thing",
    "BatchNorm takes mean and deviation down each column, over all points: one shift and one stretch for the whole cloud, onto " +
      "no sphere. Where a point lands depends on the others; in LayerNorm and RMSNorm on itself alone.",
    { scene: "clusters", cloud: "clusters" },
  ),
];

/** What may change on a walk: the view, the stage, the point looked at. */
const FREE = ["yaw", "pitch", "zoom", "stage", "selected"];

/** Whether a state still shows a step. */
const shows = (state, walk) =>
  Object.entries(WALK[walk - 1].state).every(
    ([key, value]) => FREE.includes(key) || JSON.stringify(state[key]) === JSON.stringify(value),
  );

/** Fills #walk; gives the update of it. */
export const mountWalk = (store) => {
  const go = (walk) => store.set({ ...WALK[walk - 1].state, walk });
  const button = (textContent, target) =>
    element("button", { type: "button", textContent, onclick: () => go(target()) });
  const titles = WALK.map(({ title }, index) => button(title, () => index + 1));
  const [back, on] = [button("Previous", () => store.get().walk - 1), button("Start", () => store.get().walk + 1)];
  const text = element("div", { className: "step", ariaLive: "polite" });
  byId("walk").replaceChildren(
    element("h2", { textContent: "A walk in six steps" }),
    element("ol", {}, ...titles.map((title) => element("li", {}, title))),
    text,
    element("div", { className: "turns" }, back, on),
  );

  // A link may name a step alone.
  const { walk } = store.get();
  if (walk && !shows(store.get(), walk)) go(walk);
  let written = -1;
  return (state) => {
    if (state.walk && !shows(state, state.walk)) store.set({ walk: 0 });
    if (store.get().walk === written) return;
    written = store.get().walk;
    titles.forEach((title, index) => put(title, { ariaCurrent: index === written - 1 ? "step" : null }));
    // A button that is disabled lets go of the keyboard, so the other one takes it.
    const turns = document.activeElement === on || document.activeElement === back;
    put(back, { disabled: written < 2 });
    put(on, { disabled: written === WALK.length, textContent: written ? "Next" : "Start" });
    if (turns && (on.disabled || back.disabled)) (on.disabled ? back : on).focus();
    const { title, sentence } = WALK[written - 1] ?? {};
    text.replaceChildren(
      ...(title
        ? [
            element("p", { className: "count", textContent: `Step ${written} of ${WALK.length}` }),
            element("h3", { textContent: title }),
            element("p", { textContent: sentence }),
          ]
        : []),
    );
  };
};
