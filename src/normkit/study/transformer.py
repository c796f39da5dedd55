"""One transformer for every study: any norm at any place, and nothing else that differs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit import specs
from normkit.errors import InputError
from normkit.study.model_parts import NormLayer, initialise, norm_layer

Placement = Literal["pre", "post", "peri", "output", "none"]

PLACEMENTS: dict[Placement, str] = {
    "pre": "x + f(norm(x))",
    "post": "norm(x + f(x))",
    "peri": "x + norm(f(norm(x)))",
    "output": "x + norm(f(x))",
    "none": "x + f(x)",
}
"""Place of the norm in a block -> the block's formula."""

_BRANCH_MATRICES = ("value.weight", "out.weight", "up.weight", "down.weight")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """All choices of a `Transformer`.

    Raises:
        InputError: If the heads do not divide the width, or the placement is unknown.
    """

    vocabulary: int = 256
    """Number of token ids."""
    context: int = 64
    """Positions at most."""
    width: int = 64
    """Features of the residual stream, n."""
    layers: int = 4
    """Pairs of attention and MLP."""
    heads: int = 4
    """Attention heads; they divide the width."""
    expansion: int = 4
    """Hidden features of an MLP over the width."""
    norm: NormLayer = specs.TORCH_LAYER_NORM
    """A spec, a function width -> layer, or None."""
    placement: Placement = "pre"
    """The placement of a block's norm, a key of `PLACEMENTS`."""
    final_norm: bool | None = None
    """A norm before the unembedding; None is the usual choice of the placement: yes, except for post and none."""
    query_key_norm: bool = False
    """RMSNorm of queries and keys, for each head."""
    residual_scale: float = 1.0
    """Factor a on the stream in a x + f(...): DeepNorm's alpha."""
    branch_gain: float = 1.0
    """Factor on the initial value, output and MLP matrices: DeepNorm's beta."""
    depth_scaled: bool = False
    """Divide the norm of block l by sqrt(l), l from 1 (LayerNorm Scaling)."""
    causal: bool = True
    """A token sees only itself and earlier ones."""

    def __post_init__(self) -> None:
        """Refuse a configuration that cannot be built."""
        if self.width % self.heads:
            raise InputError(f"{self.heads} heads do not divide a width of {self.width}; choose heads that do")
        if self.placement not in PLACEMENTS:
            raise InputError(f"placement must be one of {', '.join(PLACEMENTS)}, got {self.placement!r}")

    @property
    def has_final_norm(self) -> bool:
        """Whether there is a norm before the unembedding."""
        usual = self.placement in ("pre", "peri", "output")
        return self.norm is not None and (usual if self.final_norm is None else self.final_norm)


def deep_norm(layers: int) -> dict[str, float]:
    """The factors of DeepNorm for L layers: alpha = (2 L)^(1/4) on the stream, beta = (8 L)^(-1/4) on the branches.

    Source:
        Wang et al. 2022, arXiv:2203.00555.
    """
    return {"residual_scale": (2 * layers) ** 0.25, "branch_gain": (8 * layers) ** -0.25}


class Transformer(nn.Module):
    """A decoder (or, without the causal mask, an encoder) over token ids.

    Embeddings plus learned positions, `layers` times attention and MLP (GELU), a final norm, an unembedding of its own.
    Every linear layer has a bias. Matrices start from a normal distribution of variance 2 / (inputs + outputs) (Glorot
    & Bengio 2010, equation 16), embeddings from variance 1 / 4, biases at 0. With one seed, matrices of the same name
    and shape start with the same values, whatever the rest of the model is.

    Source:
        Xiong et al. 2020 (arXiv:2002.04745) for pre and post; Wang et al. 2022 (arXiv:2203.00555) for the residual
        scale and branch gain; Sun et al. 2025 (arXiv:2502.05795) for the depth scaling.

    Example:
        >>> model = Transformer(TransformerConfig(layers=2, placement="post"))
        >>> model(torch.zeros(1, 8, dtype=torch.long)).shape
        torch.Size([1, 8, 256])
    """

    def __init__(self, config: TransformerConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(1, config.layers + 1))
        self.final_norm: nn.Module = norm_layer(config.norm if config.has_final_norm else None, config.width)
        self.unembedding = nn.Linear(config.width, config.vocabulary)
        initialise(self, seed)
        with torch.no_grad():
            for path, weight in self.blocks.named_parameters():
                if path.endswith(_BRANCH_MATRICES):
                    weight.mul_(config.branch_gain)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (batch, tokens, vocabulary) of token ids (batch, tokens)."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.unembedding(self.final_norm(x))
        return logits

    def embed(self, ids: Tensor) -> Tensor:
        """The stream (batch, tokens, width) before the first block."""
        stream: Tensor = self.embedding(ids) + self.position(torch.arange(ids.shape[-1], device=ids.device))
        return stream

    def attention(self, block: int) -> tuple[nn.Module, Attention]:
        """The norm and the attention of a block, from 0."""
        residual = cast(Block, self.blocks[block]).attention
        return residual.norm, cast(Attention, residual.branch)


