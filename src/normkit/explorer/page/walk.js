/** A walk of seven steps, each one picture that asks before it shows; touching another control ends it. */
import { lens } from "explorer/camera.js";
import { byId, element, put } from "explorer/elements.js";
import { number } from "explorer/formulas.js";
import { guessed } from "explorer/frames.js";
import { add, dot, minus, norm as length, scale } from "explorer/linear.js";
import { WALK, asks, shows, stepOf } from "explorer/steps.js";

/** What is measured of the reader's answer. */
function measured(state, computed, chosen) {
  const { choices, motion } = stepOf(state);
  const open = asks(state);
  if (choices) {
    if (open || chosen < 0) return "";
    return chosen === 0 ? `Yes: ${choices[0]}.` : `Not ${choices[chosen]}: ${choices[0]}.`;
  }
  if (motion) {
    const { groups, shown } = computed;
    const apart = shown.flatMap((row, i) =>
      shown.slice(0, i).map((other, j) => (groups[i] === groups[j] ? length(minus(row, other)) : 0)),
    );
    return `Copies of one point lie up to ${number(Math.round(1000 * Math.max(0, ...apart)) / 1000, 2)} apart.`;
  }
  const found = guessed(state, computed);
  if (open || !found) return "";
  // What lies along the line of sight cannot be seen, so it does not count.
  const { toward } = lens(state, { x: 0, y: 0, width: 1, height: 1 }, 1);
  const [miss, way] = [minus(found.cross, found.lands), minus(found.lands, found.start)].map((step) =>
    length(add(step, scale(toward, -dot(toward, step)))),
  );
  return `As you see it, your cross is ${number(miss, 2)} away from where it lands; the way there is ${number(way, 2)}.`;
}

/** Fills #walk; gives the update of it. */
export const mountWalk = (store, play) => {
  /** Which answer was chosen, where there are some to choose from. */
  let chosen = -1;
  const go = (walk) => {
    chosen = -1;
    store.set({ ...WALK[walk - 1].state, walk });
  };
  const button = (textContent, onclick) => element("button", { type: "button", textContent, onclick });
  const titles = WALK.map(({ title }, index) => button(title, () => go(index + 1)));
  const back = button("Previous", () => go(store.get().walk - 1));
  const on = button("Start", () => (stepOf(store.get()) && asks(store.get()) ? play() : go(store.get().walk + 1)));
  const text = element("div", { className: "step", ariaLive: "polite" });
  const note = element("p", { className: "measured" });
  const choices = element("div", { className: "choices", role: "group", ariaLabel: "Answers" });
  byId("walk").replaceChildren(
    element("h2", { textContent: "Seven ideas in three minutes" }),
    element("ol", {}, ...titles.map((title) => element("li", {}, title))),
    text,
    choices,
    note,
    element("div", { className: "turns" }, back, on),
  );

  // A link may name a step alone.
  if (stepOf(store.get()) && !shows(store.get())) go(store.get().walk);
  let written = "";
  return (state, computed) => {
    if (state.walk && !shows(state)) store.set({ walk: 0 });
    const now = store.get();
    const step = stepOf(now);
    const open = step && asks(now);
    put(note, { textContent: step ? measured(now, computed, chosen) : "" });
    if (written === `${now.walk} ${open}`) return;
    written = `${now.walk} ${open}`;
    titles.forEach((title, index) => put(title, { ariaCurrent: index === now.walk - 1 ? "step" : null }));
    choices.replaceChildren(
      ...(open ? (step.choices ?? []) : []).map((choice, index) =>
        button(choice, () => {
          chosen = index;
          play();
        }),
      ),
    );
    // A button that is disabled lets go of the keyboard, so the other one takes it.
    const turns = document.activeElement === on || document.activeElement === back;
    put(back, { disabled: now.walk < 2 });
    put(on, { disabled: now.walk === WALK.length && !open, textContent: open ? "Show" : step ? "Next" : "Start" });
    if (turns && (on.disabled || back.disabled)) (on.disabled ? back : on).focus();
    text.replaceChildren(
      ...(step
        ? [
            element("p", { className: "count", textContent: `Step ${now.walk} of ${WALK.length}` }),
            element("h3", { textContent: step.title }),
            element("p", { textContent: open ? step.question : step.answer }),
          ]
        : []),
    );
  };
};
