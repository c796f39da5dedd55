/** Stacks of random layers f(h) = relu(W h), with and without norms: signals forward, gradients back, both computed. */

import { normals, uniform } from "explorer/random.js";

const [WIDTH, ROWS, EPS] = [64, 32, 1e-5];
const SIZE = ROWS * WIDTH;
// h becomes after(h + branch(f(before(h)))), with norms of rows (LayerNorm, or RMSNorm, which takes no mean off)
// or of columns (BatchNorm).
const ARMS = { none: {}, post: { after: "rows" }, pre: { before: "rows" }, rms: { before: "rms" }, batch: { branch: "columns" } };

/** Standard normal numbers of a seed, drawn once: the input, r of the loss, and as many layers as were asked for. */
let drawn = { seed: NaN };
const draw = (seed, depth) => {
  if (seed !== drawn.seed) {
    const next = uniform(seed);
    drawn = { seed, next, input: normals(SIZE, next), readout: normals(SIZE, next), layers: [] };
  }
  while (drawn.layers.length < depth) drawn.layers.push(normals(WIDTH * WIDTH, drawn.next));
  return drawn;
};

// Loops here and below, as the methods of typed arrays take five times as long.
const scaled = (layer, spread) => {
  const result = layer.slice();
  for (let i = 0; i < result.length; i += 1) result[i] *= spread * Math.sqrt(2 / WIDTH);
  return result;
};

/**
 * What all arms share: weights N(0, 2 spread^2 / width), input N(0, 1), and r ~ N(0, 1) of the loss sum(h * r). Each a
 * flat Float64Array, row after row, as are all signals and gradients.
 */
export const weights = ({ depth, seed, spread }) => {
  const { input, readout, layers } = draw(seed, depth);
  return { input, readout, layers: layers.slice(0, depth).map((layer) => scaled(layer, spread)) };
};

// Each step gives its output, and `back`, which takes the gradient at its output to that at its input.
const normalize = (values, over) => {
  if (!over) return { output: values, back: (gradient) => gradient, stretch: 1 };
  const [count, step, start] = over === "columns" ? [ROWS, WIDTH, 1] : [WIDTH, 1, WIDTH];
  const centres = over === "rms" ? 0 : 1;
  const [output, inverses] = [new Float64Array(SIZE), new Float64Array(SIZE / count)];
  for (let group = 0; group < inverses.length; group += 1) {
    const [first, end] = [group * start, group * start + count * step];
    let [total, square] = [0, 0];
    for (let i = first; i < end; i += step) total += centres * values[i];
    for (let i = first; i < end; i += step) square += (values[i] - total / count) ** 2;
    inverses[group] = 1 / Math.sqrt(square / count + EPS);
    for (let i = first; i < end; i += step) output[i] = (values[i] - total / count) * inverses[group];
  }
  const back = (gradient) => {
    const result = new Float64Array(SIZE);
    for (let group = 0; group < inverses.length; group += 1) {
      const [first, end] = [group * start, group * start + count * step];
      let [total, along] = [0, 0];
      for (let i = first; i < end; i += step) {
        total += centres * gradient[i];
        along += gradient[i] * output[i];
      }
      for (let i = first; i < end; i += step) {
        result[i] = (gradient[i] - (total + along * output[i]) / count) * inverses[group];
      }
    }
    return result;
  };
  return { output, back, stretch: Math.sqrt(inverses.reduce((sum, value) => sum + value * value, 0) / inverses.length) };
};

/** relu(M h) of each row h: four rows by two of M at a time, which is three times as quick as one by one. */
const activate = (rows, matrix) => {
  const result = new Float64Array(SIZE);
  for (let a = 0; a < SIZE; a += 4 * WIDTH) {
    const b = a + WIDTH;
    const c = b + WIDTH;
    const d = c + WIDTH;
    for (let i = 0; i < WIDTH; i += 2) {
      let a0 = 0,
        b0 = 0,
        c0 = 0,
        d0 = 0,
        a1 = 0,
        b1 = 0,
        c1 = 0,
        d1 = 0;
      for (let k = 0, upper = i * WIDTH, lower = upper + WIDTH; k < WIDTH; k += 1) {
        const first = matrix[upper + k];
        const second = matrix[lower + k];
        const p = rows[a + k];
        const q = rows[b + k];
        const r = rows[c + k];
        const s = rows[d + k];
        a0 += first * p;
        b0 += first * q;
        c0 += first * r;
        d0 += first * s;
        a1 += second * p;
        b1 += second * q;
        c1 += second * r;
        d1 += second * s;
      }
      result[a + i] = a0;
      result[a + i + 1] = a1;
      result[b + i] = b0;
      result[b + i + 1] = b1;
      result[c + i] = c0;
      result[c + i + 1] = c1;
      result[d + i] = d0;
      result[d + i + 1] = d1;
    }
  }
  for (let i = 0; i < SIZE; i += 1) if (result[i] < 0) result[i] = 0;
  return result;
};