def attention_scores(model: Transformer, block: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The attention scores of a block, from 0, on its input x, in float64; and which of them a token may see.

    The scores have shape (batch, heads, tokens, tokens), the mask (tokens, tokens).
    """
    norm, attention = model.attention(block)
    query, key = attention.queries_and_keys(norm(x))
    scores = (query @ key.transpose(-1, -2)).double() / math.sqrt(query.shape[-1])
    return scores, torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()


def branch_ends(model: Transformer) -> list[tuple[str, nn.Linear]]:
    """The last linear layer of each branch, with its path: what is added to the stream, but for norms after it."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.endswith((".out", ".down"))
    ]


class Block(nn.Module):
    """Attention, then an MLP, each with its norms and its residual connection; `layer` is its number, from 1."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.attention = Residual(Attention(config), config, layer)
        self.mlp = Residual(Feedforward(config), config, layer)

    def forward(self, x: Tensor) -> Tensor:
        """The stream (batch, tokens, width) after the block."""
        stream: Tensor = self.mlp(self.attention(x))
        return stream


class Residual(nn.Module):
    """A branch f with its norms: one of the five formulas of `PLACEMENTS`, with a x in place of x."""

    def __init__(self, branch: nn.Module, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.placement = config.placement
        self.residual_scale = config.residual_scale
        self.norm_scale = 1 / math.sqrt(layer) if config.depth_scaled else 1.0
        self.branch = branch
        placed = config.norm if config.placement != "none" else None
        self.norm = norm_layer(placed, config.width)
        if config.placement == "peri":
            self.output_norm = norm_layer(placed, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after the branch is added."""
        stream = x if self.residual_scale == 1 else self.residual_scale * x
        added: Tensor = self.branch(self._normalized(x) if self.placement in ("pre", "peri") else x)
        match self.placement:
            case "post":
                return self._normalized(stream + added)
            case "peri":
                added = self.output_norm(added)
            case "output":
                added = self._normalized(added)
        return stream + added

    def _normalized(self, x: Tensor) -> Tensor:
        normalized: Tensor = self.norm(x)
        return normalized if self.norm_scale == 1 else self.norm_scale * normalized


class Attention(nn.Module):
    """Multi-head attention by `scaled_dot_product_attention`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads, self.causal = config.heads, config.causal
        self.query, self.key, self.value, self.out = (nn.Linear(config.width, config.width) for _ in range(4))
        of_heads = specs.TORCH_RMS_NORM.replace(eps=1e-6) if config.query_key_norm else None
        self.query_norm, self.key_norm = (norm_layer(of_heads, config.width // config.heads) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Attend within x (batch, tokens, width)."""
        query, key = self.queries_and_keys(x)
        mixed = F.scaled_dot_product_attention(query, key, self._by_head(self.value(x)), is_causal=self.causal)
        attended: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return attended

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both of shape (batch, heads, tokens, width / heads), as the scores multiply them."""
        query, key = self._by_head(self.query(x)), self._by_head(self.key(x))
        return self.query_norm(query), self.key_norm(key)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(-3, -2)


class Feedforward(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden = config.expansion * config.width
        self.up, self.down = nn.Linear(config.width, hidden), nn.Linear(hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map each row of x (..., width)."""
        mapped: Tensor = self.down(F.gelu(self.up(x)))
        return mapped
