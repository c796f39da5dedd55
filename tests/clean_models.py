"""Clean models, more than a hundred architectures, in which there is nothing to find."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import configurations
from altered_norms import right
from injection import inspected
from normkit.inspection.result import Inspection
from planting import formula, norms
from subjects import DECODERS, OTHERS, Subject, moved, subject, tokens

# What a stock class of transformers draws for its weights is made for widths near 1000.
_VARIANTS: dict[str, dict[str, Any]] = {
    "grouped queries": {"num_key_value_heads": 2},
    "one key head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "deep": {"layers": 12},
    "wide": {"hidden_size": 256, "intermediate_size": 512},
    "narrow": {"hidden_size": 32, "intermediate_size": 64},
    "stock deviation": {"initializer_range": 0.02, "trained": False},
}
_VARIED = ("Llama", "Qwen3", "Gemma3Text", "Olmo2", "Mixtral")


@dataclass(frozen=True, kw_only=True)
class Clean:
    """A clean model, not built yet.

    Attributes:
        group: What kind it is.
        name: Which.
        build: Makes it.
    """

    group: str
    name: str
    build: Callable[[], Subject]

    def inspected(self) -> Inspection:
        """Its inspection."""
        return inspected(self.build())


def clean_models() -> Iterator[Clean]:
    """All of them, in a fixed order."""
    yield from own_models()
    for family in configurations.families():
        yield Clean(group="families of transformers", name=family.name, build=partial(_family, family))


def own_models() -> Iterator[Clean]:
    """Those that are cheap: a further family of transformers has a class of its own to load."""
    for family in (*DECODERS, *OTHERS):
        yield Clean(group="as trained", name=family, build=partial(subject, family))
        if not family.startswith("Shipped"):
            yield Clean(group="fresh", name=family, build=partial(subject, family, trained=False))
        yield Clean(group="bfloat16", name=family, build=partial(subject, family, dtype=torch.bfloat16))
    for family in _VARIED:
        for name, options in _VARIANTS.items():
            yield Clean(group="variants", name=f"{family}, {name}", build=partial(subject, family, **options))
    for family in (*DECODERS, *OTHERS):
        # The first two have no norm with a parameter, the third none of a class that is known by its name.
        if family not in ("Olmo", "NanoChat", "StudyOffset"):
            yield Clean(group="one norm written anew", name=family, build=partial(_rewritten, family))
    for kind in ("encoder, pre", "encoder, post", "encoder, pre, final norm", "both, pre", "both, post"):
        yield Clean(group="torch.nn.Transformer", name=kind, build=partial(_torch, kind))


def _rewritten(family: str) -> Subject:
    """A model with one norm that is another class and computes the same."""
    clean = subject(family)
    formula(right, norms)(clean.model, random.Random(family))
    return clean


def _torch(kind: str) -> Subject:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 64, "nhead": 4, "dim_feedforward": 128, "dropout": 0.0, "batch_first": True}
    is_pre, generator = "pre" in kind, torch.Generator().manual_seed(0)
    rows = [torch.randn(2, 12, 64, generator=generator) for _ in range(2)]
    if kind.startswith("encoder"):
        norm = nn.LayerNorm(64) if "final" in kind else None
        layer = nn.TransformerEncoderLayer(**sizes, norm_first=is_pre)
        model: nn.Module = nn.TransformerEncoder(layer, 3, norm, enable_nested_tensor=False)
        return Subject(family=kind, model=moved(model.eval()), batch={"src": rows[0]})
    model = nn.Transformer(**sizes, num_encoder_layers=2, num_decoder_layers=2, norm_first=is_pre)
    return Subject(family=kind, model=moved(model.eval()), batch={"src": rows[0], "tgt": rows[1]})


def _family(family: configurations.Family) -> Subject:
    """A family as its class makes it, with its sizes cut down."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, family.class_name)(configurations.tiny_configuration(family)).eval()
    batch: Mapping[str, Tensor] = configurations.tiny_batch(family, model)
    batch = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    # Two rows of a text, where a text is all that is wanted.
    if set(batch) == {"input_ids"} and "attention_mask" in inspect.signature(model.forward).parameters:
        batch = {"input_ids": tokens()["input_ids"] % 80 + 3}
    return Subject(family=family.name, model=model, batch=batch)
