"""Real models on real text for the finds: the source of Python's standard library, on every machine."""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def folder(name: str) -> Path:
    """The folder of a trained model: the first argument of the program, or below NORMKIT_REAL_MODELS."""
    return Path(sys.argv[1]) if len(sys.argv) > 1 else Path(os.environ["NORMKIT_REAL_MODELS"], name)


def causal(name: str, tokens: int = 512):
    """A causal model in float32 and the ids of the first tokens of a text."""
    logging.disable_progress_bar()
    path = folder(name)
    ids = AutoTokenizer.from_pretrained(path)(inspect.getsource(textwrap), return_tensors="pt").input_ids
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), ids[:, :tokens]


@torch.no_grad()
def logits(model, ids):
    """Logits in float32."""
    return model(ids).logits[0].float()


def perplexity(scores, ids):
    """exp of the mean loss of the next token."""
    return cross_entropy(scores[:-1], ids[0, 1:]).exp().item()


def divergence(scores, reference):
    """Mean Kullback-Leibler divergence from the reference, in nats a token."""
    pair = scores.log_softmax(-1), reference.log_softmax(-1)
    return kl_div(*pair, reduction="batchmean", log_target=True).item()
