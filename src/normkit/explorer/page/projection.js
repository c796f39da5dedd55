// From a frame in the world to commands on the screen, in the order in which they are to be painted: far to near.
import { lens, seen } from "explorer/camera.js";
import { add, minus, norm, scale } from "explorer/linear.js";
import { across, ellipse, visible } from "explorer/surfaces.js";

/** One thing to paint: places flat (x0, y0, x1, y1, ...), colours as names, depth towards the eye.
 * @typedef {{type: "polygon" | "line" | "marker" | "text" | "clip", [field: string]: any}} Command */

const TITLE = 30;
const REACH = 14;
const SMALL = 250;
// The share of a panel's height that its strip has, where it has one, unless the panel is taller than wide.
const STRIP = 0.32;
// Lines and points are taken for so many radii nearer than they are, and so painted after the face they lie on.
const LIFT = 0.06;
const LAYERS = { behind: 0, normal: 1, front: 2 };
// Where the light comes from: right, up, toward.
const LIGHT = [-0.48, 0.64, 0.6];

/** How much larger than on a usual screen letters, markers and lines are drawn on a large one. */
const enlargement = ({ width, height }) => Math.min(2, Math.max(1, Math.min(width, height) / 900));

/** The boxes of the panels' contents, in as many columns as keep them large. */
export function layout(panels, { width, height }) {
  const strip = panels.length > 1 ? TITLE * enlargement({ width, height }) : 0;
  const aspect = panels.some(({ draw }) => draw) ? 1.4 : 1;
  const grids = panels.map((_, k) => [k + 1, Math.ceil(panels.length / (k + 1))]);
  // A grid with empty places counts less.
  const lower = panels.some((panel) => panel.strip) ? STRIP : 0;
  const side = ([columns, rows]) =>
    (Math.min(width / columns / aspect, (height / rows - strip) * (1 - lower)) * panels.length) / (columns * rows);
  const [columns, rows] = grids.reduce((best, grid) => (side(grid) >= side(best) ? grid : best), grids[0] ?? [1, 1]);
  const across = width / columns;
  const tall = Math.max(0, height / rows - strip);
  const space = lower ? Math.min((1 - lower) * tall, Math.max(0.5 * tall, across)) : tall;
  return panels.map((_, k) => ({
    x: across * (k % columns),
    y: (height / rows) * Math.floor(k / columns) + strip,
    width: across,
    height: space,
    below: tall - space,
  }));
}

const scaled = (box, factor) => ({
  x: box.x * factor,
  y: box.y * factor,
  width: box.width * factor,
  height: box.height * factor,
  below: box.below * factor,
});

/** A frame {panels, radius} seen by a camera on a canvas of a size {width, height}, as commands. */
export function commands(frame, camera, size) {
  if (!(size.width >= 1 && size.height >= 1)) return [];
  const factor = enlargement(size);
  const boxes = layout(frame.panels, size).map((box) => scaled(box, 1 / factor));
  const list = drawn(frame, camera, boxes, { width: size.width / factor, height: size.height / factor });
  return factor === 1 ? list : list.map((command) => enlarged(command, factor));
}

const PLACED = ["x", "y", "size", "width", "height", "offset"];

function enlarged(command, factor) {
  const larger = { ...command };
  for (const key of PLACED) if (key in command) larger[key] = factor * command[key];
  for (const key of ["at", "dash"]) if (command[key]) larger[key] = command[key].map((value) => factor * value);
  return larger;
}

function drawn({ panels, radius }, camera, boxes, size) {
  return panels.flatMap(({ title, items = [], draw, strip }, k) => {
    const box = boxes[k];
    const view = { lens: lens(camera, box, radius), radius, box, out: [] };
    for (const item of items) DRAWN[item.kind]?.(item, view);
    const list = draw ? draw(box) : [...farToNear(view), ...labels(items, view)];
    if (panels.length === 1) return list;
    const heading = { x: box.x + 14, y: box.y - TITLE / 2 + 3, text: title, colour: "ink", size: 14, bold: true };
    const whole = { type: "clip", x: 0, y: 0, ...size };
    const { below, ...inner } = box;
    const under = strip ? [whole, ...strip({ ...inner, y: box.y + box.height, height: below })] : [];
    return [whole, { type: "text", ...heading }, ...(draw ? [] : [{ type: "clip", ...inner }]), ...list, ...under];
  });
}

/** Where a place of the world lies on the screen; scale: pixels for a unit of length there. */
export function screen(place, camera, box, radius) {
  const eye = lens(camera, box, radius);
  const [x, y, depth, magnification] = seen(eye, [place]);
  return { x, y, depth, scale: magnification * eye.pixels };
}

