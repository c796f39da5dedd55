// The camera {yaw, pitch, zoom}: where a place of the world lies on the screen, and back. The third axis points up.

// Distance of the eye in radii of what is shown: far enough that parallels still look parallel.
const DISTANCE = 6;
// The share of a box's shorter side that the world takes at zoom 1.
const FILL = 0.88;
const RADIANS_PER_PIXEL = 0.008;

/** A camera that looks at the origin so that a ball of that radius fits into the box {x, y, width, height}.
 * Of the lens, x and y are where the origin lies, pixels those of a unit of length there. */
export function lens({ yaw, pitch, zoom }, { x, y, width, height }, radius) {
  const [cy, sy, cp, sp] = [Math.cos(yaw), Math.sin(yaw), Math.cos(pitch), Math.sin(pitch)];
  return {
    right: [-sy, cy, 0],
    up: [-sp * cy, -sp * sy, cp],
    toward: [cp * cy, cp * sy, sp],
    x: x + width / 2,
    y: y + height / 2,
    pixels: (Math.min(width, height) * FILL * zoom) / (2 * radius),
    distance: DISTANCE * radius,
  };
}

/** Places as they are seen, four numbers each: x, y in pixels, depth (towards the eye), magnification. That is 0 where
 * nothing is to be drawn: the place is not finite, or so near the eye that it would be torn. */
export function seen({ right, up, toward, x, y, pixels, distance }, places) {
  const [[rx, ry], [ux, uy, uz], [tx, ty, tz]] = [right, up, toward];
  const out = new Float64Array(4 * places.length);
  for (let i = 0, o = 0; i < places.length; i++, o += 4) {
    const [a, b, c] = places[i];
    const depth = tx * a + ty * b + tz * c;
    if (!(Math.abs(a) + Math.abs(b) + Math.abs(c) < Infinity && depth < 0.9 * distance)) continue;
    const magnification = distance / (distance - depth);
    out[o] = x + pixels * magnification * (rx * a + ry * b);
    out[o + 1] = y - pixels * magnification * (ux * a + uy * b + uz * c);
    out[o + 2] = depth;
    out[o + 3] = magnification;
  }
  return out;
}

/** The step in the world, parallel to the screen, that moves a place by dx, dy pixels. */
export function unseen({ right, up, toward, pixels, distance }, dx, dy, place) {
  const depth = toward.reduce((sum, value, i) => sum + value * place[i], 0);
  const unit = pixels > 0 ? (distance - depth) / (distance * pixels) : 0;
  return right.map((value, i) => unit * (dx * value - dy * up[i]));
}

/** The camera after a drag by dx, dy pixels: what is in front follows the pointer. */
export const orbit = ({ yaw, pitch }, dx, dy) => ({
  yaw: yaw - dx * RADIANS_PER_PIXEL,
  pitch: Math.min(Math.PI / 2, Math.max(-Math.PI / 2, pitch + dy * RADIANS_PER_PIXEL)),
});
