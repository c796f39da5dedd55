/** Vectors as plain arrays, matrices as arrays of rows. */

export const dot = (a, b) => {
  let total = 0;
  for (let i = 0; i < a.length; i += 1) total += a[i] * b[i];
  return total;
};

/** Euclidean length; squares neither overflow nor vanish. */
export const norm = (a) => {
  const square = dot(a, a);
  return square > 1e-280 && square < 1e280 ? Math.sqrt(square) : Math.hypot(...a);
};

export const mean = (a) => a.reduce((total, value) => total + value, 0) / a.length;
export const add = (a, b) => a.map((value, i) => value + b[i]);
export const minus = (a, b) => a.map((value, i) => value - b[i]);
/** Entry by entry. */
export const times = (a, b) => a.map((value, i) => value * b[i]);
export const scale = (a, factor) => a.map((value) => value * factor);

/** a / |a|; zero stays zero. */
export const unit = (a) => {
  const length = norm(a) || 1;
  return a.map((value) => value / length);
};

/** @type {(a: number[], b: number[]) => number[]} */
export const cross = ([x, y, z], [u, v, w]) => [y * w - z * v, z * u - x * w, x * v - y * u];
export const matrixVector = (matrix, a) => matrix.map((row) => dot(row, a));
export const transpose = (matrix) => matrix[0].map((_, j) => matrix.map((row) => row[j]));

/** n - 1 orthonormal rows, orthogonal to 1: (1, ..., 1, -k, 0, ...) / sqrt(k (k + 1)). */
export const helmert = (n) =>
  Array.from({ length: n - 1 }, (_, row) =>
    unit(Array.from({ length: n }, (__, i) => (i <= row ? 1 : i === row + 1 ? -i : 0))),
  );

/** Such rows for any normal: Helmert's, turned as e = 1 / sqrt(n) turns to u = +-normal / |normal|, with u . e >= 0. */
export const hyperplaneBasis = (normal) => {
  const e = normal.map(() => 1 / Math.sqrt(normal.length));
  const u = scale(unit(normal), dot(normal, e) < 0 ? -1 : 1);
  // On vectors orthogonal to e that rotation is I - (u + e) u^T / (1 + u . e).
  const axis = scale(add(u, e), 1 / (1 + dot(u, e)));
  return helmert(normal.length).map((row) => minus(row, scale(axis, dot(u, row))));
};

/** Eigenvalues, largest first, and eigenvectors (as rows) of a symmetric 3 x 3 matrix, by Jacobi's rotations. */
export const symmetricEigen3 = (matrix) => {
  let a = matrix;
  let vectors = [
    [1, 0, 0],
    [0, 1, 0],
    [0, 0, 1],
  ];
  for (const [p, q] of Array(12)
    .fill([
      [0, 1],
      [0, 2],
      [1, 2],
    ])
    .flat()) {
    if (a[p][q] === 0) continue;
    const theta = (a[q][q] - a[p][p]) / (2 * a[p][q]);
    const tangent = (theta < 0 ? -1 : 1) / (Math.abs(theta) + Math.hypot(theta, 1));
    const cosine = 1 / Math.hypot(tangent, 1);
    const turn = (rows) =>
      rows.map((row, i) =>
        i === p || i === q
          ? add(scale(row, cosine), scale(rows[p + q - i], i === p ? -cosine * tangent : cosine * tangent))
          : row,
      );
    a = transpose(turn(transpose(turn(a))));
    a[p][q] = a[q][p] = 0;
    vectors = turn(vectors);
  }
  const order = [0, 1, 2].sort((i, j) => a[j][j] - a[i][i]);
  return { values: order.map((i) => a[i][i]), vectors: order.map((i) => vectors[i]) };
};
