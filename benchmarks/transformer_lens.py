"""`nk.fold` beside TransformerLens' weight processing: error, time and memory on the same models.

    python benchmarks/transformer_lens.py [--quick] [--json]
    python benchmarks/transformer_lens.py benchmarks/results/transformer_lens.json

The second prints what was recorded as a table for the docs, and needs no TransformerLens; the first needs it in an
environment of its own (it pins what normkit does not):

    python -m venv lens && lens/bin/pip install torch==2.13.0 setuptools
    lens/bin/pip install transformer-lens==4.3.0 transformers==5.23.0 click rich jinja2
    lens/bin/pip install --no-deps --no-build-isolation -e .
    lens/bin/python benchmarks/transformer_lens.py

Models and weights are those of tests/tiny_models.py: gains of both signs, biases, embeddings with a mean; "square": as
many sizes equal as can be. normkit does all it may, the head untied. TransformerLens folds, centres what writes, moves
the biases of values; and once more as it comes, which also centres the unembedding.

Error: largest difference of log-probabilities to the untouched model; of a float64 model with every step of both in
float64. Time: median of folds of fresh float32 copies; TransformerLens has two, its processing, and that with what it
does first, which is to put modules of its own around the model's. Memory: the most that all of it adds to the process,
as Linux counts it. Saved: `save_pretrained` of the outcome can be loaded again, and agrees.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import dataclasses
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

# The folder of tests comes in place of this one, in which this very file would be imported for TransformerLens.
HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent / "tests"), *(path for path in sys.path if Path(path).resolve() != HERE)]

TINY = ("gpt2", "llama", "gemma2", "gpt_neox", "mixtral", "qwen2_moe", "gpt_oss")
LARGE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 32000}
LLAMA = LARGE | {"num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048, "max_position_embeddings": 1024}
GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": 3072, "vocab_size": 50257, "n_positions": 1024}
MEDIUM = {
    "gpt2, 12 x 768": ("gpt2", GPT2),
    "gpt2, 12 x 768, MLP 768 wide": ("gpt2", GPT2 | {"n_inner": 768}),
    "llama, 12 x 768": ("llama", LLAMA),
    "llama, 12 x 768, vocabulary 768": ("llama", LLAMA | {"vocab_size": 768}),
}
TOOLS = ("normkit", "TransformerLens")
SHARED = {"fold_ln": True, "center_writing_weights": True, "fold_value_biases": True, "center_unembed": False}
DEFAULTS = SHARED | {"center_unembed": True}
WRONG = 1e-3


def build(name: str, dtype):
    """A model and the tokens that it is judged on."""
    from tiny_models import WIDTH, tiny

    if name in MEDIUM:
        family, options = MEDIUM[name]
        model, inputs = tiny(family, dtype=dtype, **options)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data *= (WIDTH / model.config.hidden_size) ** 0.5
    else:
        model, inputs = tiny(name.removesuffix(", square"), square=name.endswith("square"), dtype=dtype)
    # As save_pretrained would; by it TransformerLens tells what it is given.
    model.config.architectures = [type(model).__name__]
    return model, inputs["input_ids"]


def log_probabilities(call, dtype):
    import torch

    from normkit.checkpoint.logits import TrueFloat64

    with torch.no_grad(), TrueFloat64() if dtype == torch.float64 else nullcontext():
        return call().log_softmax(-1)


def logits(model, tokens):
    """What is to be called for the logits, of a model of transformers and of TransformerLens."""
    if hasattr(model, "original_model"):
        return lambda: model(tokens, return_type="logits", prepend_bos=False)
    return lambda: model(input_ids=tokens, use_cache=False).logits


def fold(model):
    import normkit as nk
    from normkit.checkpoint.plan import ALL

    nk.fold(model, operations=ALL, untie=True)
    return model


def wrap(model):
    """TransformerLens' model around one of transformers. It wants a tokenizer, which is not asked for anything."""
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(word): word for word in range(9)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="0", eos_token="2")
    return TransformerBridge.boot_transformers(
        "tiny", hf_model=model, tokenizer=tokenizer, dtype=model.dtype, device="cpu"
    )


def process(bridge, options=SHARED):
    bridge.process_weights(**options)
    return bridge


def steps(tool: str):
    """What a tool does, one after the other."""
    return [fold] if tool == "normkit" else [wrap, process]


def times(tool: str, model, rounds: int) -> list[float]:
    """Seconds of each step."""
    taken: list[list[float]] = [[] for _ in steps(tool)]
    for _ in range(rounds):
        outcome = copy.deepcopy(model)
        for step, seconds in zip(steps(tool), taken, strict=True):
            start = time.perf_counter()
            outcome = step(outcome)
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in taken]


def resident(name: str) -> int:
    """A field of Linux's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def watched(tool: str, model):
    """What a tool makes of a model, and the most that is resident meanwhile above what was before."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    for step in steps(tool):
        model = step(model)
    return model, resident("VmHWM") - before


def saved(outcome, tokens, expected) -> str:
    """Whether `save_pretrained` writes a checkpoint that loads and agrees."""
    import normkit as nk

    with tempfile.TemporaryDirectory() as folder:
        try:
            getattr(outcome, "original_model", outcome).save_pretrained(folder)
            loaded = nk.load(folder)
            loaded.set_attn_implementation("eager")
            error = log_probabilities(logits(loaded, tokens), loaded.dtype) - expected
        except Exception as raised:
            return f"no: {type(raised).__name__}"
    return "yes" if float(error.abs().max()) < WRONG else f"yes, off by {float(error.abs().max()):.1e}"


