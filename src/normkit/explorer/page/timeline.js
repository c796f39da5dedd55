/** The timeline: raw -> centre -> scale -> gain -> bias, to play, step and scrub, with the formula of each stage. */
import { byId, element, put } from "explorer/elements.js";
import { formula, invariant } from "explorer/formulas.js";

const [TRAVEL, PAUSE] = [1200, 800]; // milliseconds from one stage to the next, and at each
const PLAY = "M8 4.8v14.4L19.5 12z";
const HALT = "M7 5h3.4v14H7zM13.6 5H17v14h-3.4z";

const still = matchMedia("(prefers-reduced-motion: reduce)");
/** Slow, fast, slow. */
const ease = (t) => t * t * (3 - 2 * t);

/** Where the timeline stops: [stage, name] each. */
export function stops({ scene, mode }) {
  if (scene === "depth")
    return [
      [0, "input"],
      [2, "output"],
      [4, "back"],
    ];
  const first = { rms: "as it is", length: "as it is", plane: "project" }[mode];
  return [
    [0, "raw"],
    [1, (scene !== "clusters" && first) || "centre"],
    [2, "scale"],
    [3, "gain"],
    [4, "bias"],
  ];
}

/** The stage in words. */
export function stageText(state) {
  const names = stops(state);
  const next = names.findIndex(([place]) => place >= state.stage);
  const [[from, before], [to, name]] = [names[Math.max(next - 1, 0)], names[next]];
  return to === state.stage
    ? name
    : `${Math.round((100 * (state.stage - from)) / (to - from))} % from ${before} to ${name}`;
}

/** Fills the timeline and listens to it. */
export function mountTimeline(store) {
  const [play, range, list] = ["play", "stage", "stages"].map(byId);
  /** Where the move under way left the stage; null while the timeline stands. @type {number | null} */
  let left = null;
  let [request, target, playing] = [0, 0, false];
  const written = {};

  /** Fills an element anew if what it is made from changed. */
  function write(id, from, make) {
    const key = JSON.stringify(from);
    if (written[id] !== key) byId(id).replaceChildren(...make());
    written[id] = key;
  }

  /** The next stop on either side of a stage. */
  function beside(stage, way) {
    const places = stops(store.get()).map(([place]) => place);
    return (way > 0 ? places.find((place) => place > stage) : places.filter((place) => place < stage).at(-1)) ?? stage;
  }

  function run(on) {
    cancelAnimationFrame(request);
    left = null;
    playing = on;
    play.ariaLabel = on ? "Pause" : "Play";
    play.querySelector("path").setAttribute("d", on ? HALT : PLAY);
  }

  /** Goes to a stop; while playing, on from there. */
  function travel(to, pause = 0) {
    const from = store.get().stage;
    const duration = still.matches ? 1 : TRAVEL * Math.min(Math.abs(to - from), 2);
    let begun = 0;
    const tick = (now) => {
      if (store.get().stage !== left) return run(false); // Someone else has moved it.
      begun ||= now + pause;
      const t = Math.min((now - begun) / duration, 1);
      if (t >= 0) store.set({ stage: t < 1 && !still.matches ? from + (to - from) * ease(t) : to });
      left = store.get().stage;
      if (t < 1) request = requestAnimationFrame(tick);
      else if (playing && to < 4) travel(beside(to, 1), PAUSE);
      else run(false);
    };
    [left, target, request] = [from, to, requestAnimationFrame(tick)];
  }

  function jump(to) {
    run(false);
    travel(to);
  }

  play.onclick = () => {
    run(!playing);
    if (!playing) return;
    if (store.get().stage === 4) store.set({ stage: 0 });
    travel(beside(store.get().stage, 1));
  };
  byId("back").onclick = () => jump(beside(left === null ? store.get().stage : target, -1));
  byId("step").onclick = () => jump(beside(left === null ? store.get().stage : target, 1));
  range.oninput = () => {
    run(false);
    store.set({ stage: range.valueAsNumber });
  };

  return (state, computed) => {
    const { scene, mode, stage, eps, place, gain, bias, normal, spread, residual, layer } = state;
    const places = stops(state);
    write("stages", places, () =>
      places.map(([at, textContent]) =>
        element("button", { type: "button", textContent, style: `--at: ${at / 4}`, onclick: () => jump(at) }),
      ),
    );
    places.forEach(([at], index) => {
      put(list.children[index], { className: at <= stage ? "reached" : "", ariaCurrent: at === stage ? "step" : null });
    });
    put(range, { value: String(stage), ariaValueText: stageText(state) });
    range.style.setProperty("--at", String(stage / 4));
    // A button that is disabled lets go of the keyboard.
    if (document.activeElement === { 0: byId("back"), 4: byId("step") }[stage]) play.focus();
    put(byId("back"), { disabled: stage === 0 });
    put(byId("step"), { disabled: stage === 4 });
    write("formula", [Math.ceil(stage), scene, mode, eps, place, gain, bias, normal, spread, residual, layer], () => [
      formula(state),
    ]);
    const lines = invariant(state, computed).split("\n");
    write("invariant", lines, () => lines.map((textContent) => element("span", { textContent })));
  };
}
