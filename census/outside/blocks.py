"""Blocks written by hand, and models of other packages than transformers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cases import Draw
from .material import timm_norms


class Attention(nn.Module):
    """Causal self-attention, with query and key norms where they are given."""

    def __init__(self, width: int, heads: int, norm: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.query_norm = norm(width // heads) if norm else nn.Identity()
        self.key_norm = norm(width // heads) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(self.query_norm(query), self.key_norm(key), value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """One block; `order` says where its norms sit.

    pre and post are the two of Xiong et al. 2020; sandwich has norms on both sides of a branch; "wrong" takes the
    residual after the norm, a common slip: x = norm(x); x = x + f(x).
    """

    def __init__(
        self, width: int, heads: int, norm: Callable[[int], nn.Module], order: str = "pre", qk: bool = False
    ) -> None:
        super().__init__()
        self.order = order
        self.attention = Attention(width, heads, norm if qk else None)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm1, self.norm2 = norm(width), norm(width)
        self.norm3 = norm(width) if order == "sandwich" else nn.Identity()
        self.norm4 = norm(width) if order == "sandwich" else nn.Identity()

    def branch(self, x: Tensor, norm: nn.Module, after: nn.Module, layer: nn.Module) -> Tensor:
        if self.order == "post":
            return norm(x + layer(x))
        if self.order == "wrong":
            x = norm(x)
            return x + layer(x)
        if self.order == "unused":
            norm(x)
            return x + layer(x)
        return x + after(layer(norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.branch(x, self.norm1, self.norm3, self.attention)
        return self.branch(x, self.norm2, self.norm4, self.mlp)


class ParallelBlock(nn.Module):
    """One norm feeds attention and MLP, as in GPT-J."""

    def __init__(self, width: int, heads: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        row = self.norm(x)
        return x + self.attention(row) + self.mlp(row)


class FunctionBlock(nn.Module):
    """A block whose norms are functions, as in nanochat or modded-nanogpt: no module stands for them."""

    def __init__(self, width: int, heads: int, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.function(x))
        return x + self.mlp(self.function(x))


class Language(nn.Module):
    """Token embedding, blocks, final norm, head; gives logits for `input_ids`, or for `inputs_embeds`."""

    def __init__(self, blocks: list[nn.Module], width: int, final: nn.Module, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.5)
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = final
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def language(
    draw: Draw, order: str = "pre", norm: Callable[[int], nn.Module] | None = None, qk: bool = False, depth: int = 0
) -> Language:
    """A hand-written language model of drawn depth and width, with torch's RMSNorm or LayerNorm by default."""
    width, heads = draw.choice([(48, 3), (64, 4), (96, 4)])
    norm = norm or draw.choice([lambda n: nn.RMSNorm(n, eps=1e-6), nn.LayerNorm])
    depth = depth or draw.randint(2, 5)
    blocks = [Block(width, heads, norm, order, qk) for _ in range(depth)]
    final = nn.Identity() if order == "post" else norm(width)
    return Language(blocks, width, final).eval()


def function_language(draw: Draw, function: Callable[[Tensor], Tensor]) -> Language:
    """A model whose norms are all functions."""
    width, heads = draw.choice([(48, 3), (64, 4)])
    blocks = [FunctionBlock(width, heads, function) for _ in range(draw.randint(2, 4))]
    model = Language(blocks, width, nn.Identity())
    return model.eval()


def torch_encoder(draw: Draw, norm_first: bool, final: bool = True, depth: int = 0) -> nn.Module:
    """torch.nn.TransformerEncoder; its fast path is off, as it has no norm that could be seen."""
    width = draw.choice([48, 64])
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(
        layer, depth or draw.randint(2, 5), norm=nn.LayerNorm(width) if final else None, enable_nested_tensor=False
    ).eval()


def x_decoder(draw: Draw, **options: Any) -> nn.Module:
    """A decoder of the package x-transformers."""
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(
        num_tokens=256,
        max_seq_len=256,
        attn_layers=Decoder(
            dim=64, depth=draw.randint(2, 4), heads=4, attn_dim_head=16, rotary_pos_emb=True, **options
        ),
    ).eval()


class Vision(nn.Module):
    """A small vision transformer: patches, blocks, final norm, head."""

    def __init__(self, blocks: list[nn.Module], width: int, final: nn.Module) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, stride=8)
        self.position = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = final, nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


def vision(draw: Draw) -> tuple[nn.Module, dict[str, Tensor]]:
    """A hand-written vision transformer with timm's norms, query and key norms too, and random pictures."""
    norm = draw.choice([timm_norms().LayerNorm, timm_norms().RmsNorm, timm_norms().LayerNormFp32])
    blocks: list[nn.Module] = [Block(48, 3, norm, qk=True) for _ in range(draw.randint(2, 4))]
    return Vision(blocks, 48, norm(48)).eval(), {"x": torch.randn(2, 3, 32, 32)}


class Branches(nn.Module):
    """A small network on vectors, with a norm of the caller's choice between two layers."""

    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(width, width), norm, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.norm(self.first(x))))
