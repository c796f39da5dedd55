// Fingers, mouse, wheel and keys on the drawing: turn, zoom, choose a point, move a point or a handle.
import { lens, orbit, unseen } from "explorer/camera.js";
import { byId, element, put } from "explorer/elements.js";
import { number } from "explorer/formulas.js";
import { add, dot, minus, norm, scale } from "explorer/linear.js";
import { layout, pick, screen } from "explorer/projection.js";
import { startFrom } from "explorer/state.js";

const CLICK = 4; // pixels within which a press is a click and no drag
const [STEP, LARGE_STEP] = [8, 40]; // pixels of an arrow key, and with Shift
const [ZOOM_PER_PIXEL, ZOOM_PER_KEY] = [1.0015, 1.15];
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const ZOOMS = { "+": 1, "=": 1, "-": -1, _: -1 };
const NEIGHBOURS = { PageUp: -1, "[": -1, PageDown: 1, "]": 1 };

const listed = (values) => values.map((value) => number(value, 3)).join(", ");
// A patch with five digits a number, which is finer than any pixel.
const short = (patch) =>
  JSON.parse(JSON.stringify(patch), (_, value) => (typeof value === "number" ? Number(value.toPrecision(5)) : value));

// A step of a direction's tip: over its sphere, as the eye sees it.
const overSphere = (tip, step, toward) => {
  const depth = dot(tip, toward);
  const across = add(add(tip, step), scale(toward, -depth));
  const bent = Math.sqrt(Math.max(0, dot(tip, tip) - dot(across, across)));
  return add(step, scale(toward, (depth < -0.05 * norm(tip) ? -bent : bent) - depth));
};

