"""A trained model and a text for the programs beside this: what a formula that is put into its norms does to it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def folder(name: str) -> Path:
    """The folder of a trained model: the first argument of the program, or below NORMKIT_REAL_MODELS."""
    return Path(sys.argv[1]) if len(sys.argv) > 1 else Path(os.environ["NORMKIT_REAL_MODELS"], name)


def text(module: str) -> str:
    """The source of a module of Python's standard library."""
    return Path(__import__(module).__file__).read_text(encoding="utf-8")


class RealModel:
    """A trained language model of transformers in float32, and the first tokens of a module's source."""

    def __init__(self, name: str, tokens: int = 256, module: str = "argparse") -> None:
        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32).eval()
        ids = AutoTokenizer.from_pretrained(folder(name))(text(module))["input_ids"]
        self.ids = torch.tensor([ids[: tokens + 1]])
        self.norms = {path: each for path, each in self.model.named_modules() if type(each).__name__.endswith("Norm")}

    def logits(self, formula=None, only: str = "") -> torch.Tensor:
        """Logits, with the norms whose path has `only` in it computing formula(norm, x)."""
        replaced = [norm for path, norm in self.norms.items() if formula is not None and only in path]
        for norm in replaced:
            norm.forward = lambda x, norm=norm: formula(norm, x)
        with torch.no_grad():
            logits = self.model(self.ids[:, :-1]).logits[0]
        for norm in replaced:
            del norm.forward
        return logits

    def smallest_rows(self, only: str = "") -> dict[str, float]:
        """Norm -> the smallest mean square of a row that enters it, for norms whose path has `only` in it."""
        smallest = {}

        def note(path):
            return lambda norm, x: smallest.update({path: x[0].square().mean(-1).min().item()})  # noqa: ARG005

        hooks = [norm.register_forward_pre_hook(note(path)) for path, norm in self.norms.items() if only in path]
        self.logits()
        for hook in hooks:
            hook.remove()
        return smallest

    def perplexity(self, logits: torch.Tensor) -> float:
        """Perplexity of the text."""
        return nn.functional.cross_entropy(logits, self.ids[0, 1:]).exp().item()

    def compare(self, title: str, formula, only: str = "", against: torch.Tensor | None = None) -> torch.Tensor:
        """Prints what a formula does: perplexity, and how far the logits are from others."""
        logits = self.logits(formula, only)
        off = ""
        if against is not None:
            change = logits - against
            off = f", logits off by at most {change.abs().max():.3g} (rms {change.square().mean().sqrt():.2g})"
        print(f"  {title}: perplexity {self.perplexity(logits):.4f}{off}")
        return logits

    def replace(self, title: str, layers: dict[nn.Module, nn.Module], against: torch.Tensor) -> None:
        """Prints what other layers do in place of the norms."""
        logits = self.logits(lambda norm, x: layers[norm](x))
        pair = logits.log_softmax(-1), against.log_softmax(-1)
        divergence = nn.functional.kl_div(*pair, reduction="batchmean", log_target=True)
        print(
            f"  {title}, {len(layers)} norms, {self.ids.shape[1]} tokens: perplexity {self.perplexity(logits):.3f},"
            f" divergence {divergence:.1e}, a logit moves by up to {(logits - against).abs().max():.2f}"
        )