/** The gradient before relu(M h), of one after it: of each row a sum of M's open rows, four at a time. */
const reverse = (gradient, output, matrix) => {
  const result = new Float64Array(SIZE);
  // Where the open rows of M start, and their factors; three more, so that the last four are four.
  const [from, by] = [new Int32Array(WIDTH + 3), new Float64Array(WIDTH + 3)];
  for (let row = 0; row < SIZE; row += WIDTH) {
    let count = 0;
    for (let i = 0; i < WIDTH; i += 1) {
      if (!(output[row + i] > 0)) continue;
      from[count] = i * WIDTH;
      by[count] = gradient[row + i];
      count += 1;
    }
    by.fill(0, count);
    for (let j = 0; j < count; j += 4) {
      const a = from[j];
      const b = from[j + 1];
      const c = from[j + 2];
      const d = from[j + 3];
      const p = by[j];
      const q = by[j + 1];
      const r = by[j + 2];
      const s = by[j + 3];
      for (let k = 0; k < WIDTH; k += 1) {
        result[row + k] += p * matrix[a + k] + q * matrix[b + k] + r * matrix[c + k] + s * matrix[d + k];
      }
    }
  }
  return result;
};

/** Adds b to a, in its place. */
const add = (a, b) => {
  for (let i = 0; i < SIZE; i += 1) a[i] += b[i];
  return a;
};

const sizesOf = (h) => {
  let [total, square] = [0, 0];
  for (let i = 0; i < SIZE; i += 1) {
    total += h[i];
    square += h[i] * h[i];
  }
  return { rms: Math.sqrt(square / SIZE), mean: total / SIZE };
};

/** The signals of the arms, layer by layer; kept, so that a stack of another depth goes on from them. */
let forward = {};
const signalsOf = ({ depth, spread, residual, seed }) => {
  const { input, layers } = draw(seed, depth);
  if (forward.seed !== seed || forward.spread !== spread || forward.residual !== residual) {
    const arms = Object.keys(ARMS).map((arm) => [arm, { backs: [], found: [sizesOf(input)], stretches: [], last: input }]);
    forward = { seed, spread, residual, arms: Object.fromEntries(arms), count: 0 };
  }
  for (; forward.count < depth; forward.count += 1) {
    const matrix = scaled(layers[forward.count], spread);
    for (const [name, places] of Object.entries(ARMS)) advance(forward.arms[name], matrix, places, residual);
  }
  return forward.arms;
};

/** One layer more. */
const advance = (arm, matrix, { before, branch, after }, residual) => {
  const first = normalize(arm.last, before);
  const inner = activate(first.output, matrix);
  const second = normalize(inner, branch);
  const third = normalize(residual ? add(arm.last.slice(), second.output) : second.output, after);
  arm.last = third.output;
  arm.found.push(sizesOf(third.output));
  arm.stretches.push(first.stretch * second.stretch * third.stretch);
  arm.backs.push((gradient) => {
    const arriving = third.back(gradient);
    const through = first.back(reverse(second.back(arriving), inner, matrix));
    return residual ? add(through, arriving) : through;
  });
};

/**
 * Five stacks of the same layers: no norm, Post-LN, Pre-LN, Pre-RMSNorm, BatchNorm in the branch; without the residual, `h +` goes.
 * Each {rms, mean, gradient} by layer 0..depth: of h and of dloss/dh (rms); stretch: by how much its norms multiply what
 * passes, the geometric mean over its layers of the rms of 1 / s. What overflows is Infinity, then NaN, as in PyTorch.
 */
export const stack = (options) => {
  const { depth, seed } = options;
  return Object.fromEntries(
    Object.entries(signalsOf(options)).map(([name, { backs, found, stretches }]) => {
      let gradient = draw(seed, depth).readout;
      const gradients = [sizesOf(gradient).rms];
      for (const back of backs.slice(0, depth).reverse()) gradients.unshift(sizesOf((gradient = back(gradient))).rms);
      const of = (key) => found.slice(0, depth + 1).map((layer) => layer[key]);
      const logs = stretches.slice(0, depth).reduce((sum, value) => sum + Math.log(value), 0);
      const stretch = Math.exp(logs / depth);
      return [name, { rms: of("rms"), mean: of("mean"), gradient: gradients, stretch }];
    }),
  );
};
