/** The timeline: raw -> centre -> scale -> gain -> bias, to play, step and scrub, with the formula of each stage. */
import { byId, element, put, refill } from "explorer/elements.js";
import { formula, invariant } from "explorer/formulas.js";
import { same } from "explorer/state.js";
import { asks, stepOf } from "explorer/steps.js";

const [TRAVEL, PAUSE] = [1200, 800]; // milliseconds from one stage to the next, and at each
const SPEEDS = [1, 2, 0.25, 0.5];
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
  if (scene === "attention")
    return [
      [0, "raw"],
      [2, mode === "layer" ? "centre" : "as it is"],
      [4, "scale"],
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

/** Fills the timeline and listens to it; gives the update of it, and `play`, which shows the motion of a step. */
export function mountTimeline(store) {
  const [play, range, list, pace] = ["play", "stage", "stages", "pace"].map(byId);
  /** What the motion under way has set last; null while the timeline stands. @type {object | null} */
  let left = null;
  let [request, target, end, playing, speed] = [0, 0, 4, false, 1];
  const written = {};

  /** Fills an element anew if what it is made from changed. */
  function write(id, from, make) {
    const key = JSON.stringify(from);
    if (written[id] !== key) refill(byId(id), make());
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

  /** Moves the state along motion(share), share from 0 to 1, until someone else moves it. */
  function move(motion, duration, pause, follow) {
    let [share, before] = [-pause / duration, 0];
    const now = (patch) => Object.fromEntries(Object.keys(patch).map((key) => [key, store.get()[key]]));
    left = now(motion(0));
    const tick = (time) => {
      if (Object.entries(left ?? {}).some(([key, value]) => !same(store.get()[key], value))) return run(false);
      share = Math.min(1, share + (before && (speed * (time - before)) / duration));
      if (still.matches && share >= 0) share = 1;
      before = time;
      if (share >= 0) {
        const patch = motion(ease(share));
        store.set(patch);
        left = now(patch);
      }
      if (share < 1) request = requestAnimationFrame(tick);
      else follow();
    };
    request = requestAnimationFrame(tick);
  }

  /** Goes to a stop; while playing, on from there. */
  function travel(to, pause = 0) {
    const from = store.get().stage;
    target = to;
    const duration = TRAVEL * Math.min(Math.abs(to - from), 2) || 1;
    move(
      (share) => ({ stage: from + (to - from) * share }),
      duration,
      pause,
      () => (playing && to < end ? travel(beside(to, 1), PAUSE) : run(false)),
    );
  }

  function jump(to) {
    run(false);
    travel(to);
  }

  /** Shows the motion of the walk's step, or all stages that are left. */
  function start() {
    const state = store.get();
    const step = stepOf(state);
    run(true);
    if (step?.motion && asks(state)) return move(step.motion(state, computed), 2 * TRAVEL, 0, () => run(false));
    if (state.stage === 4) store.set({ stage: step?.state.stage ?? 0 });
    const { stage } = store.get();
    end = step && stage < step.to ? step.to : 4;
    travel(beside(stage, 1));
  }

  play.onclick = () => (playing ? run(false) : start());
  byId("back").onclick = () => jump(beside(left === null ? store.get().stage : target, -1));
  byId("step").onclick = () => jump(beside(left === null ? store.get().stage : target, 1));
  range.oninput = () => {
    run(false);
    store.set({ stage: range.valueAsNumber });
  };
  pace.onclick = () => {
    speed = SPEEDS[(SPEEDS.indexOf(speed) + 1) % SPEEDS.length];
    put(pace, { textContent: `${speed}×`, ariaLabel: `Speed ${speed}` });
  };

  let computed;
  function update(state, found) {
    computed = found;
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
  }
  return { update, play: start };
}
