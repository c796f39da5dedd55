"""What folding, rotating and migrating do to a model that is quantized afterwards: perplexity, or cosine of embeddings.

    python benchmarks/quantization.py FOLDER [--variant NAME ...] [--quantizer NAME ...] [--seed 0 1 2]
        [--alpha 0.25 0.5 0.75] [--json FILE]
    python benchmarks/quantization.py --table FILE...

FOLDER is a checkpoint of a causal language model, or of an encoder (mean of its last hidden states). Each variant is
made by normkit in float32, so that its weights are those of the source to 24 bits, and then quantized in torch: plain
round-to-nearest, symmetric, one scale for each group. Quantized are the linear maps of the blocks, not the embedding
and not the head; the quantizers "table" round the embedding alone, and with it the head that shares its table.
Activations are rounded where they enter a map. Quantizers of torchao round in its own code, where that is installed.
Rotations are drawn with each seed, `migrate` is made with each alpha.

The text is Python's standard library: half of the windows are source, half are the prose of its reference manual
(`pydoc_data.topics`). Static ranges are measured on other windows of both. The standard error is that of the mean over
windows of the difference from the same quantizer on the source as it is; with several seeds the difference is their
mean, and behind it stands the standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from normkit.checkpoint import fold
from normkit.checkpoint.activations import measure_activations
from normkit.errors import NormkitError
from normkit.text import first_line

# What normkit makes of the source; "as it is" is the source.
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "gain": {"operations": ["gain", "final"], "untie": True},
    "exponent": {"operations": ["exponent"]},
    "rotate": {"operations": ["rotate"], "untie": True},
    # With the statistics of the windows for calibration.
    "migrate": {"operations": ["migrate"]},
}
ALPHA = 0.5
"""Of `migrate`, unless others are asked for, whose columns are named by them."""
CALIBRATION = 4
"""Windows for static ranges and for the statistics of `migrate`."""


@dataclass(frozen=True)
class Quantizer:
    """Round to nearest: bits of weights and of activations, and what shares a scale."""

    weights: int
    group: int = 0
    """Weights of one output that share a scale; 0 for all of them."""
    activations: int = 0
    """0 if they are not rounded."""
    granularity: str = "token"
    """"token" and "tensor": scales of each batch; "static": one scale, measured before."""
    is_torchao: bool = False
    """Weights are rounded by torchao's own code."""
    is_table: bool = False
    """The embedding is rounded in place of the maps."""


QUANTIZERS = {
    "W8 channel": Quantizer(8),
    "W4 channel": Quantizer(4),
    "W4 group 128": Quantizer(4, 128),
    "W4 group 32": Quantizer(4, 32),
    "W8A8 tensor, static": Quantizer(8, activations=8, granularity="static"),
    "W8A8 tensor": Quantizer(8, activations=8, granularity="tensor"),
    "W8A8 token": Quantizer(8, activations=8),
    "W4A4 token": Quantizer(4, activations=4),
    "table W8 row": Quantizer(8, is_table=True),
    "table W4 row": Quantizer(4, is_table=True),
    "table W4 group 32": Quantizer(4, 32, is_table=True),
    "torchao W8 channel": Quantizer(8, is_torchao=True),
    "torchao W4 channel": Quantizer(4, is_torchao=True),
    "torchao W4 group 32": Quantizer(4, 32, is_torchao=True),
}


def nearest(values: Tensor, bits: int, largest: Tensor) -> Tensor:
    """Symmetric round-to-nearest: the largest |value| of a scale is the largest integer."""
    top = 2 ** (bits - 1) - 1
    scale = largest.clamp_min(torch.finfo(values.dtype).tiny) / top
    return (values / scale).round_().clamp_(-top, top).mul_(scale)


def quantized_weight(weight: Tensor, bits: int, group: int) -> Tensor:
    """A matrix of (outputs, inputs); the last group of a row may be smaller."""
    parts = weight.split(group or weight.shape[1], dim=1)
    return torch.cat([nearest(part, bits, part.abs().amax(1, keepdim=True)) for part in parts], dim=1)


def torchao_weight(weight: Tensor, bits: int, group: int) -> Tensor:
    """A matrix of (outputs, inputs) as torchao's weight-only quantization makes it."""
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerAxis, PerGroup, quantize_

    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    # Its Int4WeightOnlyConfig runs on no CPU.
    shared = PerGroup(group) if group else PerAxis(0)
    config = Int8WeightOnlyConfig() if bits == 8 else IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=shared)
    quantize_(nn.Sequential(linear), config)
    return linear.weight.dequantize().to(weight.dtype)


