"""PyTorch on the CPU: gain and bias gradients of LayerNorm are added in bfloat16.

    python census/finds/torch_layer_norm_gradients.py MPNET      the folder of all-mpnet-base-v2

The effect is that on the last two layers of all-mpnet-base-v2, for 4,096 tokens of Python's standard library.
The report is docs/wild/reports/torch_layer_norm_gradients.md.
"""

from __future__ import annotations

import argparse
import ast
import copy
import inspect
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, layer_norm, normalize
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import normkit as nk
from patching import versions


def ones():
    """The gradient of a bias is the number of rows where the output's gradient is 1."""
    for rows in (256, 257, 512, 8192):
        found = []
        for norm in (nn.LayerNorm(64, dtype=torch.bfloat16), nk.LayerNorm(64, dtype=torch.bfloat16)):
            norm(torch.randn(rows, 64).bfloat16()).sum().backward()
            found.append(norm.bias.grad[0].item())
        print(f"  {rows} rows of ones: bias gradient {found[0]:g}, nk.LayerNorm {found[1]:g}")


def buffers():
    """The kernel's sum of dY over rows, one row after another, in a buffer of either dtype."""
    dy = torch.randn(4096, 64).bfloat16()
    expected = dy.double().sum(0)
    sums = {}
    for dtype in (torch.bfloat16, torch.float32):
        buffer = torch.zeros(64, dtype=dtype)
        for row in dy:
            buffer = (buffer.float() + row.float()).to(dtype)
        sums[dtype] = error(buffer.to(torch.bfloat16), expected)
    bias = torch.zeros(64, dtype=torch.bfloat16, requires_grad=True)
    layer_norm(torch.randn(4096, 64).bfloat16(), (64,), torch.ones(64).bfloat16(), bias).backward(dy)
    print(f"  4096 random rows: bias gradient off by {error(bias.grad, expected):.1%}")
    print(
        f"  the same sum in a bfloat16 buffer {sums[torch.bfloat16]:.1%}, in a float32 buffer {sums[torch.float32]:.1%}"
    )


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def gradients(model, tokens):
    """Gradients of the last two layers, for sentences to be told apart."""
    layers = model.encoder.layer
    model.requires_grad_(False)
    layers[-2:].requires_grad_(True)
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None].to(hidden.dtype)
    meaning = normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).float()
    cross_entropy(20 * meaning @ meaning.t(), torch.arange(len(meaning)).roll(1)).backward()
    found = {name: parameter.grad.double() for name, parameter in layers[-2:].named_parameters()}
    # That of the bias of k is zero but for rounding.
    return {name: gradient for name, gradient in found.items() if not name.endswith("attn.k.bias")}


def percent(value):
    """Below 3 % the figures depend on the CPU: bfloat16 products are added in another order."""
    return f"at most {value:.0%}" if value >= 0.03 else "less than 3%"


def mpnet(folder):
    texts = [part for module in (argparse, inspect, ast) for part in inspect.getsource(module).split("\n\n")]
    texts = [text for text in texts if len(text) > 500][:32]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(texts, return_tensors="pt", padding="max_length", truncation=True, max_length=128)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    expected = gradients(model, tokens)
    print(f"  all-mpnet-base-v2, last two layers, {tokens['input_ids'].numel()} tokens, against float32:")
    narrow = model.bfloat16()
    narrow.zero_grad()
    mended = copy.deepcopy(narrow)
    nk.convert(mended)
    for title, each in (("as installed", narrow), ("with nk.LayerNorm", mended)):
        found = gradients(each, tokens)
        errors = {name: error(found[name], expected[name]) for name in expected}
        for kind in ("LayerNorm.weight", "LayerNorm.bias"):
            worst = max(value for name, value in errors.items() if name.endswith(kind))
            print(f"    {title}: gradients of {kind} off by {percent(worst)}")
        others = max(value for name, value in errors.items() if "LayerNorm" not in name)
        print(f"    {title}: gradients of matrices and their biases off by {percent(others)}")


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else Path(os.environ["NORMKIT_REAL_MODELS"], "mpnet")
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(versions("torch", "transformers"))
    ones()
    buffers()
    mpnet(folder)
