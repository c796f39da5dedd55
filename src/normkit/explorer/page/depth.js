/** Stacks of random layers f(h) = relu(W h), with and without norms: signals forward, gradients back, both computed. */

import { add, dot, mean, scale, transpose } from "explorer/linear.js";
import { normals, uniform } from "explorer/random.js";

const [WIDTH, ROWS, EPS] = [64, 32, 1e-5];
const LEVELS = [0.05, 0.25, 0.5, 0.75, 0.95];
// h becomes after(h + branch(f(before(h)))), with norms of rows (LayerNorm) or of columns (BatchNorm).
const ARMS = { none: {}, post: { after: "rows" }, pre: { before: "rows" }, batch: { branch: "columns" } };

/** What all arms share: weights N(0, 2 spread^2 / width), input N(0, 1), and r ~ N(0, 1) of the loss sum(h * r). */
export const weights = ({ depth, seed, spread }) => {
  const next = uniform(seed);
  const draw = (rows, factor) => Array.from({ length: rows }, () => scale(normals(WIDTH, next), factor));
  const [input, readout] = [draw(ROWS, 1), draw(ROWS, 1)];
  return { input, readout, layers: Array.from({ length: depth }, () => draw(WIDTH, spread * Math.sqrt(2 / WIDTH))) };
};

// Each step gives its output, and `back`, which takes the gradient at its output to that at its input.
const normalize = (rows, over) => {
  if (!over) return { output: rows, back: (gradient) => gradient };
  if (over === "columns") {
    const { output, back } = normalize(transpose(rows), "rows");
    return { output: transpose(output), back: (gradient) => transpose(back(transpose(gradient))) };
  }
  const centred = rows.map((row) => {
    const middle = mean(row);
    return row.map((value) => value - middle);
  });
  const inverses = centred.map((row) => 1 / Math.sqrt(dot(row, row) / row.length + EPS));
  const output = centred.map((row, r) => scale(row, inverses[r]));
  const back = (gradient) => output.map((row, r) => {
    const middle = mean(gradient[r]);
    const along = dot(gradient[r], row) / row.length;
    return row.map((value, i) => (gradient[r][i] - middle - along * value) * inverses[r]);
  });
  return { output, back };
};

/** M h of each row h; four at a time, which is twice as quick. */
const multiply = (rows, matrix) => {
  const result = rows.map((row) => row.slice());
  for (let r = 0; r < ROWS; r += 4) {
    const [a, b, c, d] = rows.slice(r, r + 4);
    matrix.forEach((row, i) => {
      let first = 0;
      let second = 0;
      let third = 0;
      let fourth = 0;
      for (let k = 0; k < WIDTH; k += 1) {
        first += row[k] * a[k];
        second += row[k] * b[k];
        third += row[k] * c[k];
        fourth += row[k] * d[k];
      }
      result[r][i] = first;
      result[r + 1][i] = second;
      result[r + 2][i] = third;
      result[r + 3][i] = fourth;
    });
  }
  return result;
};

const branchOf = (h, matrix, transposed) => {
  const output = multiply(h, matrix).map((row) => row.map((value) => (value < 0 ? 0 : value)));
  const open = (gradient) => gradient.map((row, r) => row.map((value, i) => (output[r][i] > 0 ? value : 0)));
  return { output, back: (gradient) => multiply(open(gradient), transposed) };
};

const rmsOf = (rows) => Math.sqrt(mean(rows.map((row) => dot(row, row) / WIDTH)));

const quantilesOf = (rows) => {
  const sorted = new Float64Array(ROWS * WIDTH);
  rows.forEach((row, r) => sorted.set(row.map(Math.abs), r * WIDTH));
  sorted.sort();
  return LEVELS.map((level) => {
    const place = level * (sorted.length - 1);
    const [below, above] = sorted.subarray(Math.floor(place));
    return below + (place % 1) * (above - below);
  });
};

/**
 * Four stacks of the same layers: no norm, Post-LN, Pre-LN, BatchNorm in the branch; without the residual, `h +` goes.
 * Each {rms, mean, gradient, quantiles} by layer 0..depth: of h, of dloss/dh (rms), and of |h|. What overflows is
 * Infinity, then NaN, as in PyTorch.
 */
export const stack = (options) => {
  const { layers, input, readout } = weights(options);
  const transposed = layers.map(transpose);
  const sum = (h, branch) => (options.residual ? h.map((row, r) => add(row, branch[r])) : branch);
  return Object.fromEntries(Object.entries(ARMS).map(([name, { before, branch, after }]) => {
    const signals = [input];
    const steps = layers.map((matrix, layer) => {
      const first = normalize(signals[layer], before);
      const inner = branchOf(first.output, matrix, transposed[layer]);
      const second = normalize(inner.output, branch);
      const last = normalize(sum(signals[layer], second.output), after);
      signals.push(last.output);
      return (gradient) => {
        const arriving = last.back(gradient);
        return sum(arriving, first.back(inner.back(second.back(arriving))));
      };
    });
    const gradients = [readout];
    for (const back of steps.reverse()) gradients.unshift(back(gradients[0]));
    return [name, {
      rms: signals.map(rmsOf),
      mean: signals.map((rows) => mean(rows.map(mean))),
      gradient: gradients.map(rmsOf),
      quantiles: signals.map(quantilesOf),
    }];
  }));
};
