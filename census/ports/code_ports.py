"""Ports as somebody would write them: one file, other names, other layout, one thing wrong at a time.

`write(b, model, edits)` writes FILE.py with its weights beside it. `edits` is a list of (old, new) pieces of its source; each
old piece must occur, so a fault is a change of the text, as a person would have made it, and no flag gives it away.
"""

import json
import re

import numpy as np
from lib import *

LOADING = '''

def load():
    net = Net()
    weights = load_file(HERE / "@FILE@.safetensors")
    net.load_state_dict(weights)
    return net.to(DTYPE).eval()


def batch():
    return {"input_ids": torch.tensor(@IDS@)}


def batches():
    return [batch()]
'''
"""The end of each port."""

DECODER = '''"""Inference port of a small language model, in plain PyTorch."""
import math
import pathlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).parent
WIDTH, DEPTH, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = @DIMS@
EPS = @EPS@
DTYPE = torch.@DTYPE@


class Scale(nn.Module):
    """Root mean square normalization."""

    def __init__(self, n):
        super().__init__()
        self.g = nn.Parameter(torch.ones(n))
        self.eps = EPS

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return @GAIN@


def rotary(T, base=@BASE@):
    freq = base ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angle = torch.outer(torch.arange(T).float(), freq)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        @QKINIT@

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], -1)
        @QKALL@
        q = q.view(B, T, HEADS, HEAD_DIM).transpose(1, 2)
        k = k.view(B, T, KV_HEADS, HEAD_DIM).transpose(1, 2)
        v = v.view(B, T, KV_HEADS, HEAD_DIM).transpose(1, 2)
        @QKHEAD@
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        @QKLATE@
        k = k.repeat_interleave(HEADS // KV_HEADS, 1)
        v = v.repeat_interleave(HEADS // KV_HEADS, 1)
        score = (q @ k.transpose(-1, -2)) * HEAD_DIM**-0.5
        score = score.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        y = score.float().softmax(-1).to(v.dtype) @ v
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, -1)
        return self.down(@ACT@ * value)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.mlp = Mixer(), Gated()
        self.n1, self.n2 = Scale(WIDTH), Scale(WIDTH)
        @BLOCKINIT@

    def forward(self, x, cos, sin):
        @BLOCK@
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.stack = nn.ModuleList(Block() for _ in range(DEPTH))
        self.out_scale = Scale(WIDTH)
        self.vocab = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids, **_):
        x = self.tokens(input_ids)@EMBED@
        cos, sin = rotary(input_ids.shape[1])
        for block in self.stack:
            x = block(x, cos, sin)
        x = self.out_scale(x)
        return self.vocab(x)
''' + LOADING

GPT = '''"""Inference port of a small language model, in plain PyTorch."""
import math
import pathlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).parent
WIDTH, DEPTH, HEADS, VOCAB = @DIMS@
EPS = @EPS@
DTYPE = torch.@DTYPE@


class Centre(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))
        self.eps = EPS

    def forward(self, x):
        mu = x.mean(-1, keepdim=True)
        var = x.var(-1, keepdim=True, unbiased=False)
        return (x - mu) / torch.sqrt(var + self.eps) * self.g + self.b


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        score = (q @ k.transpose(-1, -2)) / math.sqrt(WIDTH // HEADS)
        @MASK@
        return self.out((score.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.mix = Centre(WIDTH), Centre(WIDTH), Mixer()
        self.up, self.down = nn.Linear(WIDTH, @INNER@), nn.Linear(@INNER@, WIDTH)

    def forward(self, x):
        @BLOCK@
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(512, WIDTH)
        self.stack = nn.ModuleList(Block() for _ in range(DEPTH))
        @NETINIT@

    def forward(self, input_ids, **_):
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        @EMBED@
        for block in self.stack:
            x = block(x)
        @TAIL@
''' + LOADING


def fill(text, **parts):
    for key, value in parts.items():
        text = text.replace(f"@{key}@", str(value))
    text = re.sub(r"^ *@\w+@ *\n", "", text, flags=re.M)
    assert "@" not in re.sub(r" @ |@staticmethod", "", text), re.findall(r"\S*@\S*", text)
    return text


