// Commands painted onto a canvas; neighbours of one style are one path.

export const FONT = '"Segoe UI", "Helvetica Neue", Arial, "Liberation Sans", sans-serif';
// From the middle of a text to its baseline, in sizes of the font.
export const DROP = 0.36;
export const RING = 5;
// Points smaller than this have no rim: it would be most of them.
export const RIMMED = 2.9;
export const RIM = 1.5;

/** Outlines of the markers on [-1, 1]: square, triangle, diamond, cross. A circle and a ring have none. */
export const OUTLINES = [
  [],
  [-0.86, -0.86, 0.86, -0.86, 0.86, 0.86, -0.86, 0.86],
  [0, -1.12, 1.04, 0.76, -1.04, 0.76],
  [0, -1.2, 1.2, 0, 0, 1.2, -1.2, 0],
  [0, -0.3, 0.7, -1, 1, -0.7, 0.3, 0, 1, 0.7, 0.7, 1, 0, 0.3, -0.7, 1, -1, 0.7, -0.3, 0, -1, -0.7, -0.7, -1],
  [],
];

/** The colour of letters: as the line they belong to, or a darker one (on a dark page a lighter one) of contrast 4.5. */
export const lettering = (name) => ({ third: "good", contrast: "error" })[name] ?? name;

export const thickness = (size) => Math.min(1.8, Math.max(1, 0.4 * size));

/** Whether two commands can be one path. Polygons cannot: where two overlap, both must tell. */
export const alike = (one, other) =>
  one.type === "line" &&
  other.type === "line" &&
  !one.dash &&
  !other.dash &&
  one.colour === other.colour &&
  one.alpha === other.alpha &&
  one.width === other.width;

/** Paints over whatever the canvas shows; ratio: device pixels for one of the page's. */
export function paint(context, commands, colours, { ratio }) {
  const known = new Map();
  const colour = (name) => known.get(name) ?? known.set(name, colours(name)).get(name);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.globalAlpha = 1;
  context.fillStyle = colour("paper");
  context.fillRect(0, 0, context.canvas.width / ratio, context.canvas.height / ratio);
  context.lineJoin = "round";
  context.save();
  // A clip that ends between two pixels makes all that is painted in it dearer.
  const pixels = (value) => Math.round(ratio * value) / ratio;
  for (let k = 0; k < commands.length; k++) {
    const command = commands[k];
    const { type, x, y, width, height } = command;
    if (type === "clip") {
      context.restore();
      context.save();
      context.beginPath();
      context.rect(pixels(x), pixels(y), pixels(x + width) - pixels(x), pixels(y + height) - pixels(y));
      context.clip();
    } else if (type === "marker") mark(context, command, colour);
    else if (type === "text") write(context, command, colour);
    else {
      context.beginPath();
      trace(context, command);
      while (k + 1 < commands.length && alike(command, commands[k + 1])) trace(context, commands[++k]);
      finish(context, command, colour);
    }
  }
  context.restore();
}

function trace(context, { at, type, closed }) {
  context.moveTo(at[0], at[1]);
  for (let i = 2; i < at.length; i += 2) context.lineTo(at[i], at[i + 1]);
  if (closed || type === "polygon") context.closePath();
}

function finish(context, { type, colour: name, alpha = 1, width = 1, dash, offset = 0 }, colour) {
  context.globalAlpha = alpha;
  if (type === "polygon") {
    context.fillStyle = colour(name);
    return context.fill();
  }
  context.strokeStyle = colour(name);
  context.lineWidth = width;
  if (dash) {
    context.setLineDash(dash);
    context.lineDashOffset = offset;
  }
  context.stroke();
  if (dash) context.setLineDash([]);
}

function mark(context, { x, y, size, marker, colour: name, alpha = 1 }, colour) {
  const outline = OUTLINES[marker];
  context.globalAlpha = alpha;
  context.beginPath();
  if (outline.length) {
    for (let i = 0; i < outline.length; i += 2) context.lineTo(x + size * outline[i], y + size * outline[i + 1]);
    context.closePath();
  } else if (marker === RING) {
    const half = thickness(size) / 2;
    context.arc(x, y, size + half, 0, 7);
    context.arc(x, y, Math.max(0, size - half), 7, 0, true);
  } else context.arc(x, y, size, 0, 7);
  if (size >= RIMMED) {
    context.strokeStyle = colour("paper");
    context.lineWidth = RIM;
    context.stroke();
  }
  context.fillStyle = colour(name);
  context.fill();
}

function write(context, { x, y, text, colour: name, anchor = "start", size = 12, bold }, colour) {
  context.globalAlpha = 1;
  context.font = `${bold ? "600 " : ""}${size}px ${FONT}`;
  context.textAlign = anchor === "middle" ? "center" : anchor;
  context.strokeStyle = colour("paper");
  context.lineWidth = 4;
  context.strokeText(text, x, y + DROP * size);
  context.fillStyle = colour(lettering(name));
  context.fillText(text, x, y + DROP * size);
}
