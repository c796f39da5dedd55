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
from real_text import causal, divergence, logits, perplexity


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


def trained(module, model, ids, reference):
    """Gemma 3 270M with their norm, everything but the stored gains in float32."""
    original = {}
    for part in model.modules():
        if type(part).__name__ == "Gemma3RMSNorm":
            norm = module.RMSNorm(len(part.weight), eps=part.eps, add_unit_offset=True)
            norm.weight.data = part.weight.data.bfloat16()
            original[part], part.forward = part.forward, norm.forward
    scores = logits(model, ids)
    moved = (scores - reference).abs().max()
    print(
        f"  Gemma 3 270M, {len(original)} norms, {ids.shape[1]} tokens: perplexity {perplexity(scores, ids):.3f},"
        f" divergence {divergence(scores, reference):.1e}, a logit moves by up to {moved:.2f}"
    )
    for part, forward in original.items():
        part.forward = forward


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(versions("torch", "litgpt", "transformers"))
    model, ids = causal("gemma3")
    reference = logits(model, ids)
    print(f"transformers: perplexity {perplexity(reference, ids):.3f}")
    for title, module in (("as installed", theirs), ("with the fix", fixed("litgpt_rms_norm", theirs))):
        print(title)
        readings(module)
        untrained(module)
        trained(module, model, ids, reference)
