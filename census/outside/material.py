"""The models that cases are made of: first blocks of real trained models, and tiny ones with random weights."""

import importlib.util
import inspect
import random
import sys
import types
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .cases import Draw

_LOADED: dict[str, tuple[nn.Module, Tensor]] = {}


def text(draw: random.Random, characters: int = 6000) -> str:
    """Real text: a stretch of the source of Python's standard library."""
    import argparse
    import statistics
    import textwrap

    source = inspect.getsource(draw.choice([argparse, statistics, textwrap]))
    start = draw.randrange(max(1, len(source) - characters))
    return source[start : start + characters]


def load(name: str, seed: int, models: Path) -> None:
    """Load the first blocks of a real model, with the rows of its embedding that a text uses; once a process."""
    if name in _LOADED:
        return
    draw = random.Random(f"{seed}:{name}")
    folder = models / name
    config = transformers.AutoConfig.from_pretrained(folder)
    blocks = draw.randint(3, 6)
    config.num_hidden_layers = blocks
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:blocks]
    kind = transformers.AutoModel if name == "mpnet" else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, config=config, dtype="auto").eval()
    tokens = torch.tensor(transformers.AutoTokenizer.from_pretrained(folder)(text(draw))["input_ids"])
    _LOADED[name] = (model, _smaller_vocabulary(model, tokens))


def _smaller_vocabulary(model: nn.Module, tokens: Tensor) -> Tensor:
    """Keep the embedding's rows of these tokens and of the first four; gives the tokens by their new numbers."""
    kept = torch.cat([torch.arange(4), tokens]).unique()
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    embedding.weight = nn.Parameter(embedding.weight.data[kept].clone())
    embedding.num_embeddings, embedding.padding_idx = len(kept), None
    if head is not None:
        head.weight = embedding.weight if tied else nn.Parameter(head.weight.data[kept].clone())
        head.out_features = len(kept)
    model.config.vocab_size = len(kept)
    return torch.searchsorted(kept, tokens)


def real(
    draw: Draw, name: str, dtype: torch.dtype | None = None, length: int = 0
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A loaded real model in a dtype, its own by default, and a window of its text."""
    model, tokens = _LOADED[name]
    if dtype is not None:
        model.to(dtype)
    length = length or draw.randint(64, 128)
    start = draw.randrange(len(tokens) - length)
    ids = tokens[start : start + length][None]
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def byte_batch(draw: Draw, rows: int = 2, length: int = 64, vocabulary: int = 256) -> dict[str, Tensor]:
    """Bytes of real text as token ids."""
    data = text(draw).encode()
    starts = [draw.randrange(len(data) - length) for _ in range(rows)]
    return {"input_ids": torch.tensor([list(data[start : start + length]) for start in starts]) % vocabulary}


_SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256},
    "OPT": {"ffn_dim": 160, "word_embed_proj_dim": 64},
    "Bloom": {"n_layer": 3, "n_head": 4},
    "T5": {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0},
    "Albert": {"embedding_size": 32},
    "Mixtral": {"num_local_experts": 4},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
}
_BARE = ("Bert", "Albert", "MPNet")


def tiny(draw: Draw, family: str, **changes: Any) -> nn.Module:
    """A model of a transformers family with random weights, 2 to 4 blocks deep unless the changes say so."""
    values = {**_SMALL, "num_hidden_layers": draw.randint(2, 4), **_OWN.get(family, {}), **changes}
    if family in ("GPT2", "Bloom"):
        values.setdefault("n_layer", values["num_hidden_layers"])
        for name in ("num_hidden_layers", "num_attention_heads", "max_position_embeddings", "hidden_size")[
            : 3 if family == "Bloom" else 4
        ]:
            values.pop(name, None)
    if family == "T5":
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
            values.pop(name)
    config = getattr(transformers, f"{family}Config")(**values)
    if family == "T5":
        return transformers.T5EncoderModel(config).eval()
    suffix = "Model" if family in _BARE else {"GPT2": "LMHeadModel"}.get(family, "ForCausalLM")
    return getattr(transformers, f"{family}{suffix}")(config).eval()


def as_if_trained(model: nn.Module, spread: float = 0.25) -> None:
    """Give the gains and biases of all norms values with a spread, as training does; matrices stay random.

    Matrices that start far below 1 / sqrt(width) are made that large, as training makes them: else branches vanish.
    """
    for parameter in model.parameters():
        if parameter.ndim == 2 and 0 < float(parameter.std()) < 0.5 * parameter.shape[-1] ** -0.5:
            parameter.data.mul_(parameter.shape[-1] ** -0.5 / parameter.std())
    for module in model.modules():
        if "norm" not in type(module).__name__.lower():
            continue
        for name, parameter in module.named_parameters(recurse=False):
            with torch.no_grad():
                if "bias" in name:
                    parameter.normal_(0.0, spread / 2)
                elif float(parameter.abs().max()) == 0:
                    parameter.normal_(0.1, spread)
                else:
                    parameter.copy_(torch.exp(torch.randn_like(parameter) * spread))


def timm_norms() -> Any:
    """timm's file of norms without the rest of timm, which needs torchvision."""
    if "timm_layers" not in sys.modules:
        package = types.ModuleType("timm_layers")
        found = importlib.util.find_spec("timm")
        package.__path__ = [str(Path(found.origin).parent / "layers")]
        sys.modules["timm_layers"] = package
    return importlib.import_module("timm_layers.norm")


def demo(name: str) -> nn.Module:
    """A copy of one of the two small trained models that ship: layernorm (GPT-2) or rmsnorm (Llama)."""
    import normkit.demo

    return transformers.AutoModelForCausalLM.from_pretrained(normkit.demo.directory(name)).eval()