def measured(tool: str, name: str, dtype, rounds: int):
    """All that the table holds of a tool and a model."""
    import torch

    model, tokens = build(name, dtype)
    expected = log_probabilities(logits(model, tokens), dtype)

    def error(outcome) -> float:
        return float((log_probabilities(logits(outcome, tokens), dtype) - expected).abs().max())

    row = {"tool": tool, "model": name, "dtype": str(dtype).removeprefix("torch.")}
    try:
        outcome, row["bytes"] = watched(tool, copy.deepcopy(model))
        row["error"] = error(outcome)
        if tool == "TransformerLens":
            row["error of defaults"] = error(process(wrap(copy.deepcopy(model)), DEFAULTS))
        if dtype == torch.float32:
            if name not in MEDIUM:
                row["saved"] = saved(outcome, tokens, expected)
            del outcome
            row["seconds"] = times(tool, model, rounds)
    except Exception as raised:
        row["raises"] = type(raised).__name__
    return row


def measure_here(tool: str, dtype: str, rounds: int, names: list[str]) -> list[dict]:
    """The rows of a process; the first model, which is not counted, loads what is loaded at first use."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    measured(tool, "gpt2", torch.float32, 1)
    return [measured(tool, name, getattr(torch, dtype), rounds) for name in names]


def measure(quick: bool) -> list[dict]:
    """Each tool and dtype, and each larger model, has a process of its own."""
    tiny = [name + square for name in TINY for square in ("", ", square")]
    groups = [(tiny, 2 if quick else 9)] + ([] if quick else [([name], 3) for name in MEDIUM])
    rows = []
    for (names, rounds), dtype, tool in itertools.product(groups, ("float64", "float32"), TOOLS):
        command = [sys.executable, __file__, "--child", tool, dtype, str(rounds), *names]
        ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        rows += json.loads(ran.stdout.splitlines()[-1])
    return rows


def number(value: float) -> str:
    return f"{value:.1e}" if value <= WRONG else f"**{value:.2g}**"


def error_cell(row: dict) -> str:
    if "raises" in row:
        return f"raises: {row['raises']}"
    other = row.get("error of defaults", row["error"])
    is_worse = other > max(WRONG, 2 * row["error"])
    return number(row["error"]) + (f" ({number(other)} with `center_unembed`)" if is_worse else "")


def amounts(values: list[float], unit: float) -> str:
    """What the last step takes, and with those before it."""
    shown = dict.fromkeys((values[-1], sum(values)))
    return " / ".join(f"{value / unit:.{0 if value >= 20 * unit else 1}f}" for value in shown)


def table(document: dict) -> str:
    found = {(row["tool"], row["model"], row["dtype"]): row for row in document["rows"]}
    groups = ("float64 error", "float32 error", "float32, ms", "float32, peak MB")
    lines = ["| model | " + " | ".join(f"{group}: normkit | TransformerLens" for group in groups) + " |"]
    lines.append(f"|---|{'---:|' * 8}")
    for name in dict.fromkeys(row["model"] for row in document["rows"]):
        single = [found[tool, name, "float32"] for tool in TOOLS]
        cells = [error_cell(found[tool, name, dtype]) for dtype in ("float64", "float32") for tool in TOOLS]
        cells += [amounts(row["seconds"], 1e-3) if "seconds" in row else "" for row in single]
        cells += [f"{row['bytes'] / 1e6:.0f}" if name in MEDIUM and "bytes" in row else "" for row in single]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    saved = ", ".join(f"{tool} {answers(document['rows'], tool)}" for tool in TOOLS)
    where, versions = document["machine"], document["versions"]
    lines.append(
        f"\nSaved by `save_pretrained` and loaded again: {saved}. {where['date']}, {where['cpu']}, {where['threads']} "
        f"threads, torch {where['torch']}, transformers {versions['transformers']}, TransformerLens "
        f"{versions['transformer-lens']}."
    )
    return "\n".join(lines)


def answers(rows: list[dict], tool: str) -> str:
    """What became of saving, over all models that were tried."""
    found = Counter(row["saved"] for row in rows if row["tool"] == tool and "saved" in row)
    return " and ".join(f"{answer} ({count} of {found.total()})" for answer, count in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recorded", nargs="?", type=Path, help="what --json wrote: print its table, measure nothing")
    parser.add_argument("--quick", action="store_true", help="tiny models and few rounds: does it run?")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
    if sys.argv[1:2] == ["--child"]:
        tool, dtype, rounds, *names = sys.argv[2:]
        print(json.dumps(measure_here(tool, dtype, int(rounds), names)))
        return
    options = parser.parse_args()
    if options.recorded is not None:
        print(table(json.loads(options.recorded.read_text())))
        return
    if find_spec("transformer_lens") is None:
        print("TransformerLens is not installed; the head of this file says how", file=sys.stderr)
        sys.exit(2)
    from importlib.metadata import version

    from normkit.bench.running import machine

    versions = {name: version(name) for name in ("transformers", "transformer-lens")}
    document = {"machine": dataclasses.asdict(machine()), "versions": versions, "rows": measure(options.quick)}
    print(json.dumps(document, indent=2) if options.json else table(document))


if __name__ == "__main__":
    main()