def decoder_source(b, model, dtype="float32"):
    c, fam = model.config, model.family
    hd = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    qk_head = fam == "qwen3"
    qk_all = fam == "olmo2"
    parts = dict(
        DIMS=f"{c.hidden_size}, {model.layers}, {c.num_attention_heads}, {c.num_key_value_heads}, {hd}, {c.intermediate_size}, {c.vocab_size}",
        EPS=c.rms_norm_eps, DTYPE=dtype, BASE=c.rope_parameters["rope_theta"],
        GAIN={"gemma": "(h * (1 + self.g.float())).type_as(x)", "olmo2": "(self.g * h).type_as(x)"}.get(fam, "self.g * h.type_as(x)"),
        QKINIT="self.qn, self.kn = Scale(HEAD_DIM), Scale(HEAD_DIM)" if qk_head else "self.qn, self.kn = Scale(HEADS * HEAD_DIM), Scale(KV_HEADS * HEAD_DIM)" if qk_all else "@QKINIT@",
        QKHEAD="q, k = self.qn(q), self.kn(k)" if qk_head else "@QKHEAD@",
        QKALL="q, k = self.qn(q), self.kn(k)" if qk_all else "@QKALL@",
        ACT='F.gelu(gate, approximate="tanh")' if fam == "gemma" else "F.silu(gate)",
        BLOCK="x = x + self.n1(self.mix(x, cos, sin))\n        x = x + self.n2(self.mlp(x))" if fam == "olmo2" else "x = x + self.mix(self.n1(x), cos, sin)\n        x = x + self.mlp(self.n2(x))",
        EMBED=" * WIDTH**0.5" if fam == "gemma" else "",
    )
    text = DECODER
    for key, value in parts.items():
        text = text.replace(f"@{key}@", str(value))
    return text


def decoder_weights(model):
    sd, out = model.sd, {}
    out["tokens.weight"] = sd["model.embed_tokens.weight"]
    out["vocab.weight"] = sd.get("lm_head.weight", sd["model.embed_tokens.weight"])
    out["out_scale.g"] = sd["model.norm.weight"]
    for i in range(model.layers):
        p, s = f"model.layers.{i}.", f"stack.{i}."
        out[s + "mix.qkv.weight"] = np.concatenate([sd[p + f"self_attn.{n}_proj.weight"] for n in "qkv"])
        out[s + "mix.out.weight"] = sd[p + "self_attn.o_proj.weight"]
        for n in "qk":
            if p + f"self_attn.{n}_norm.weight" in sd:
                out[s + f"mix.{n}n.g"] = sd[p + f"self_attn.{n}_norm.weight"]
        out[s + "mlp.up.weight"] = np.concatenate([sd[p + "mlp.gate_proj.weight"], sd[p + "mlp.up_proj.weight"]])
        out[s + "mlp.down.weight"] = sd[p + "mlp.down_proj.weight"]
        first, second = ("post_attention_layernorm", "post_feedforward_layernorm") if model.family == "olmo2" else ("input_layernorm", "post_attention_layernorm")
        out[s + "n1.g"], out[s + "n2.g"] = sd[p + first + ".weight"], sd[p + second + ".weight"]
    return out


def gpt_source(b, model, dtype="float32"):
    c = model.config
    bert = model.family == "bert"
    width = config_of(c, "hidden_size", "n_embd")
    parts = dict(
        DIMS=f"{width}, {model.layers}, {config_of(c, 'num_attention_heads', 'n_head')}, {c.vocab_size}",
        INNER=config_of(c, "intermediate_size", "n_inner") or 4 * width, DTYPE=dtype,
        EPS=c.layer_norm_eps if bert else c.layer_norm_epsilon,
        MASK="@MASK@" if bert else "score = score.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)",
        BLOCK="x = self.n1(x + self.mix(x))\n        x = self.n2(x + self.down(F.gelu(self.up(x))))" if bert else
              'x = x + self.mix(self.n1(x))\n        x = x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))',
        NETINIT="self.kinds = nn.Embedding(2, WIDTH)\n        self.start = Centre(WIDTH)\n        self.turn, self.last, self.shift = nn.Linear(WIDTH, WIDTH), Centre(WIDTH), nn.Parameter(torch.zeros(VOCAB))"
        if bert else "self.last = Centre(WIDTH)",
        EMBED="x = self.start(x + self.kinds.weight[0])" if bert else "@EMBED@",
        TAIL="x = self.last(F.gelu(self.turn(x)))\n        return x @ self.tokens.weight.T + self.shift" if bert else "x = self.last(x)\n        return x @ self.tokens.weight.T",
    )
    text = GPT
    for key, value in parts.items():
        text = text.replace(f"@{key}@", str(value))
    return text


