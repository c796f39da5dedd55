/** What a query makes of keys by their dot products: scores, softmax, its entropy, and which keys any query could select. */
import { add, cross, dot, minus, norm as length, scale, unit } from "explorer/linear.js";

// Of unit vectors, products smaller than this are rounding.
const ROUNDING = 1e-9;

/**
 * Whether a q exists with q . d > 0 for every given d, in three dimensions: whether their open half-spaces meet. They meet
 * in a cone whose edges lie orthogonal to two of the d (in a plane: to one, in a line: along one), so the sum of all such
 * directions that no d forbids lies inside it, if there is an inside.
 */
export const separable = (given) => {
  const ds = given.map(unit);
  if (ds.some((d) => length(d) < 0.5)) return false;
  const edges = ds.flatMap((d, i) => [
    d,
    ...ds.slice(0, i).flatMap((other) => {
      const normal = cross(d, other);
      if (length(normal) < ROUNDING) return [];
      return [normal, cross(d, normal), cross(other, normal)].flatMap((edge) => [unit(edge), scale(unit(edge), -1)]);
    }),
  ]);
  const allowed = edges.filter((edge) => ds.every((d) => dot(edge, d) > -ROUNDING));
  const inside = unit(allowed.reduce(add, [0, 0, 0]));
  return ds.every((d) => dot(inside, d) > ROUNDING);
};

/** For each key whether some query scores it above all others: whether it is a corner of the keys' convex hull. */
export const selectable = (keys) =>
  keys.map((key, i) => separable(keys.filter((_, j) => j !== i).map((other) => minus(key, other))));

/** The edges of the hull, as pairs of keys: two corners that some query scores alike, and above all others. */
export const hull = (keys) =>
  keys.flatMap((key, i) =>
    keys.slice(0, i).flatMap((other) => {
      const along = unit(minus(key, other));
      const across = keys
        .filter((each) => each !== key && each !== other)
        .map((each) => minus(key, each))
        .map((d) => minus(d, scale(along, dot(along, d))));
      return length(along) && separable(across) ? [[other, key]] : [];
    }),
  );

/** Attention of one query over keys of n numbers: scores q . k / sqrt(n), weights softmax(scores), entropy in nats, and
 * the share of the weight that each group gets, which is what attention gives where a key's value is its group. */
export const attend = (keys, query, groups) => {
  const scores = keys.map((key) => dot(query, key) / Math.sqrt(query.length));
  const most = Math.max(...scores);
  const powers = scores.map((score) => Math.exp(score - most));
  const total = powers.reduce((sum, value) => sum + value, 0);
  const weights = powers.map((value) => value / total);
  const entropy = -weights.reduce((sum, value) => sum + (value > 0 ? value * Math.log(value) : 0), 0);
  const shares = [0, 1].map((group) => weights.reduce((sum, value, i) => sum + (groups[i] === group ? value : 0), 0));
  return { scores, weights, entropy, shares };
};
