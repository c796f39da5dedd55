from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace
from normkit.inspection.blocks import find_blocks
from normkit.inspection.placement import sweep

WIDTH, TOKENS = 32, 12
SIZES = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
LLAMA = {**SIZES, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
GPT = {"vocab_size": 64, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": 64, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {"vocab_size": 64, "d_model": WIDTH, "max_position_embeddings": 64}
BART |= {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 48))}
BART |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}

# Class of the model: its config, where its norms sit, the roles of the first block's norms by their calls.
PRE, POST, PERI = ["pre", "pre"], ["post", "post"], ["pre", "output", "pre", "output"]
QK = ["query-key", "query-key"]
FAMILIES = {
    "GPT2Model": (GPT, "pre", PRE),
    "LlamaModel": (LLAMA, "pre", PRE),
    "MistralModel": (LLAMA, "pre", PRE),
    "Qwen3Model": ({**LLAMA, "head_dim": 16}, "pre", ["pre", *QK, "pre"]),
    "OPTModel": ({**SIZES, "ffn_dim": 48, "word_embed_proj_dim": WIDTH}, "pre", PRE),
    "GPTNeoXModel": (SIZES, "pre", PRE),
    "GPTJModel": ({**GPT, "rotary_dim": 4}, "pre", ["pre"]),
    "FalconModel": ({**SIZES, "new_decoder_architecture": True}, "pre", PRE),
    "CohereModel": (LLAMA, "pre", ["pre"]),
    "OlmoModel": (LLAMA, "pre", PRE),
    "T5EncoderModel": (T5, "pre", PRE),
    "BertModel": (SIZES, "post", POST),
    "RobertaModel": (SIZES, "post", POST),
    "OpenAIGPTModel": (GPT, "post", POST),
    "Gemma2Model": ({**LLAMA, "head_dim": 8}, "peri", PERI),
    "Gemma3TextModel": ({**LLAMA, "head_dim": 8}, "peri", ["pre", *QK, "output", "pre", "output"]),
    "Olmo2Model": (LLAMA, "output-only", [*QK, "output", "output"]),
}


def build(name, config):
    class_name = {"T5EncoderModel": "T5", "BertForMaskedLM": "Bert", "T5Model": "T5", "BartModel": "Bart"}.get(name)
    configured = getattr(transformers, f"{class_name or name.removesuffix('Model')}Config")(**config)
    return getattr(transformers, name)(configured)


def runner(model, x=None):
    if x is None:
        x = torch.randint(3, 64, (1, TOKENS))
    uncached = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        uncached["decoder_input_ids"] = x[:, :7]
    return lambda: model(x, **uncached)


def swept(model, x=None):
    """(sweeps, roles in forward order, final norm) of a model in evaluation mode."""
    run = runner(model.eval(), x)
    called = trace(model, run)
    sites, _ = find_sites(model, called)
    sweeps, roles, final_norm = sweep(model, sites, find_blocks(model, called), run)
    return sweeps, {site.path: roles[site.path] for site in sites}, final_norm


def roles_in(roles, block):
    return [role for path, role in roles.items() if path.startswith(f"{block}.")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, dtype):
    config, placement, roles = FAMILIES[name]
    model = build(name, config).to(dtype)
    sweeps, found, final_norm = swept(model)
    assert [one.placement for one in sweeps] == [placement] * 2
    blocks = find_blocks(model, trace(model, runner(model)))
    assert [roles_in(found, block.path) for block in blocks] == [roles] * 2
    for one in sweeps:
        assert one.output_slope == pytest.approx(0.0 if placement == "post" else 1.0, abs=0.05)
        assert one.branch_slope == pytest.approx(1.0 if placement == "post" else 0.0, abs=0.05)
        assert one.rows_normalized is (True if placement == "post" else None)
    assert (final_norm is None) is (placement == "post")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def heads(self, x):
        query, key, value = (heads.unflatten(-1, (4, -1)).transpose(1, 2) for heads in self.projections(x).chunk(3, -1))
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)

    def forward(self, x):
        return self.output(self.heads(x).flatten(2))


class Block(nn.Module):
    """Two sublayers, a and m, four norms with gains, one over heads and two without a gain, wired as asked."""

    def __init__(self, wiring):
        super().__init__()
        self.wiring = wiring
        self.a, self.m = Attention(), nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.n1, self.n2, self.n3, self.n4 = (nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(4))
        for norm in (self.n1, self.n2, self.n3, self.n4):
            nn.init.normal_(norm.weight, 1.0, 0.3)
        self.heads = nn.RMSNorm(WIDTH // 4)
        self.p1, self.p2 = (nn.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=False) for _ in range(2))

    def forward(self, x):
        return self.wiring(self, x)