def gpt_weights(model):
    sd, out = model.sd, {}
    if model.family == "gpt2":
        out["tokens.weight"], out["places.weight"] = sd["transformer.wte.weight"], sd["transformer.wpe.weight"]
        out["last.g"], out["last.b"] = sd["transformer.ln_f.weight"], sd["transformer.ln_f.bias"]
        for i in range(model.layers):
            p, s = f"transformer.h.{i}.", f"stack.{i}."
            for old, new in (("attn.c_attn", "mix.qkv"), ("attn.c_proj", "mix.out"), ("mlp.c_fc", "up"), ("mlp.c_proj", "down")):
                out[s + new + ".weight"], out[s + new + ".bias"] = sd[p + old + ".weight"].T.copy(), sd[p + old + ".bias"]
            for old, new in (("ln_1", "n1"), ("ln_2", "n2")):
                out[s + new + ".g"], out[s + new + ".b"] = sd[p + old + ".weight"], sd[p + old + ".bias"]
        return out
    e = "bert.embeddings."
    out["tokens.weight"], out["places.weight"], out["kinds.weight"] = (sd[e + n + "_embeddings.weight"] for n in ("word", "position", "token_type"))
    out["start.g"], out["start.b"] = sd[e + "LayerNorm.weight"], sd[e + "LayerNorm.bias"]
    t = "cls.predictions."
    out["turn.weight"], out["turn.bias"] = sd[t + "transform.dense.weight"], sd[t + "transform.dense.bias"]
    out["last.g"], out["last.b"], out["shift"] = sd[t + "transform.LayerNorm.weight"], sd[t + "transform.LayerNorm.bias"], sd[t + "bias"]
    for i in range(model.layers):
        p, s = f"bert.encoder.layer.{i}.", f"stack.{i}."
        for kind in ("weight", "bias"):
            out[s + "mix.qkv." + kind] = np.concatenate([sd[p + f"attention.self.{n}.{kind}"] for n in ("query", "key", "value")])
            for old, new in (("attention.output.dense", "mix.out"), ("intermediate.dense", "up"), ("output.dense", "down")):
                out[s + f"{new}.{kind}"] = sd[p + f"{old}.{kind}"]
        for old, new in (("attention.output.LayerNorm", "n1"), ("output.LayerNorm", "n2")):
            out[s + new + ".g"], out[s + new + ".b"] = sd[p + old + ".weight"], sd[p + old + ".bias"]
    return out


def write(b, model, edits=(), weights=None, dtype="float32", file="port", store="f32", source=None):
    """FILE.py in the case's folder; the weights beside it. Returns 'FILE.py:load'."""
    gpt = model.family in ("gpt2", "bert")
    text = source or (gpt_source if gpt else decoder_source)(b, model, dtype)
    tensors = weights if weights is not None else (gpt_weights if gpt else decoder_weights)(model)
    length = 48
    ids = np.random.default_rng(b.seed).integers(3, model.config.vocab_size, (2, length)).tolist()
    for old, new in edits:
        assert old in text, f"{b.name}: {old!r} is not in the source"
        text = text.replace(old, new)
    text = fill(text, FILE=file, IDS=json.dumps(ids))
    b.path(file + ".py").write_text(text)
    save_file({k: to_torch(v, store).clone() for k, v in tensors.items()}, b.path(file + ".safetensors"))
    return f"{file}.py:load"


def load_py(path):
    """Run FILE.py:function, for the check of the truth."""
    file, function = str(path).rsplit(":", 1)
    space = {"__file__": file, "__name__": "port"}
    exec(compile(open(file).read(), file, "exec"), space)
    return space[function](), space["batch"]()


def py_logits(path, double=True):
    model, batch = load_py(path)
    if double:
        model = model.double()
    with torch.no_grad():
        return model(**batch).double(), batch["input_ids"]
