"""Which parts of a model make one logit: exact attribution through the final norm.

A logit is a row of the unembedding times N(x_1 + ... + x_k), where the x_j are what the embeddings and blocks added to
the residual stream. With the norm's scale kept as it is for the whole sum ("frozen"), the parts' shares add up to the
logit exactly. With each part normalized by itself ("recomputed") they do not: that answers another question.

The parts have the names of TransformerLens' cache. Beside each stands its module's path, nnsight's name for it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import normkit as nk
from normkit import demo, geometry

PROMPT = "def forward(self, x):\n    retur"

folder = demo.directory("layernorm")
model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")["input_ids"]

paths = {"hook_embed": "transformer.wte", "hook_pos_embed": "transformer.wpe"}
for i in range(model.config.n_layer):
    paths[f"blocks.{i}.hook_attn_out"] = f"transformer.h.{i}.attn"
    paths[f"blocks.{i}.hook_mlp_out"] = f"transformer.h.{i}.mlp"
parts: dict[str, Tensor] = {}


def keep(name: str, output: Tensor | tuple[Tensor, ...]) -> None:
    """Keep what a part adds at the last position."""
    parts[name] = (output[0] if isinstance(output, tuple) else output)[0, -1]


for name, path in paths.items():
    model.get_submodule(path).register_forward_hook(lambda *call, name=name: keep(name, call[-1]))
with torch.no_grad():
    logits = model(ids).logits[0, -1]

norm, token = model.transformer.ln_f, int(logits.argmax())
spec = nk.identify(norm, model.config.n_embd).spec
stacked = torch.stack([parts[name] for name in paths])
found = geometry.contributions(stacked, spec, norm.weight.detach(), norm.bias.detach())
reader = model.lm_head.weight[token].detach()
frozen, recomputed, bias = found.frozen @ reader, found.recomputed @ reader, found.bias @ reader

print(f"logit of the next byte {chr(token)!r} after {PROMPT!r}\n")
print(f"{'part':24}{'module':20}{'frozen':>10}{'recomputed':>12}")
for (name, path), share, alone in zip(paths.items(), frozen, recomputed, strict=True):
    print(f"{name:24}{path:20}{share:10.4f}{alone:12.4f}")
print(f"{'bias':44}{bias:10.4f}{bias:12.4f}")
print(f"{'sum':44}{frozen.sum() + bias:10.4f}{recomputed.sum() + bias:12.4f}")
print(f"{'logit':44}{logits[token]:10.4f}\n{'residual':44}{frozen.sum() + bias - logits[token]:10.1e}")
