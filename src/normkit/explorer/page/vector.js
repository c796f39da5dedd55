// The same commands as an SVG file: equal bytes for equal commands.
import { DROP, FONT, OUTLINES, RIM, RIMMED, RING, alike, lettering, thickness } from "explorer/canvas.js";

/** A picture of that size {width, height} as the text of a file. */
export function svg(commands, { width, height }, colours, { title, description }) {
  const colour = (name) => escaped(colours(name));
  const parts = [];
  let clips = 0;
  for (let k = 0; k < commands.length; k++) {
    const command = commands[k];
    const { type, ...box } = command;
    if (type === "clip") {
      if (clips++) parts.push("</g>");
      parts.push(`<clipPath id="box-${clips}"><rect${numbers(box)}/></clipPath>`);
      parts.push(`<g clip-path="url(#box-${clips})">`);
    } else if (type === "marker") parts.push(marked(command, colour));
    else if (type === "text") parts.push(written(command, colour));
    else {
      let path = traced(command);
      while (k + 1 < commands.length && alike(command, commands[k + 1])) path += traced(commands[++k]);
      parts.push(`<path d="${path}"${(type === "line" ? stroked : filled)(command, colour)}/>`);
    }
  }
  return [
    `<svg xmlns="http://www.w3.org/2000/svg"${numbers({ width, height })} ` +
      `viewBox="0 0 ${short(width)} ${short(height)}" role="img" ` +
      `font-family="${escaped(FONT)}" stroke-linejoin="round" fill="none">`,
    `<title>${escaped(title)}</title>`,
    `<desc>${escaped(description)}</desc>`,
    `<rect width="100%" height="100%" fill="${colour("paper")}"/>`,
    ...parts,
    clips ? "</g></svg>\n" : "</svg>\n",
  ].join("\n");
}

// Two decimals at most, and never -0.
const short = (value) => Math.round(value * 100) / 100 || 0;

// Text that cannot be anything but text; what XML does not allow becomes U+FFFD.
const escaped = (text) =>
  text
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]|\p{Surrogate}/gu, "\ufffd")
    .replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);

const numbers = (given) =>
  Object.entries(given)
    .map(([name, value]) => ` ${name}="${short(value)}"`)
    .join("");

const faint = (name, alpha) => (alpha < 1 ? ` ${name}="${short(alpha)}"` : "");

const traced = ({ at, type = "line", closed = false }) =>
  `M${at.map(short).join(" ")}${closed || type === "polygon" ? "z" : ""}`;

const filled = ({ colour: name, alpha = 1 }, colour) => ` fill="${colour(name)}"${faint("fill-opacity", alpha)}`;

const stroked = ({ colour: name, alpha = 1, width = 1, dash = null, offset = 0 }, colour) =>
  ` stroke="${colour(name)}" stroke-width="${short(width)}"${faint("stroke-opacity", alpha)}` +
  (dash ? ` stroke-dasharray="${dash.map(short).join(" ")}" stroke-dashoffset="${short(offset)}"` : "");

function marked({ x, y, size, marker, colour: name, alpha }, colour) {
  const at = OUTLINES[marker].map((value, i) => size * value + (i % 2 ? y : x));
  const path = `<path d="${traced({ at, closed: true })}"`;
  const form = at.length ? path : `<circle${numbers({ cx: x, cy: y, r: size })}`;
  const ring = marker === RING ? thickness(size) : 0;
  const rim = size >= RIMMED && stroked({ colour: "paper", alpha, width: ring + RIM }, colour);
  const line = stroked({ colour: name, alpha, width: ring }, colour);
  if (ring) return `${rim ? `${form}${rim}/>` : ""}${form}${line}/>`;
  return `${form}${filled({ colour: name, alpha }, colour)}${rim ? `${rim} paint-order="stroke"` : ""}/>`;
}

function written({ x, y, text, colour: name, anchor = "start", size = 12, bold }, colour) {
  const place = numbers({ x, y: y + DROP * size, "font-size": size });
  const style = `${place} text-anchor="${anchor}"${bold ? ' font-weight="600"' : ""}`;
  const halo = `stroke="${colour("paper")}" stroke-width="4" paint-order="stroke"`;
  return `<text${style} fill="${colour(lettering(name))}" ${halo}>${escaped(text)}</text>`;
}