class Stack(nn.Module):
    def __init__(self, wiring, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Block(wiring) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def pre(b, x):
    x = x + b.a(b.n1(x))
    return x + b.m(b.n2(x))


def parallel(b, x):
    read = b.n1(x)
    return x + b.a(read) + b.m(read)


def post(b, x):
    x = b.n1(x + b.a(x))
    return b.n2(x + b.m(x))


def peri(b, x):
    x = x + b.n2(b.a(b.n1(x)))
    return x + b.n4(b.m(b.n3(x)))


def output_only(b, x):
    x = x + b.n1(b.a(x))
    return x + b.n2(b.m(x))


def without(b, x):
    x = x + b.a(x)
    return x + b.m(x)


def residual_after_norm(b, x):
    x = b.n1(x)
    x = b.n2(x + b.a(x))
    return x + b.m(x)


def residual_after_norm_first(b, x):
    x = b.n1(x)
    x = x + b.a(x)
    return x + b.m(b.n2(x))


def residual_after_norm_second(b, x):
    x = b.n2(x + b.a(b.n1(x)))
    return x + b.m(x)


def scaled_stream(b, x):
    return 0.5 * pre(b, x)


def small_branches(b, x):
    x = x + 1e-5 * b.a(b.n1(x))
    return x + 1e-5 * b.m(b.n2(x))


def norm_inside_branch(b, x):
    x = x + b.a.output(b.n2(b.a(b.n1(x))))
    return x + b.m(b.n3(x))


def norm_of_heads_behind_attention(b, x):
    return x + b.a.output(b.heads(b.a.heads(b.n1(x))).flatten(2))


def norm_of_heads_without_attention(b, x):
    return x + b.a.output(b.heads(b.n1(x).unflatten(-1, (4, -1))).flatten(2))


def norm_of_a_norm(b, x):
    return x + b.a(b.p2(b.p1(x)))


def output_only_behind_a_norm_of_its_own(b, x):
    return x + b.n1(b.a(x / x.norm(dim=-1, keepdim=True)))


def pre_then_without(b, x):
    x = x + b.a(b.n1(x))
    return x + b.m(x)


def pre_then_output_only(b, x):
    x = x + b.a(b.n1(x))
    return x + b.n2(b.m(x))


def pre_then_peri(b, x):
    x = x + b.a(b.n1(x))
    return x + b.n3(b.m(b.n2(x)))


def post_then_pre(b, x):
    x = b.n1(x + b.a(x))
    return x + b.m(b.n2(x))


def post_then_without(b, x):
    x = b.n1(x + b.a(x))
    return x + b.m(x)


def pre_and_post(b, x):
    return b.n2(x + b.a(b.n1(x)))


def norm_at_entry(b, x):
    return pre(b, b.n3(x))


def silent(b, x):
    return x + 0.0 * b.a(b.n1(x))


@pytest.mark.parametrize(
    ("wiring", "placement", "roles"),
    [
        (pre, "pre", PRE),
        (parallel, "pre", ["pre"]),
        (post, "post", POST),
        (peri, "peri", PERI),
        (output_only, "output-only", ["output", "output"]),
        (without, "none", []),
        (residual_after_norm, "residual-after-norm", PRE),
        (residual_after_norm_first, "residual-after-norm", ["pre", "unknown"]),
        (residual_after_norm_second, "residual-after-norm", PRE),
        (scaled_stream, "pre", PRE),
        (small_branches, "pre", PRE),
        (norm_inside_branch, "pre", ["pre", "unknown", "pre"]),
        (norm_of_heads_behind_attention, "pre", ["pre", "unknown"]),
        (norm_of_heads_without_attention, "pre", ["pre", "query-key"]),
        (norm_of_a_norm, "pre", ["pre", "unknown"]),
        (output_only_behind_a_norm_of_its_own, "unknown", ["output"]),
        (pre_then_without, "unknown", ["pre"]),
        (pre_then_output_only, "unknown", ["pre", "output"]),
        (pre_then_peri, "unknown", ["pre", "pre", "output"]),
        (post_then_pre, "unknown", ["post", "unknown"]),
        (post_then_without, "unknown", ["post"]),
        (pre_and_post, "unknown", ["pre", "post"]),
        (norm_at_entry, "unknown", ["post", "unknown", "unknown"]),
        (silent, "unknown", ["pre"]),
    ],
)
def test_wirings(wiring, placement, roles):
    sweeps, found, _ = swept(Stack(wiring), torch.randn(1, TOKENS, WIDTH))
    assert [one.placement for one in sweeps] == [placement] * 2
    assert [roles_in(found, f"layers.{index}") for index in range(2)] == [roles] * 2


@pytest.mark.parametrize(
    ("wiring", "output_slope", "branch_slope", "rows_normalized"),
    [
        (pre, 1, 0, None),
        (peri, 1, 0, None),
        (output_only, 1, 0, None),
        (without, 1, 1, None),
        (post, 0, 1, True),
        (residual_after_norm, 0, 1, False),
        (small_branches, 1, 0, None),
        (silent, 1, math.nan, None),
    ],
)
def test_the_table_of_fingerprints(wiring, output_slope, branch_slope, rows_normalized):
    for one in swept(Stack(wiring), torch.randn(1, TOKENS, WIDTH))[0]:
        assert one.output_slope == pytest.approx(output_slope, abs=0.05)
        assert one.branch_slope == pytest.approx(branch_slope, abs=0.05, nan_ok=True)
        assert one.rows_normalized is rows_normalized


@pytest.mark.parametrize("scale", [1e-3, 1e4])
@pytest.mark.parametrize("wiring", [pre, post, peri])
def test_the_scale_of_the_stream_does_not_matter(wiring, scale):
    sweeps, _, _ = swept(Stack(wiring, layers=1), scale * torch.randn(1, TOKENS, WIDTH))
    assert sweeps[0].placement == wiring.__name__


@pytest.mark.parametrize("norm_first", [True, False])
def test_torch_encoder_layers(norm_first):
    # In evaluation mode they have a fused path that calls none of their modules; it gives way to hooks.
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, norm_first=norm_first, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    sweeps, roles, _ = swept(model, torch.randn(2, TOKENS, WIDTH))
    expected = "pre" if norm_first else "post"
    assert [one.placement for one in sweeps] == [expected] * 2
    assert list(roles.values()) == [expected] * 4


def test_norms_called_as_functions():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.m = Attention(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = x + self.a(F.rms_norm(x, (WIDTH,), eps=1e-6))
            return x + F.rms_norm(self.m(x), (WIDTH,), eps=1e-6)

    model = nn.Sequential(Functional(), Functional())
    _, roles, _ = swept(model, torch.randn(1, TOKENS, WIDTH))
    assert roles == {"0:rms_norm": "pre", "0:rms_norm#2": "output", "1:rms_norm": "pre", "1:rms_norm#2": "output"}


@pytest.mark.parametrize(
    ("name", "config", "expected", "final"),
    [
        ("BertModel", SIZES, {"embeddings.LayerNorm": "embedding"}, None),
        # The norm in the head reads a transformed token, not the stream.
        (
            "BertForMaskedLM",
            SIZES,
            {"bert.embeddings.LayerNorm": "embedding", "cls.predictions.transform.LayerNorm": "unknown"},
            None,
        ),
        ("GPT2Model", GPT, {"ln_f": "final"}, "ln_f"),
        (
            "T5Model",
            T5,
            {"encoder.final_layer_norm": "final", "decoder.final_layer_norm": "final"},
            "decoder.final_layer_norm",
        ),
        (
            "BartModel",
            BART,
            {"encoder.layernorm_embedding": "embedding", "decoder.layernorm_embedding": "embedding"},
            None,
        ),
    ],
)
def test_norms_outside_the_blocks(name, config, expected, final):
    sweeps, roles, final_norm = swept(build(name, config))
    assert all(one.placement in ("pre", "post") for one in sweeps)
    inside = (".layer.", ".layers.", ".block.")
    outside = {path: role for path, role in roles.items() if not any(part in f".{path}" for part in inside)}
    assert {path: role for path, role in outside.items() if not path.startswith("h.")} == expected
    assert final_norm == final


def test_a_pooled_row_is_what_is_left_of_the_stream():
    class Pooled(Stack):
        def __init__(self):
            super().__init__(pre)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x):
            return self.norm(super().forward(x).mean(1))

    _, roles, final_norm = swept(Pooled(), torch.randn(2, TOKENS, WIDTH))
    assert (roles["norm"], final_norm) == ("final", "norm")


def test_without_blocks_there_is_nothing_to_say():
    sweeps, roles, final_norm = swept(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), torch.randn(3, WIDTH)
    )
    assert (sweeps, roles, final_norm) == ((), {"1": "unknown"}, None)


def test_a_block_that_cannot_be_scaled_is_unknown():
    def picky(b, x):
        if x.abs().max() > 50:
            raise RuntimeError("too large")
        return pre(b, x)

    sweeps, _, _ = swept(Stack(picky), torch.randn(1, TOKENS, WIDTH))
    assert [one.placement for one in sweeps] == ["unknown"] * 2
    assert all(math.isnan(one.output_slope) for one in sweeps)