class Quantized:
    """The linear maps of a model's blocks, quantized in one way after another."""

    def __init__(self, model: nn.Module) -> None:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        self.maps = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head and "pooler" not in name
        }
        self._table = model.get_input_embeddings()
        modules = {**self.maps, "": self._table}
        self._weights = {name: module.weight.detach().clone() for name, module in modules.items()}
        self._largest: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    def calibrate(self, run: Callable[[nn.Module, Tensor], object], model: nn.Module, ids: Tensor) -> None:
        """Note the largest |input| of each map on some windows."""

        def note(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                largest = inputs[0].abs().max()
                self._largest[name] = torch.maximum(self._largest.get(name, largest), largest)

            return hook

        hooks = [module.register_forward_pre_hook(note(name)) for name, module in self.maps.items()]
        run(model, ids)
        for hook in hooks:
            hook.remove()

    def apply(self, quantizer: Quantizer | None) -> float:
        """Quantize in this way, or not at all; the root mean square error of what is rounded, relative."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        lost = total = 0.0
        for name, module in {**self.maps, "": self._table}.items():
            weight = self._weights[name]
            # A head that shares the table shares the parameter.
            module.weight.data = weight
            if quantizer is None or quantizer.is_table != (module is self._table):
                continue
            rounded = torchao_weight if quantizer.is_torchao else quantized_weight
            module.weight.data = made = rounded(weight, quantizer.weights, quantizer.group)
            lost, total = lost + float((made - weight).square().sum()), total + float(weight.square().sum())
            if quantizer.activations:
                self._hooks.append(module.register_forward_pre_hook(self._rounded(name, quantizer)))
        return math.sqrt(lost / total) if total else 0.0

    def _rounded(self, name: str, quantizer: Quantizer) -> Callable[..., tuple[Tensor, ...]]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            values = inputs[0]
            if quantizer.granularity == "static":
                largest = self._largest[name]
            elif quantizer.granularity == "tensor":
                largest = values.abs().max()
            else:
                largest = values.abs().amax(-1, keepdim=True)
            return (nearest(values, quantizer.activations, largest), *inputs[1:])

        return hook


def windows(tokenizer: Any, count: int, length: int) -> tuple[Tensor, Tensor]:
    """(evaluation, calibration) windows of tokens: source code and prose in turn."""
    import argparse as first
    import difflib as second
    import pydoc_data.topics

    prose = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 2000]
    texts = (
        (Path(first.__file__).read_text(), "".join(prose[::2])),
        (Path(second.__file__).read_text(), "".join(prose[1::2])),
    )
    found = []
    for pair, many in zip(texts, (count, CALIBRATION), strict=True):
        rows = []
        for text in pair:
            # A token has six characters at most, on average.
            tokens = tokenizer(text[: 12 * many * length], add_special_tokens=False)["input_ids"]
            step = (len(tokens) - length) // max(1, many // 2)
            rows += [tokens[step * row : step * row + length] for row in range(many // 2)]
        ids = torch.tensor(rows)
        start = tokenizer.bos_token_id
        found.append(ids if start is None else torch.cat([torch.full((len(ids), 1), start), ids[:, :-1]], 1))
    return found[0], found[1]


@torch.no_grad()
def losses(model: nn.Module, ids: Tensor) -> list[float]:
    """Mean negative log-likelihood of the tokens of each window, in nats."""
    found = []
    for row in ids:
        logits = model(row[None]).logits[0, :-1]
        found.append(float(nn.functional.cross_entropy(logits, row[1:])))
    return found


@torch.no_grad()
def embeddings(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean of the last hidden states of each window, of length 1."""
    found = torch.cat([model(row[None]).last_hidden_state.mean(1) for row in ids])
    return nn.functional.normalize(found, dim=1)


def measure(
    folder: Path,
    variants: list[str],
    quantizers: list[str],
    seeds: list[int],
    alphas: list[float],
    count: int,
    length: int,
) -> dict[str, Any]:
    """Every quantizer on every variant of a checkpoint."""
    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    is_causal = any("CausalLM" in name for name in config.architectures or ())
    kind = AutoModelForCausalLM if is_causal else AutoModel
    evaluated, calibrating = windows(tokenizer, count, length)
    rows: list[dict[str, Any]] = []
    reference = torch.empty(0)
    if not is_causal:
        reference = embeddings(kind.from_pretrained(folder, dtype=torch.float32).eval(), evaluated)
    drawn = {"rotate": [{"seed": seed} for seed in seeds], "migrate": [{"alpha": alpha} for alpha in alphas]}
    for variant, own in ((each, own) for each in variants for own in drawn.get(each, [{}])):
        with tempfile.TemporaryDirectory() as place:
            made, refused, options = folder, list[str](), VARIANTS[variant] | own
            try:
                if "migrate" in options.get("operations", ()):
                    source = kind.from_pretrained(folder, dtype=torch.float32).eval()
                    measured = measure_activations(source, [{"input_ids": row[None]} for row in calibrating])
                    options["scales"] = {f"{name}.max": value for name, value in measured.largest.items()}
                if options:
                    made = Path(place) / "made"
                    certificate = fold(folder, made, dtype="float32", **options)
                    refused = [f"{each['place']}: {each['reason']}" for each in certificate.plan["refusals"][:2]]
            except NormkitError as error:
                rows.append({"variant": variant, "refused": first_line(str(error))})
                print(f"{folder.name:10}{variant:12}{error}", file=sys.stderr)
                continue
            model = kind.from_pretrained(made, dtype=torch.float32).eval()
        maps = Quantized(model)
        maps.calibrate(losses if is_causal else embeddings, model, calibrating)
        for name in ("none", *quantizers):
            begun = time.perf_counter()
            error = maps.apply(QUANTIZERS.get(name))
            if is_causal:
                found = losses(model, evaluated)
            else:
                vectors = embeddings(model, evaluated)
                found = [1.0 - float(each) for each in (vectors * reference).sum(1)]
            row = {"variant": variant, "quantizer": name, "weights": error, "windows": found, "refused": refused}
            rows.append(row | own)
            spent = time.perf_counter() - begun
            told = f"{folder.name:10}{_column(rows[-1]):20}{name:22}"
            print(f"{told}{statistics.mean(found):10.5f}{spent:7.0f} s", file=sys.stderr)
    return {
        "model": folder.name,
        "measure": "nats a token" if is_causal else "1 - cosine",
        "torch": torch.__version__,
        "shape": [len(evaluated), length],
        "rows": rows,
    }


def _column(row: dict[str, Any]) -> str:
    """The heading of the column that a row belongs to."""
    alpha = row.get("alpha", ALPHA)
    return str(row["variant"]) if alpha == ALPHA else f"{row['variant']}, alpha {alpha:g}"


def table(document: dict[str, Any]) -> str:
    """One row for each quantizer, one column for each variant and alpha, in Markdown."""
    rows = [row for row in document["rows"] if "windows" in row]
    is_causal = document["measure"] == "nats a token"
    found: dict[tuple[str, str], list[list[float]]] = {}
    for row in rows:
        found.setdefault((_column(row), row["quantizer"]), []).append(row["windows"])
    order = {_column(row): ([*VARIANTS].index(row["variant"]), row.get("alpha", ALPHA)) for row in rows}
    variants = sorted(order, key=order.__getitem__)
    lines = [f"| {document['model']} | " + " | ".join(variants) + " |", "|---" * (len(variants) + 1) + "|"]
    for quantizer in dict.fromkeys(row["quantizer"] for row in rows):
        cells = []
        for variant in variants:
            if (variant, quantizer) not in found:
                cells.append("")
                continue
            seeds, own = found[variant, quantizer], found["as it is", quantizer][0]
            values = [statistics.mean(window) for window in zip(*seeds, strict=True)]
            mean = statistics.mean(values)
            spread = [value - other for value, other in zip(values, own, strict=True)]
            error = statistics.stdev(spread) / math.sqrt(len(spread))
            apart = statistics.stdev(map(statistics.mean, seeds)) if len(seeds) > 1 else 0.0
            drawn = f"; {len(seeds)} seeds ± {apart:.3f}" if apart else ""
            if variant == "as it is":
                cells.append(f"{math.exp(mean):.2f}" if is_causal else f"{mean:.2g}")
            else:
                shift = statistics.mean(spread)
                cell = (
                    f"{math.exp(mean):.2f} ({shift:+.3f} ± {error:.3f}{drawn})"
                    if is_causal
                    else f"{mean:.2g} ± {error:.1g}{drawn}"
                )
                cells.append(f"**{cell}**" if abs(shift) > 3 * math.hypot(error, apart) > 0 else cell)
        lines.append(f"| {quantizer} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    own = [name for name, quantizer in QUANTIZERS.items() if not (quantizer.is_torchao or quantizer.is_table)]
    parser.add_argument("--quantizer", nargs="+", choices=QUANTIZERS, default=own)
    parser.add_argument("--seed", nargs="+", type=int, default=[0], help="of rotations")
    parser.add_argument("--alpha", nargs="+", type=float, default=[ALPHA], help="of migrate")
    parser.add_argument("--windows", type=int, default=16, help="how many are evaluated; half are code, half prose")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--json", type=Path, help="write all numbers")
    parser.add_argument("--table", type=Path, nargs="+", help="print what --json wrote; rows of the same model join")
    options = parser.parse_args()
    if options.table:
        joined: dict[str, dict[str, Any]] = {}
        for path in options.table:
            document = json.loads(path.read_text())
            joined.setdefault(document["model"], {**document, "rows": []})["rows"] += document["rows"]
        print("\n\n".join(table(document) for document in joined.values()))
        return
    asked = (options.variant, options.quantizer, options.seed, options.alpha)
    document = measure(options.folder, *asked, options.windows, options.length)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if "as it is" in options.variant:
        print(table(document))


if __name__ == "__main__":
    main()
