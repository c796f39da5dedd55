"""mlx-lm: the rotary base of a configuration that transformers 5 wrote is lost.

    NORMKIT_REAL_MODELS=FOLDER python census/finds/mlx_lm_rope_theta.py

transformers 5 writes `rope_theta` and the scaling below `rope_parameters`. Most models of mlx-lm read them at the top
of config.json. The report is docs/wild/reports/mlx_lm_rope_theta.md.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil

import mlx.core as mx
import mlx_lm.models
from mlx_lm.models import base, llama
from mlx_lm.utils import load_model, load_tokenizer
from transformers import CONFIG_MAPPING

from patching import fixed, versions
from real_models import folder, text

BASE, TOKENS = 123456.0, 256


def readers():
    """(model file of mlx-lm, its arguments, the configuration that transformers 5 writes, with a base of 123456)."""
    for found in pkgutil.iter_modules(mlx_lm.models.__path__):
        # mlx_lm.models.olmo leaves Python where another package is missing.
        if found.name not in CONFIG_MAPPING or found.name == "olmo":
            continue
        config = CONFIG_MAPPING[found.name]()
        if "rope_theta" not in (getattr(config, "rope_parameters", None) or {}):
            continue
        config.rope_parameters["rope_theta"] = BASE
        arguments = importlib.import_module(f"mlx_lm.models.{found.name}").ModelArgs
        if "rope_theta" in inspect.signature(arguments).parameters:
            yield found.name, arguments, json.loads(config.to_json_string(use_diff=False))


def count(from_dict):
    seen = {"reads it": [], "takes its own default": [], "refuses to load": []}
    for name, arguments, config in readers():
        try:
            given = from_dict(arguments, config).rope_theta
        except (TypeError, KeyError):
            seen["refuses to load"].append(name)
        else:
            seen["reads it" if given == BASE else "takes its own default"].append(name)
    for words, names in seen.items():
        print(f"  {words}: {len(names)} model files")
    return seen["takes its own default"]


def llama3(from_dict):
    rope = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = json.loads(CONFIG_MAPPING["llama"](rope_parameters=rope).to_json_string(use_diff=False))
    arguments = from_dict(llama.ModelArgs, config)
    scaling = (arguments.rope_scaling or {}).get("rope_type")
    print(f"  Llama 3.1, base 500000 and scaling llama3: base {arguments.rope_theta:g}, scaling {scaling}")


def perplexity(path, arguments=None):
    """Of SmolLM2 in float32 as mlx-lm loads it, and the base of its first layer."""

    def classes(config):
        module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
        return module.Model, arguments or module.ModelArgs

    model, _ = load_model(path, lazy=True, get_model_classes=classes)
    model.set_dtype(mx.float32)
    ids = mx.array([load_tokenizer(path).encode(text("argparse"))[: TOKENS + 1]])
    logits = model(ids[:, :-1])[0]
    taken = mx.take_along_axis(logits, ids[0, 1:, None], -1)[:, 0]
    loss = mx.logsumexp(logits, -1) - taken
    parts = [mx.exp(part.mean()).item() for part in (loss, loss[:64], loss[-64:])]
    print(f"  SmolLM2-135M: base {model.args.rope_theta:g}, perplexity of {TOKENS} tokens {parts[0]:.3f}", end="")
    print(f" (first 64: {parts[1]:.3f}, last 64: {parts[2]:.3f})")


def lifted(arguments, from_dict):
    return type(arguments.__name__, (arguments,), {"from_dict": classmethod(from_dict)})


if __name__ == "__main__":
    smollm2 = folder("smollm2")
    written = json.loads((smollm2 / "config.json").read_text())
    print(versions("mlx", "mlx-lm", "transformers"))
    print(f"SmolLM2's config.json, by transformers {written['transformers_version']}: {written['rope_parameters']}")
    print("as installed")
    silent = count(base.BaseModelArgs.from_dict.__func__)
    llama3(base.BaseModelArgs.from_dict.__func__)
    print(f"  with its own default: {', '.join(silent)}")
    perplexity(smollm2)
    print("with the fix")
    from_dict = fixed("mlx_lm_rope_theta", base).BaseModelArgs.from_dict.__func__
    count(from_dict)
    llama3(from_dict)
    perplexity(smollm2, lifted(llama.ModelArgs, from_dict))
