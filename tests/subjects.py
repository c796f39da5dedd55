"""Tiny clean models to break or to leave alone: of families of transformers, of no library, and the two that ship."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit as nk
from normkit import demo, specs
from normkit.study import Transformer, TransformerConfig

VOCABULARY, WIDTH, HEADS, TOKENS = 99, 64, 4, 24
# The families' own 0.02 suits widths near 1000; at this width it starts the blocks near zero.
DEVIATION = 0.08

DECODERS: dict[str, dict[str, Any]] = {
    "GPT2": {},
    "Llama": {},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16},
    "Gemma3Text": {"head_dim": 16},
    "Qwen3": {"head_dim": 16},
    "Olmo": {},
    "Olmo2": {},
    "GPTNeoX": {},
    "Cohere": {},
    "Mixtral": {},
    "StableLm": {},
    "Nemotron": {},
    "Falcon": {},
    "Bloom": {},
    "NanoChat": {},
}
"""Families by the names of their configuration classes, and what these need beside the sizes."""

OTHERS = (
    *("Bert", "OPT", "T5Encoder"),
    *("PlainLayer", "PlainRMS", "PlainPost", "BareLayer", "BareRMS"),
    *("StudyLayer", "StudyRMS", "StudyOffset"),
    *("ShippedLayer", "ShippedRMS"),
)
"""Further ones. What no library knows is held to an intent file, except where it is bare; what ships is trained; the
studies' own transformer is "Study"."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """A model and what it is run on.

    Attributes:
        family: Its name in the tables above.
        model: In evaluation mode.
        batch: Keyword arguments for a call.
        is_declared: Nothing but an intent file tells what was meant.
    """

    family: str
    model: nn.Module
    batch: Mapping[str, Tensor] = field(repr=False)
    is_declared: bool = False


def subject(
    family: str,
    *,
    layers: int = 3,
    trained: bool = True,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    **options: Any,
) -> Subject:
    """A fresh model of a family.

    Args:
        family: A key of `DECODERS` or one of `OTHERS`.
        layers: Blocks; of the models that ship, as many as they have.
        trained: Gains and biases moved from their start by about 0.1, as training does.
        dtype: Of parameters.
        autocast: Matrix products run in bfloat16; of models of no library.
        options: Further fields of the configuration.
    """
    torch.manual_seed(0)
    if family.startswith("Shipped"):
        return Subject(family=family, model=_shipped(family).to(dtype).eval(), batch=_text())
    builders: dict[str, Callable[..., nn.Module]] = {
        "Bert": _bert,
        "OPT": _opt,
        "T5Encoder": _t5_encoder,
        "PlainLayer": partial(Plain, nn.LayerNorm),
        "PlainRMS": partial(Plain, partial(nn.RMSNorm, eps=1e-5)),
        "PlainPost": partial(Plain, nn.LayerNorm, block=PostBlock),
        "BareLayer": partial(Plain, nn.LayerNorm),
        "BareRMS": partial(Plain, partial(nn.RMSNorm, eps=1e-5)),
        "StudyLayer": Studied,
        "StudyRMS": partial(Studied, norm=partial(nk.RMSNorm, eps=1e-5)),
        "StudyOffset": partial(Studied, norm=specs.GEMMA),
    }
    build = builders.get(family, partial(_decoder, family))
    model = build(layers=layers, **options).to(dtype).eval()
    if trained:
        moved(model)
    if autocast:
        model = UnderAutocast(model)
    padded = family in ("Bert", "T5Encoder")
    declared = family.startswith(("Plain", "Study"))
    return Subject(family=family, model=model, batch=tokens(padded=padded), is_declared=declared)


def tokens(*, padded: bool = False) -> dict[str, Tensor]:
    """Two rows of random tokens; with padding, the second is shorter."""
    generator = torch.Generator().manual_seed(0)
    batch = {"input_ids": torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)}
    if padded:
        batch["attention_mask"] = torch.ones(2, TOKENS, dtype=torch.long)
        batch["attention_mask"][1, TOKENS - 8 :] = 0
    return batch


def moved(model: nn.Module) -> nn.Module:
    """Move gains and biases, in place, by about 0.1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def _text() -> dict[str, Tensor]:
    return {"input_ids": torch.tensor(list(demo.text().encode()[:256])).view(2, 128)}


def _shipped(family: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    name = "layernorm" if family == "ShippedLayer" else "rmsnorm"
    return AutoModelForCausalLM.from_pretrained(demo.directory(name))


def _decoder(family: str, *, layers: int, **options: Any) -> nn.Module:
    import transformers

    shared = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": DEVIATION}
    if family == "GPT2":
        sizes = {"n_embd": WIDTH, "n_layer": layers, "n_head": HEADS}
    else:
        sizes = {
            "hidden_size": WIDTH,
            "num_hidden_layers": layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "intermediate_size": 2 * WIDTH,
            "pad_token_id": 0,
        }
    configuration = getattr(transformers, f"{family}Config")(**(shared | sizes | DECODERS[family] | options))
    return transformers.AutoModelForCausalLM.from_config(configuration)


def _bert(*, layers: int, **options: Any) -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH}
    sizes |= {"vocab_size": VOCABULARY, "initializer_range": DEVIATION}
    return BertModel(BertConfig(num_hidden_layers=layers, **(sizes | options)))


def _opt(*, layers: int, **options: Any) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": WIDTH, "word_embed_proj_dim": WIDTH, "ffn_dim": 2 * WIDTH, "num_attention_heads": HEADS}
    shared = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "init_std": DEVIATION}
    return OPTForCausalLM(OPTConfig(num_hidden_layers=layers, **(shared | sizes | options)))


def _t5_encoder(*, layers: int, **options: Any) -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 2 * WIDTH, "num_heads": HEADS}
    return T5EncoderModel(T5Config(vocab_size=VOCABULARY, num_layers=layers, **(sizes | options)))


class Block(nn.Module):
    """Causal attention behind a norm, and an MLP behind another."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(WIDTH), norm(WIDTH)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def attention(self, x):
        heads = self.query_key_value(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class PostBlock(Block):
    """The same parts, each norm behind its sum."""

    def forward(self, x):
        x = self.norm_1(x + self.attention(x))
        return self.norm_2(x + self.mlp(x))


class Plain(nn.Module):
    """A decoder that no library knows: it has no config, so nothing but an intent file tells what was meant."""

    def __init__(self, norm: Callable[[int], nn.Module], *, layers: int = 3, block: type[Block] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block(norm) for _ in range(layers))
        self.norm, self.head = norm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Studied(Transformer):
    """The transformer of the studies."""

    def __init__(self, *, layers: int = 3, vocabulary: int = VOCABULARY, context: int = TOKENS, **options: Any) -> None:
        sizes = {"width": WIDTH, "heads": HEADS, "layers": layers, "vocabulary": vocabulary, "context": context}
        super().__init__(TransformerConfig(**sizes, **options))

    def forward(self, input_ids):
        return super().forward(input_ids)


class UnderAutocast(nn.Module):
    """A model whose matrix products run in bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(**batch)


def quiet() -> None:
    """Keep transformers from saying how it loads."""
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.set_verbosity_error()
        sys.modules["transformers"].logging.disable_progress_bar()
