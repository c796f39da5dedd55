// Ellipsoids, planes and ellipses in the world, ready to be spread into an item of a frame.
import { add, cross, dot, matrixVector, minus, norm, scale, unit } from "explorer/linear.js";

const list = (count, of) => Array.from({ length: count }, (_, k) => of(k));

/** The image of the unit sphere under a matrix (rows), moved to a centre. */
export const ellipsoid = (centre, matrix) => ({ quadric: { centre, matrix } });

const CELLS = 8;
const cell = (row, column) => row * (CELLS + 1) + column;
const SHEET = {
  faces: list(CELLS, (i) =>
    list(CELLS, (j) => [cell(i, j), cell(i, j + 1), cell(i + 1, j + 1), cell(i + 1, j)]),
  ).flat(),
  lines: list(2 * CELLS - 2, (k) => list(CELLS + 1, (j) => (k % 2 ? cell(j, (k + 1) / 2) : cell(k / 2 + 1, j)))),
};

/** A square piece of a plane: places, faces and lines as indices of them; extent: half a side, in lengths of u, v. */
export function plane(centre, u, v, extent) {
  const at = (s, t) => add(centre, add(scale(u, extent * s), scale(v, extent * t)));
  const steps = list(CELLS + 1, (k) => (2 * k) / CELLS - 1);
  const places = steps.flatMap((t) => steps.map((s) => at(s, t)));
  return { places, ...SHEET, outline: [at(-1, -1), at(1, -1), at(1, 1), at(-1, 1)] };
}

/** The closed curve centre + u cos + v sin. */
export const ellipse = (centre, u, v, count = 96) =>
  list(count, (k) => {
    const angle = (2 * Math.PI * k) / count;
    const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
    return [0, 1, 2].map((i) => centre[i] + (cos * u[i] + sin * v[i]));
  });

/** Two unit vectors at right angles to a direction and to each other. */
export function across(normal) {
  const [x, y, z] = unit(normal);
  // The cross product with an axis that the direction is not near.
  const first = unit(Math.abs(z) < 0.6 ? [-y, x, 0] : [0, -z, y]);
  return [first, cross([x, y, z], first)];
}

// Rings from the place nearest to the eye to the outline; corners of a ring; faces inside use every third.
const [RINGS, ROUND, SPAN] = [7, 54, 3];
const starts = list(ROUND / SPAN, (k) => k * SPAN);
const corner = (row, k) => row * ROUND + (k % ROUND);

// Two caps, and bands in sectors. All are convex, which paints twice as fast: only the outline takes every corner.
const FACES = [
  ...[0, 2 * RINGS - 2].map((row) => starts.map((k) => corner(row, k))),
  ...list(2 * RINGS - 2, (row) => (row < RINGS - 1 ? [row, row + 1] : [row + 1, row])).flatMap(([inner, outer]) =>
    starts.map((k) => {
      const arc = outer === RINGS - 1 ? list(SPAN + 1, (j) => k + j) : [k, k + SPAN];
      return [corner(inner, k + SPAN), corner(inner, k), ...arc.map((j) => corner(outer, j))];
    }),
  ),
];

const globe = (latitude, longitude) => {
  const [a, b] = [latitude, longitude].map((degrees) => (degrees * Math.PI) / 180);
  return [Math.cos(a) * Math.cos(b), Math.cos(a) * Math.sin(b), Math.sin(a)];
};

// Lines every 30 degrees; only four meridians go on to the poles, where twelve would be a blot.
const GRATICULE = [
  ...[-60, -30, 0, 30, 60].map((latitude) => list(49, (k) => globe(latitude, 7.5 * k))),
  ...list(12, (line) => (line % 3 ? 60 : 90)).map((reach, line) =>
    list(reach / 3.75 + 1, (k) => globe(7.5 * k - reach, 30 * line)),
  ),
];
const LINES = GRATICULE.map((line, k) => {
  const first = GRATICULE.slice(0, k).reduce((sum, before) => sum + before.length, ROUND * (2 * RINGS - 1));
  return line.map((_, j) => first + j);
});

/** A quadric as it is seen from a place: a mesh of rings around the line of sight. Its faces have the density of glass,
 * most at the rim and away from the light; front, of a place, is less on the far side. */
export function visible({ centre, matrix }, eye, light) {
  const size = Math.max(...matrix.flat().map(Math.abs));
  const flat = !(Math.abs(dot(matrix[0], cross(matrix[1], matrix[2]))) > 1e-6 * size ** 3);
  // A flat one has no inverse; a thousandth thick it looks the same.
  const [r, s, t] = flat ? matrix.map((row, i) => row.map((value, k) => value + (i === k ? size / 1000 : 0))) : matrix;
  // The rows of the inverse's transpose: a normal of the unit sphere becomes one of the image.
  const normals = [cross(s, t), cross(t, r), cross(r, s)].map((row) => scale(row, 1 / dot(r, cross(s, t))));
  const away = minus(eye, centre);
  // Where the unit sphere is seen from, in its own coordinates: it ends where unit . seat = 1.
  const seat = normals.reduce((sum, row, i) => add(sum, scale(row, away[i])), [0, 0, 0]);
  const end = Math.acos(Math.min(1, 1 / norm(seat)));
  const [u, v] = across(seat);
  const ring = (angle, count = ROUND) =>
    ellipse(scale(unit(seat), Math.cos(angle)), scale(u, Math.sin(angle)), scale(v, Math.sin(angle)), count);
  const units = list(2 * RINGS - 1, (k) => {
    const share = 1 - (Math.abs(k + 1 - RINGS) / RINGS) ** 1.6;
    return ring(k < RINGS ? end * share : Math.PI - (Math.PI - end) * share);
  });
  const all = [...units, ...GRATICULE].flat();
  const image = (place) => [centre[0] + dot(r, place), centre[1] + dot(s, place), centre[2] + dot(t, place)];
  const density = FACES.map((face) => {
    const middle = unit(add(all[face[0]], all[face[2]]));
    const normal = unit(matrixVector(normals, middle));
    const turned = 1 - Math.abs(dot(normal, unit(minus(eye, image(middle)))));
    return 0.6 + turned ** 2 - 0.25 * dot(normal, light);
  });
  const front = all.map((place) => (dot(place, seat) > 1 ? 1 : 0.35));
  return { places: all.map(image), faces: FACES, lines: LINES, outline: ring(end, 96).map(image), density, front };
}