/** Listens to the drawing; what comes between two frames is one patch of the state. Returns what places the handles. */
export const mountPointer = (store, context) => {
  const [view, handles, hover] = ["view", "handles", "hover"].map(byId);
  const { yaw, pitch, zoom } = startFrom(context.data.start ?? {});
  const down = new Map(); // where each pointer is that is pressed
  let press = null; // where a press began, on which handle or point, and what it moves once it is a drag
  let pending = {};
  let request = 0;

  const flush = () => {
    cancelAnimationFrame(request);
    const patch = pending;
    [pending, request] = [{}, 0];
    store.set(patch);
  };
  const later = (patch) => {
    Object.assign(pending, patch);
    request ||= requestAnimationFrame(flush);
  };
  const now = () => ({ ...store.get(), ...pending });
  const turn = (dx, dy) => {
    const { yaw: angle, pitch: height } = orbit(now(), dx, dy);
    later({ yaw: Math.atan2(Math.sin(angle), Math.cos(angle)), pitch: height });
  };
  const magnify = (factor) => later({ zoom: now().zoom * factor });
  const place = ({ clientX, clientY }) => {
    const { left, top } = context.canvas.getBoundingClientRect();
    return [clientX - left, clientY - top];
  };
  // The point there, or -1; over a handle there is none.
  const under = (event) => {
    const [x, y] = place(event);
    return event.target.dataset.handle ? -1 : (pick(context.frame(), store.get(), context.size(), x, y)?.index ?? -1);
  };

  // What moves a handle by pixels from where it is now.
  const grip = (id) => {
    flush();
    const { panels, handles: all, radius, drag } = context.frame();
    const handle = all.find((each) => each.id === id);
    if (!handle) return null;
    const eye = lens(store.get(), layout(panels, context.size())[handle.panel], radius);
    return (dx, dy) => {
      const step = unseen(eye, dx, dy, handle.at);
      later(short(drag(id, id === "normal" ? overSphere(handle.at, step, eye.toward) : step)));
    };
  };

  const tell = (index, x = 0, y = 0) => {
    hover.hidden = index < 0;
    context.canvas.style.cursor = hover.hidden ? "" : "pointer";
    if (hover.hidden) return;
    const { scene, labels, raw } = context.computed();
    hover.textContent = scene === "model" ? labels[index] : `${labels[index]}: (${listed(raw[index])})`;
    hover.style.left = `${Math.max(0, Math.min(x + 12, context.size().width - hover.offsetWidth))}px`;
    hover.style.top = `${Math.max(0, y - hover.offsetHeight - 8)}px`;
  };

  const listeners = {
    pointerdown: (event) => {
      if (event.button !== 0) return;
      view.setPointerCapture(event.pointerId);
      down.set(event.pointerId, place(event));
      press = down.size > 1 ? null : { at: place(event), handle: event.target.dataset.handle, index: under(event) };
      hover.hidden = true;
    },
    pointermove: (event) => {
      const at = place(event);
      const before = down.get(event.pointerId);
      if (!before) return tell(under(event), ...at);
      const [dx, dy] = minus(at, press?.at ?? at);
      if (down.size === 2) {
        const other = down.get([...down.keys()].find((id) => id !== event.pointerId));
        const span = (there) => Math.max(20, norm(minus(there, other)));
        magnify(span(at) / span(before));
      } else if (press && !press.move) {
        if (Math.hypot(dx, dy) < CLICK) return;
        if (press.index >= 0) store.set({ selected: press.index });
        press.move = grip(press.handle ?? (press.index >= 0 ? "point" : ""));
        if (!press.move) press = null;
      }
      if (press?.move) press.move(dx, dy);
      else if (down.size === 1) turn(...minus(at, before));
      down.set(event.pointerId, at);
    },
    pointerup: (event) => {
      if (!down.delete(event.pointerId)) return;
      if (event.type === "pointerup" && press?.index >= 0 && !press.move) {
        store.set({ selected: press.index });
        tell(press.index, ...press.at);
      }
      press = null;
    },
    pointercancel: (event) => listeners.pointerup(event),
    pointerleave: ({ pointerType }) => pointerType === "mouse" && tell(-1),
    wheel: (event) => {
      event.preventDefault();
      const pixels = event.deltaY * (event.deltaMode ? 16 : 1) * (event.ctrlKey ? 6 : 1);
      magnify(ZOOM_PER_PIXEL ** Math.min(200, Math.max(-200, -pixels)));
    },
    keydown: (event) => {
      const { key, shiftKey, target } = event;
      const { scene, layer, selected } = now();
      const step = NEIGHBOURS[key];
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (ARROWS[key]) {
        const [dx, dy] = ARROWS[key].map((sign) => sign * (shiftKey ? LARGE_STEP : STEP));
        if (target.dataset.handle) grip(target.dataset.handle)?.(dx, dy);
        else turn(dx, dy);
      } else if (ZOOMS[key]) magnify(ZOOM_PER_KEY ** ZOOMS[key]);
      else if (key === "Home") later({ yaw, pitch, zoom });
      else if (step && scene === "depth") later({ layer: Math.max(-1, layer + step) });
      else if (step) {
        const count = context.computed().shown.length;
        later({ selected: count ? (Math.max(selected, step < 0 ? 0 : -1) + step + count) % count : -1 });
      } else if (key === "Escape") {
        tell(-1);
        later({ selected: -1, layer: -1 });
      } else return;
      event.preventDefault();
    },
  };
  for (const [type, listener] of Object.entries(listeners)) view.addEventListener(type, listener, { passive: false });

  return (state) => {
    const { panels, handles: all, radius } = context.frame();
    const boxes = layout(panels, context.size());
    const there = all.map(({ id, label, at, panel }) => {
      const button = handles.querySelector(`[data-handle=${id}]`) ?? element("button", { className: "handle" });
      const seen = screen(at, state, boxes[panel], radius);
      put(button, { hidden: !(seen.scale > 0), ariaLabel: `${label}, at ${listed(at)}` });
      put(button.style, { left: `${seen.x}px`, top: `${seen.y}px` });
      if (!button.parentNode) {
        button.dataset.handle = id;
        handles.append(button);
      }
      return button;
    });
    for (const button of [...handles.children]) {
      if (there.includes(button)) continue;
      if (button === document.activeElement) view.focus();
      button.remove();
    }
  };
};
