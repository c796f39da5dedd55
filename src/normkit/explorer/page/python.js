/** The numbers of the table as a Python script that computes them again with PyTorch. */
import { grid } from "explorer/table.js";

const list = (row) =>
  `[${row.map((value) => (Number.isFinite(value) ? String(value) : `float("${value}")`)).join(", ")}]`;
const tensor = (content) => `torch.tensor(${content}, dtype=torch.float64)`;
const matrix = (rows) => tensor(`[\n${rows.map((row) => `    ${list(row)},\n`).join("")}]`);

// Twice, so that of equal entries exactly 0 is left.
const CENTRED = {
  layer: "once = x - x.mean(1, keepdim=True)\n    return once - once.mean(1, keepdim=True)",
  batch: "once = x - x.mean(0)\n    return once - once.mean(0)",
  rms: "return x",
  length: "return x",
  plane: `left = x
    for _ in range(2):
        left = left - (left @ u)[:, None] * u
    rounding = 4 * torch.finfo().eps * x.norm(dim=1, keepdim=True)
    return left.where(left.norm(dim=1, keepdim=True) > rounding, 0.0)`,
};
/** Along all-ones, the projection is a mean taken off. */
const centred = ({ mode, normal }) =>
  CENTRED[mode === "plane" && normal.every((value) => value === normal[0]) ? "layer" : mode];

/** A norm by PyTorch's own function; written out where it has none. */
const call = ({ mode, eps, place }, count) => {
  if (place === "inside" && mode === "layer") return "F.layer_norm(x, (n,), gain, bias, eps)";
  if (place === "inside" && mode === "rms") return "F.rms_norm(x, (n,), gain, eps) + bias";
  if (place === "inside" && mode === "batch" && eps > 0 && count > 1)
    return "F.batch_norm(x, None, None, gain, bias, True, 0, eps)";
  if (eps === 0 && mode === "length") return "F.normalize(x, dim=1, eps=0) * gain + bias";
  const square = `centre(x).square().${mode === "length" ? "sum" : "mean"}(${mode === "batch" ? 0 : 1}, keepdim=True)`;
  return `centre(x) / ${place === "inside" ? `(${square} + eps).sqrt()` : `(${square}.sqrt() + eps)`} * gain + bias`;
};

const points = ({ stage, selected, size }, { raw, n, norm, arms, gradient, query }) => `x = ${query ? `${size} * ` : ""}${matrix(raw)}
n, eps, stage, shown = ${n}, ${norm.eps}, ${query ? stage / 2 : stage}, []
gain = ${tensor(list(norm.gain))}
bias = ${tensor(list(norm.bias))}${norm.mode === "plane" ? `\nu = F.normalize(${tensor(list(norm.normal))}, dim=0)` : ""}


def show(centre, norm):
    """What a norm makes of x at the stage, straight from one stage to the next."""
    one = torch.ones(n)
    stages = [x, centre(x), norm(x, one, 0 * one), norm(x, gain, 0 * one), norm(x, gain, bias)]
    below, share = int(stage), stage % 1
    shown.append((1 - share) * stages[below] + share * stages[below + 1] if share else stages[below])

${(arms ? Object.values(arms).map((arm) => arm.norm) : [norm])
  .map(
    (each) => `
def centre(x):
    ${centred(each)}


def norm(x, gain, bias):
    return ${call(each, raw.length)}


show(centre, norm)
`,
  )
  .join("\n")}
mean, deviation, rms = x.mean(1), x.std(1, correction=0), x.square().mean(1).sqrt()
angle = torch.atan2(deviation, mean).rad2deg().where(rms > 0, torch.nan)
${
  query
    ? `shown.append(torch.stack([(k @ ${tensor(list(query))} / n**0.5).softmax(0) for k in (x, shown[0])], 1))
`
    : ""
}rows = torch.cat([x${query ? ` / ${size}` : ""}, torch.stack([mean, rms, deviation, x.norm(dim=1), angle], 1), *shown], 1).tolist()
${
  gradient
    ? `row = x[${selected}].clone().requires_grad_()
norm(row[None], gain, bias).backward(${tensor(list(gradient.upstream))}[None])
print("# gradient at point ${selected + 1}:", *row.grad.tolist())
`
    : ""
}`;

/** The stacks of random layers again, differentiated by PyTorch. */
const layers = ({ depth, spread, residual, seed }) => `import math


def uniform(state, mask=2**32 - 1):
    while True:  # mulberry32
        state = (state + 0x6D2B79F5) & mask
        bits = (state ^ state >> 15) * (state | 1) & mask
        bits ^= bits + ((bits ^ bits >> 7) * (bits | 61) & mask) & mask
        yield ((bits ^ bits >> 14) + 0.5) / 2**32


def normals(rows):
    values = []
    for _ in range(rows * 32):  # Box and Muller
        radius, angle = math.sqrt(-2 * math.log(next(numbers))), 2 * math.pi * next(numbers)
        values += [radius * math.cos(angle), radius * math.sin(angle)]
    return torch.tensor(values).view(rows, 64)


def run(arm):
    signals = [start.clone().requires_grad_()]
    for weight in weights:
        h = F.layer_norm(signals[-1], (64,)) if arm == "pre" else signals[-1]
        h = F.rms_norm(h, (64,), eps=1e-5) if arm == "rms" else h
        h = (h @ weight.T).relu()
        h = F.batch_norm(h, None, None, training=True) if arm == "batch" else h
        h = ${residual ? "signals[-1] + " : ""}h
        signals.append(F.layer_norm(h, (64,)) if arm == "post" else h)
        signals[-1].retain_grad()
    (signals[-1] * readout).sum().backward()
    return [[h.square().mean().sqrt().item(), h.mean().item(), h.grad.square().mean().sqrt().item()] for h in signals]


numbers = uniform(${seed})
start, readout = normals(32), normals(32)
weights = [normals(64) * ${spread} * math.sqrt(2 / 64) for _ in range(${depth})]
rows = [sum(arms, []) for arms in zip(*map(run, ["none", "post", "pre", "rms", "batch"]))]
`;

const projections = ({ site, n }, values) => `# Rows of ${n} features at ${JSON.stringify(site?.path)}.
# The page holds projections only: of each row three coordinates, along all-ones / sqrt(n) and two principal directions,
# and what its mean, rms, deviation, length and angle are. The rows are not here: nothing is normalized again.
rows = ${matrix(values)}.tolist()
`;

/** (state, computed) -> a script that prints the table: names, then a line a row, with tabs between. */
export const python = (state, computed) => {
  const { columns, lines, what } = grid(state, computed);
  return `import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
${
  what === "layer"
    ? layers(state)
    : what === "token"
      ? projections(
          computed,
          lines.map(({ values }) => values),
        )
      : points(state, computed)
}
print(*${JSON.stringify([what, ...columns])}, sep="\\t")
for label, row in zip(${JSON.stringify(lines.map(({ label }) => label))}, rows):
    print(label, *row, sep="\\t")
`;
};
