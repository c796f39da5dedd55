"""LitGPT: the RMSNorm of Gemma adds 1 in the weight's dtype, and starts at a gain of 2.

    python census/finds/litgpt_rms_norm.py GEMMA      the folder of Gemma 3 270M

The report is docs/wild/reports/litgpt_rms_norm.md.
"""

from __future__ import annotations

import litgpt.model as theirs
import torch
from litgpt import GPT, Config
from torch.nn.functional import cross_entropy

import normkit as nk
from patching import fixed, versions
from real_models import RealModel


def readings(module):
    norm = module.RMSNorm(64, add_unit_offset=True)
    gain = norm(torch.ones(1, 64)).mean().item()
    print(f"  normkit, float32: {nk.identify(norm, 64).spec}")
    print(f"  a new norm multiplies by {gain:.4f}")
    norm.reset_parameters()
    print(f"  after reset_parameters by {norm(torch.ones(1, 64)).mean().item():.4f}")


def untrained(module):
    """A small Gemma of their configurations, as `litgpt pretrain` starts it but for its size."""
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 256, "n_head": 4, "intermediate_size": 1024, "padded_vocab_size": 4096}
    config = Config.from_name("Gemma-2b", **sizes)
    original, theirs.RMSNorm = theirs.RMSNorm, module.RMSNorm
    model = GPT(config)
    theirs.RMSNorm = original
    model.apply(lambda part: torch.nn.init.normal_(part.weight, std=0.02) if hasattr(part, "in_features") else None)
    ids = torch.randint(4096, (4, 64))
    with torch.no_grad():
        scores = model(ids).flatten(0, 1)
    loss = cross_entropy(scores, torch.randint(4096, (256,))).item()
    print(f"  a small Gemma at its start: deviation of the logits {scores.std():.2f}, loss {loss:.2f} (ln 4096 = 8.32)")


def layers(module, model):
    """Their norms with the model's gains as they are stored, in bfloat16; everything else is in float32."""
    made = {}
    for norm in model.norms.values():
        made[norm] = module.RMSNorm(len(norm.weight), eps=norm.eps, add_unit_offset=True)
        made[norm].weight.data = norm.weight.data.bfloat16()
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(versions("torch", "litgpt", "transformers"))
    model = RealModel("gemma3", tokens=511, module="textwrap")
    reference = model.logits()
    print(f"transformers: perplexity {model.perplexity(reference):.3f}")
    for title, module in (("as installed", theirs), ("with the fix", fixed("litgpt_rms_norm", theirs))):
        print(title)
        readings(module)
        untrained(module)
        model.replace("Gemma 3 270M", layers(module, model), reference)
