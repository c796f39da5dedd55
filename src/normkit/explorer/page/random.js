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

/** Standard normal numbers, an even count of them, by Box and Muller; as a Float64Array. */
export const normals = (count, next) => {
  const values = new Float64Array(count);
  for (let i = 0; i < count; i += 2) {
    const radius = Math.sqrt(-2 * Math.log(next()));
    const angle = 2 * Math.PI * next();
    values[i] = radius * Math.cos(angle);
    values[i + 1] = radius * Math.sin(angle);
  }
  return values;
};
