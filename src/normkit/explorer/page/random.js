/** Numbers that look random, the same for the same seed. */

/** Draws uniform numbers between 0 and 1, by mulberry32. */
export const uniform = (seed) => {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let bits = Math.imul(state ^ (state >>> 15), state | 1);
    bits ^= bits + Math.imul(bits ^ (bits >>> 7), bits | 61);
    return (((bits ^ (bits >>> 14)) >>> 0) + 0.5) / 2 ** 32;
  };
};

/** Standard normal numbers, an even count of them, by Box and Muller. */
export const normals = (count, next) => {
  const values = [];
  while (values.length < count) {
    const radius = Math.sqrt(-2 * Math.log(next()));
    const angle = 2 * Math.PI * next();
    values.push(radius * Math.cos(angle), radius * Math.sin(angle));
  }
  return values;
};