/** The point nearest to a place on the screen; of two at one place, the one in front. */
export function pick({ panels, radius }, camera, size, x, y) {
  let best = REACH * enlargement(size);
  let found = null;
  for (const [panel, box] of layout(panels, size).entries()) {
    if (x < box.x || x > box.x + box.width || y < box.y || y > box.y + box.height) continue;
    for (const { at } of (panels[panel].items ?? []).filter((item) => item.kind === "points" && item.pick)) {
      const flat = seen(lens(camera, box, radius), at);
      for (let index = 0; index < at.length; index++) {
        const [u, v, depth, magnification] = flat.subarray(4 * index);
        const distance = Math.hypot(u - x, v - y) - (0.1 * depth) / radius;
        if (magnification && distance < best) [best, found] = [distance, { panel, index }];
      }
    }
  }
  return found;
}

const DRAWN = { points, curve, surface, segments, arrow };

// How strongly what lies at that depth is drawn: 0.5 at the back of what is shown, 1 at its front.
const strength = (depth, { radius }) => Math.min(1, Math.max(0.5, 0.75 + depth / (4 * radius)));

// In steps, so that neighbours can be painted as one path.
const step = (alpha) => Math.min(1, Math.round(alpha * 128) / 128);

const each = (given, k) => (Array.isArray(given) ? given[k] : given);

function points({ at, colours, markers, radius = 4, alpha = 1, selected = -1 }, view) {
  const flat = seen(view.lens, at);
  for (let i = 0, o = 0; i < at.length; i++, o += 4) {
    if (!flat[o + 3]) continue;
    const near = strength(flat[o + 2], view);
    const size = radius * flat[o + 3] * (0.55 + 0.6 * near) * (i === selected ? 1.3 : 1);
    const command = {
      type: "marker",
      x: flat[o],
      y: flat[o + 1],
      depth: flat[o + 2] + 2 * LIFT * view.radius,
      size,
      marker: each(markers, i),
      colour: each(colours, i),
      alpha: i === selected ? 1 : alpha * near,
    };
    view.out.push(command);
    if (i === selected) view.out.push({ ...command, size: size + 4.5, marker: 5, colour: "ink" });
  }
}

function curve({ at, closed = false, ...style }, view) {
  const places = divided(closed ? [...at, ...at.slice(0, 1)] : at, view.radius / 7);
  strand(seen(view.lens, places), [...places.keys()], style, view);
}

function segments({ pairs, colours, width = 1, alpha = 1 }, view) {
  for (const [k, at] of pairs.entries()) curve({ at, colour: each(colours, k), width, alpha }, view);
}

function surface({ quadric, colour, alpha, edge, edgeAlpha = 0.3, ...mesh }, view) {
  const { right, up, toward, distance } = view.lens;
  const light = right.map((_, i) => LIGHT[0] * right[i] + LIGHT[1] * up[i] + LIGHT[2] * toward[i]);
  const shown = quadric ? visible(quadric, scale(toward, distance), light) : mesh;
  const { places, faces, lines, outline, density, front } = shown;
  const flat = seen(view.lens, places);
  for (const [k, face] of faces.entries()) {
    const at = [];
    let depth = 0;
    for (const index of face) {
      if (!flat[4 * index + 3]) break;
      at.push(flat[4 * index], flat[4 * index + 1]);
      depth += flat[4 * index + 2] / face.length;
    }
    if (at.length < 2 * face.length) continue;
    view.out.push({ type: "polygon", at, colour, alpha: step(alpha * (density?.[k] ?? 1)), depth });
  }
  if (!edge) return;
  for (const line of lines) strand(flat, line, { colour: edge, width: 0.8, alpha: edgeAlpha }, view, front);
  curve({ at: outline, colour: edge, width: 1.3, alpha: Math.min(1, 2 * edgeAlpha), closed: true }, view);
}

// The shaft, and a cone: its base as it is seen, and the triangle from the base's widest chord to the tip.
function arrow({ from, to, colour, width = 2, alpha = 1 }, view) {
  const along = minus(to, from);
  const length = norm(along);
  const [x, y, depth, magnification] = seen(view.lens, [to]);
  if (!(length > 0) || !magnification) return;
  const head = Math.min((5 + 3.5 * width) / (view.lens.pixels * magnification), 0.6 * length);
  const back = minus(to, scale(along, head / length));
  curve({ at: [from, back], colour, width, alpha }, view);
  const [u, v] = across(along).map((side) => scale(side, 0.36 * head));
  const flat = seen(view.lens, [back, ...ellipse(back, u, v, 16)]);
  const base = Array.from({ length: 16 }, (_, k) => [flat[4 * k + 4], flat[4 * k + 5]]);
  const side = (place) => (place[0] - flat[0]) * (y - flat[1]) - (place[1] - flat[1]) * (x - flat[0]);
  const chord = [...base].sort((a, b) => side(a) - side(b));
  for (const at of [base, [chord[0], chord[15], [x, y]]])
    view.out.push({ type: "polygon", at: at.flat(), colour, alpha, depth: depth + 2 * LIFT * view.radius });
}

