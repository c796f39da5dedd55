"""A Llama and a Gemma as one writes them anew in a file: plain code, names of its own, and one fault at a time.

`port_of(model, fault)` takes the weights of a model of transformers. The faults are those of FAULTS.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FAULTS = (
    *("rope base", "softmax scale", "swapped gains", "missing norm", "cast order", "eps", "offset", "embedding scale"),
    *("gelu", "residual order", "final norm", "applied twice", "softcap", "logit scale", "mask"),
)
"""What can be planted. "softcap" and "logit scale" are behind the head."""


class Scaled(nn.Module):
    """RMSNorm with a gain `g`, which is `offset + g` as Gemma has it."""

    def __init__(self, weight: Tensor, eps: float, *, offset: float, late: bool) -> None:
        super().__init__()
        self.g, self.eps, self.offset, self.late = nn.Parameter(weight.clone()), eps, offset, late

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.late:
            return (wide * (self.offset + self.g.float())).to(x.dtype)
        return (self.offset + self.g) * wide.to(x.dtype)


class Layer(nn.Module):
    """One block: norms `a` before attention and `m` before the MLP; in a Gemma also `a2` and `m2` behind them."""

    def __init__(self, source: Any, config: Any, place: int, fault: str, *, is_gemma: bool) -> None:
        super().__init__()
        eps, offset = config.rms_norm_eps, float(is_gemma)
        eps = 1e-3 if fault == "eps" and place == 1 else eps
        offset = 0.0 if fault == "offset" and place == 1 else offset
        late = is_gemma != (fault == "cast order" and place == 1)

        def norm(module: Any) -> Scaled:
            return Scaled(module.weight, eps, offset=offset, late=late)

        attention = source.self_attn
        self.a = norm(source.input_layernorm)
        self.m = norm(source.pre_feedforward_layernorm if is_gemma else source.post_attention_layernorm)
        self.a2, self.m2, self.qn, self.kn = None, None, None, None
        if is_gemma:
            self.a2, self.m2 = norm(source.post_attention_layernorm), norm(source.post_feedforward_layernorm)
            self.qn, self.kn = norm(attention.q_norm), norm(attention.k_norm)
        if fault == "swapped gains" and place == 1:
            self.a.g, self.m.g = self.m.g, self.a.g
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        self.q, self.k, self.v, self.o = (nn.Parameter(getattr(attention, name).weight.clone()) for name in names)
        names = ("gate_proj", "up_proj", "down_proj")
        self.gate, self.up, self.down = (nn.Parameter(getattr(source.mlp, name).weight.clone()) for name in names)
        self.size, self.is_gemma, self.fault = attention.head_dim, is_gemma, fault if place == 1 else ""
        self.scale = config.query_pre_attn_scalar**-0.5 if is_gemma else self.size**-0.5
        rope = config.rope_parameters
        is_local = is_gemma and config.layer_types[place] == "sliding_attention"
        self.base = (rope[config.layer_types[place]] if is_gemma else rope)["rope_theta"]
        self.window = config.sliding_window if is_local else None

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, weight).unflatten(-1, (-1, self.size)) for weight in (self.q, self.k, self.v))
        if self.qn is not None and self.kn is not None:
            q, k = self.qn(q), self.kn(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        base = self.base * (2 if self.fault == "rope base" else 1)
        half = base ** -(torch.arange(0, self.size, 2).double() / self.size)
        angles = torch.arange(x.shape[1])[:, None] * half.float()
        cos, sin = (turn(torch.cat([angles, angles], -1)).to(x.dtype) for turn in (torch.cos, torch.sin))
        q, k = (
            part * cos + torch.cat([-part[..., self.size // 2 :], part[..., : self.size // 2]], -1) * sin
            for part in (q, k)
        )
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        scale = self.scale * (1.5 if self.fault == "softmax scale" else 1)
        scores = q @ k.transpose(-1, -2) * scale
        count = torch.arange(x.shape[1])
        hidden = count[:, None] < count[None]
        if self.window is not None:
            hidden |= count[:, None] - count[None] >= self.window
        if self.fault == "mask":
            hidden = torch.zeros_like(hidden)
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1, dtype=torch.float32).to(x.dtype)
        return F.linear((shares @ v).transpose(1, 2).flatten(2), self.o)

    def feed(self, x: Tensor) -> Tensor:
        approximate = "none" if self.fault == "gelu" else "tanh"
        gate = F.linear(x, self.gate)
        gate = (
            F.gelu(gate, approximate=approximate)
            if self.is_gemma
            else F.gelu(gate)
            if self.fault == "gelu"
            else F.silu(gate)
        )
        return F.linear(gate * F.linear(x, self.up), self.down)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y = self.a(y) if self.fault == "applied twice" else y
        y = self.attend(y)
        x = x + (y if self.a2 is None else self.a2(y))
        if self.fault == "missing norm":
            return x + self.feed(x) if self.m2 is None else x + self.m2(self.feed(x))
        y = self.m(x)
        if self.fault == "residual order":
            x = y
        y = self.feed(y)
        return x + (y if self.m2 is None else self.m2(y))


class Port(nn.Module):
    """The port of a model of transformers."""

    def __init__(self, model: Any, fault: str) -> None:
        super().__init__()
        config, is_gemma = model.config, "Gemma" in type(model).__name__
        inner = model.model
        self.table = nn.Parameter(inner.embed_tokens.weight.clone())
        self.scale = torch.tensor(math.sqrt(config.hidden_size) if is_gemma else 1.0)
        if fault == "embedding scale":
            self.scale = torch.tensor(1.0 if is_gemma else math.sqrt(config.hidden_size))
        self.stack = nn.ModuleList(
            Layer(source, config, place, fault, is_gemma=is_gemma) for place, source in enumerate(inner.layers)
        )
        self.last = Scaled(inner.norm.weight, config.rms_norm_eps, offset=float(is_gemma), late=is_gemma)
        self.head = nn.Parameter(model.lm_head.weight.clone())
        self.fault = fault

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.table)
        x = x * self.scale.to(x.dtype)
        for layer in self.stack:
            x = layer(x)
        y = self.last(x)
        logits = F.linear(x if self.fault == "final norm" else y, self.head)
        if self.fault == "softcap":
            logits = 30 * torch.tanh(logits / 30)
        return logits * 0.5 if self.fault == "logit scale" else logits


def port_of(model: Any, fault: str = "") -> Port:
    """A port with the model's weights and dtype, and one fault in its second layer, its embedding or its end."""
    assert fault in ("", *FAULTS)
    return Port(model, fault).to(next(model.parameters()).dtype).eval()
