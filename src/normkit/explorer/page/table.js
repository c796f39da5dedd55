/** The points as a table: what they are, measure and become. It is the keyboard's way of moving them. */
import { byId, element, put } from "explorer/elements.js";
import { ARMS, NORMS, grouped, number } from "explorer/formulas.js";

const MOST = 100;
const FACTS = ["mean", "rms", "deviation", "length", "angleToOnes"];
const PARTS = ["rms", "mean", "gradient"];

/** (state, computed, most) -> the numbers of the table: {what, columns, lines: {index, label, raw, values}[], total}, raw
 * to be edited; a line a point or a layer; of more than `most` the first ones and the selected. */
export const grid = ({ scene, selected }, { stack, arms, raw, rows, shown, labels, before, after }, most = Infinity) => {
  if (stack) {
    const pairs = Object.keys(stack).flatMap((arm) => PARTS.map((part) => [arm, part]));
    const lines = stack.none.rms.map((_, index) => ({
      index,
      label: String(index),
      raw: [],
      values: pairs.map(([arm, part]) => stack[arm][part][index]),
    }));
    return { what: "layer", columns: pairs.map(([arm, part]) => `${ARMS[arm]} ${part}`), lines, total: lines.length };
  }
  const own = scene !== "model";
  const axes = (raw[0] ?? []).map((_, axis) => axis + 1);
  const images = arms
    ? Object.values(arms).map((arm) => ({ name: NORMS[arm.norm.mode], shown: arm.shown }))
    : [{ name: "shown", shown }];
  const weights = after ? [before, after].map((found) => found.weights) : [];
  const indices = [...raw.keys()].slice(0, most);
  if (selected >= most) indices[most - 1] = selected;
  return {
    what: own ? "point" : "token",
    total: raw.length,
    columns: [
      ...(own ? axes.map((axis) => `x${axis}`) : []),
      "mean",
      "rms",
      "deviation",
      "length",
      "angle to all-ones, °",
      ...images.flatMap(({ name }) => axes.map((axis) => `${name} ${axis}`)),
      ...weights.map((_, i) => `weight ${i ? "after the norm" : "without a norm"}`),
    ],
    lines: indices.map((index) => ({
      index,
      label: labels[index].trim() || JSON.stringify(labels[index]),
      raw: own ? raw[index] : [],
      values: [...FACTS.map((name) => rows[index][name]), ...images.flatMap((image) => image.shown[index]), ...weights.map((of) => of[index])],
    })),
  };
};

/** Fills #table, where a changed number moves its point; gives the update of it. */
export const mountTable = (store, { say }) => {
  const [note, table, panel] = [element("p"), element("table"), byId("table").closest("details")];
  byId("table").replaceChildren(note, element("div", { className: "scroll" }, table));
  let [latest, now, shape, slots] = [null, null, "", []];

  const edit = ({ index, raw }, axis, input) => {
    const point = raw.map((value, i) => (i === axis ? input.valueAsNumber : value));
    store.set({ edits: { ...store.get().edits, [index]: point }, selected: index });
    const kept = store.get().edits[index]?.[axis] ?? raw[axis];
    input.value = String(kept);
    say(
      kept === point[axis]
        ? ""
        : `x${axis + 1} of point ${index + 1} takes a number from -1e9 to 1e9; it stays ${kept}.`,
    );
  };

  const build = () => {
    slots = now.lines.map(({ raw, values }, slot) => ({
      pick: element("button", {
        type: "button",
        onclick: () => store.set({ [now.what === "layer" ? "layer" : "selected"]: now.lines[slot].index }),
      }),
      inputs: raw.map((_, axis) =>
        element("input", {
          type: "number",
          step: "any",
          onchange: ({ target }) => edit(now.lines[slot], axis, target),
        }),
      ),
      cells: values.map(() => element("td")),
      written: [],
    }));
    table.replaceChildren(
      element(
        "tr",
        {},
        ...[now.what, ...now.columns].map((textContent) => element("th", { scope: "col", textContent })),
      ),
      ...slots.map(({ pick, inputs, cells }) =>
        element(
          "tr",
          {},
          element("th", { scope: "row" }, pick),
          ...inputs.map((input) => element("td", {}, input)),
          ...cells,
        ),
      ),
    );
  };

  const update = () => {
    // A closed table is filled when it is opened.
    if (!latest || panel?.open === false) return;
    const [state, computed] = latest;
    now = grid(state, computed, MOST);
    const before = shape;
    shape = `${now.what} ${now.lines.length} ${now.columns}`;
    if (shape !== before) build();
    put(note, { textContent: now.total > MOST ? `Showing ${MOST} of ${grouped(now.total)}.` : "" });
    now.lines.forEach(({ index, label, raw, values }, slot) => {
      const { pick, inputs, cells, written } = slots[slot];
      put(pick, {
        textContent: label,
        ariaPressed: String(index === (now.what === "layer" ? state.layer : state.selected)),
      });
      raw.forEach((value, axis) => {
        const isBeingTyped = inputs[axis] === document.activeElement;
        put(inputs[axis], {
          ariaLabel: `x${axis + 1} of point ${index + 1}`,
          ...(!isBeingTyped && { value: String(value) }),
        });
      });
      values.forEach((value, column) => {
        if (!Object.is(value, written[column])) cells[column].textContent = number(value, 6);
      });
      slots[slot].written = values;
    });
  };
  panel?.addEventListener("toggle", update);
  return (...given) => {
    latest = given;
    update();
  };
};
