"""labml: LayerNorm takes the variance as E[x^2] - E[x]^2, in the input's dtype.

    python census/finds/labml_layer_norm.py MPNET      the folder of all-mpnet-base-v2

The report is docs/wild/reports/labml_layer_norm.md.
"""

from __future__ import annotations

import argparse
import copy
import inspect

import labml_nn.normalization.layer_norm as theirs
import torch
from torch import nn
from torch.nn.functional import cosine_similarity, layer_norm
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import normkit as nk
from patching import fixed, versions
from real_models import folder


def rows(module):
    told = nk.identify(module.LayerNorm(64), 64).readings["conditioning"].value
    print(f"  normkit: cancels {told['cancels']}, error {told['error']:.0e} at a mean of 1024 deviations")
    torch.manual_seed(0)
    for mean in (0, 100, 1000, 10000):
        x = torch.randn(64, 512) + mean
        y, right = module.LayerNorm(512)(x).detach(), layer_norm(x.double(), (512,))
        print(
            f"  float32, mean {mean}, deviation 1: error {((y - right).norm() / right.norm()):.0e},"
            f" {y.isnan().any(-1).double().mean():.0%} of the rows are NaN"
        )


@torch.no_grad()
def mpnet(module, model, tokens, right, dtype):
    """Sentence vectors of all-mpnet-base-v2 with their norm, against float32 with torch's."""
    model = copy.deepcopy(model).to(dtype)
    for part in model.modules() if module else ():
        if isinstance(part, nn.LayerNorm):
            norm = module.LayerNorm(part.normalized_shape[0], eps=part.eps)
            norm.gain, norm.bias = part.weight, part.bias
            part.forward = norm.forward
    vectors = model(**tokens).last_hidden_state.float().mean(1)
    if right is None:
        return vectors
    name, owner = str(dtype)[6:], "labml" if module else "torch"
    worst = cosine_similarity(vectors, right).min()
    print(f"  all-mpnet-base-v2 in {name}, norm of {owner}: smallest cosine {worst:.4f}")
    return vectors


if __name__ == "__main__":
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(versions("torch", "labml-nn", "transformers"))
    tokenizer = AutoTokenizer.from_pretrained(folder("mpnet"))
    model = AutoModel.from_pretrained(folder("mpnet"), dtype=torch.float32)
    texts = [text for text in inspect.getsource(argparse).split("\n\n") if len(text) > 300][:8]
    tokens = tokenizer(texts, return_tensors="pt", padding="max_length", truncation=True, max_length=64)
    right = mpnet(None, model.eval(), tokens, None, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        mpnet(None, model, tokens, right, dtype)
    for title, module in (("as installed", theirs), ("with the fix", fixed("labml_layer_norm", theirs))):
        print(title)
        rows(module)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            mpnet(module, model, tokens, right, dtype)