// A line through seen places, in pieces that find their own order of depth; a little too long, so that no gap shows.
function strand(flat, order, style, view, front = null) {
  const { colour = "ink", width = 1.5, dash = null, alpha = 1, layer = "normal" } = style;
  const stride = layer === "normal" ? 3 : order.length;
  for (let start = 0, offset = 0; start + 1 < order.length; start += stride) {
    const at = [];
    const begin = offset;
    let [depth, near, facing] = [0, 0, 0];
    for (let k = start; k < Math.min(order.length, start + stride + 1); k++) {
      const o = 4 * order[k];
      if (!flat[o + 3]) break;
      const last = at.length;
      if (last && dash) offset += Math.hypot(flat[o] - at[last - 2], flat[o + 1] - at[last - 1]);
      at.push(flat[o], flat[o + 1]);
      depth += flat[o + 2];
      near += flat[o + 3];
      facing += front?.[order[k]] ?? 1;
    }
    const count = at.length / 2;
    if (count < 2) continue;
    depth /= count;
    view.out.push({
      type: "line",
      at: stretched(at),
      colour,
      width: Math.round((10 * width * near) / count) / 10,
      alpha: step((alpha * facing * strength(depth, view)) / count),
      ...(dash && { dash, offset: begin }),
      depth: depth + LIFT * view.radius,
      layer,
    });
  }
}

// Both ends moved outwards a little.
function stretched(at) {
  const last = at.length - 2;
  for (const [end, next] of [
    [0, 2],
    [last, last - 2],
  ]) {
    const [dx, dy] = [at[end] - at[next], at[end + 1] - at[next + 1]];
    const share = 0.15 / (Math.hypot(dx, dy) || Infinity);
    at[end] += share * dx;
    at[end + 1] += share * dy;
  }
  return at;
}

// With more places where few are far apart.
function divided(places, longest) {
  if (places.length > 24) return places;
  return places.flatMap((place, k) => {
    if (!k) return [place];
    const step = minus(place, places[k - 1]);
    const parts = Math.min(40, Math.ceil(norm(step) / longest)) || 1;
    const between = Array.from({ length: parts - 1 }, (_, j) => add(places[k - 1], scale(step, (j + 1) / parts)));
    return [...between, place];
  });
}

// Sorted as numbers, for speed: layer, depth and place in the list in the 53 bits of a float.
function farToNear({ out, radius }) {
  const keys = new Float64Array(out.length);
  for (let k = 0; k < out.length; k++) {
    const { depth, layer = "normal" } = out[k];
    const nearness = Math.round(Math.min(16, Math.max(0, depth / radius + 8)) * 2 ** 26);
    keys[k] = (LAYERS[layer] * 2 ** 31 + nearness) * 2 ** 20 + k;
  }
  keys.sort();
  const list = [];
  for (let k = 0; k < keys.length; k++) list.push(out[keys[k] - Math.floor(keys[k] / 2 ** 20) * 2 ** 20]);
  return list;
}

// Labels, moved where they would lie on another or leave the box. In a small box only those that find room.
function labels(items, { lens, box }) {
  const taken = [];
  return items
    .filter(({ kind }) => kind === "label")
    .flatMap((item) => {
      const { at, text, colour = "ink", anchor = "start", shift: [dx, dy] = [9, -9], size = 12.5 } = item;
      const [x, y, , magnification] = seen(lens, [at]);
      if (!magnification) return [];
      const turned = { start: "end", middle: "middle", end: "start" }[anchor];
      const width = 0.56 * size * text.length;
      const small = box.width < SMALL;
      if (width > (small ? 0.7 : 1) * box.width) return [];
      const near = [
        [dx, dy],
        [dx, -dy],
        [-dx, dy],
        [-dx, -dy],
      ];
      const around = [0, 18, 36].flatMap((more) =>
        near.map(([over, down]) => [over, down + (down < 0 ? -more : more)]),
      );
      // As it was wished for; then pushed into the box.
      const tries = [Infinity, 0].flatMap((limit) =>
        around.map(([across, down]) => {
          const side = across === dx ? anchor : turned;
          const share = { start: 0, middle: 0.5, end: 1 }[side];
          const free = x + across - width * share;
          const left = Math.max(box.x - limit, Math.min(box.x + box.width - width + limit, free));
          const middle = y + down;
          const area = [left, middle - 0.7 * size, left + width, middle + 0.7 * size];
          return { x: left + width * share, y: middle, anchor: side, area };
        }),
      );
      const clear = tries.find(
        ({ area: [left, top, right, bottom] }) =>
          left >= box.x &&
          top >= box.y &&
          right <= box.x + box.width &&
          bottom <= box.y + box.height &&
          taken.every((other) => left >= other[2] || other[0] >= right || top >= other[3] || other[1] >= bottom),
      );
      if (!clear && small) return [];
      const { area, ...place } = clear ?? tries[around.length];
      taken.push(area);
      return [{ type: "text", ...place, text, colour, size }];
    });
}
