""""""

from __future__ import annotations

import copy
import inspect
import math
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from helpers import diagonal
from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace
from normkit.measurement.hooks import observed
from normkit.measurement.layout import BlockCall, find_blocks
from normkit.measurement.placement import Replayer, ReplayError, sweep

WIDTH, TOKENS, CALLS = 32, 12, ContextVar("calls", default=0)
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


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "dtype"), diagonal([*FAMILIES], [torch.float32, torch.bfloat16]))
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
            self.a, self.m = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = x + self.a(F.rms_norm(x, (WIDTH,), eps=1e-6))
            return x + F.rms_norm(self.m(x), (WIDTH,), eps=1e-6)

    model = nn.Sequential(Functional(), Functional())
    _, roles, _ = swept(model, torch.randn(1, TOKENS, WIDTH))
    assert roles == {"0:rms_norm": "pre", "0:rms_norm#2": "output", "1:rms_norm": "pre", "1:rms_norm#2": "output"}


@pytest.mark.slow
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


class Block(nn.Module):
    """A pre-norm block with one sublayer."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def test_a_pooled_row_is_what_is_left_of_the_stream():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)

        def forward(self, x):
            return self.norm(self.layers(x).mean(1))

    _, roles, final_norm = swept(Pooled(), torch.randn(2, TOKENS, WIDTH))
    assert (roles["norm"], final_norm) == ("final", "norm")


def test_without_blocks_there_is_nothing_to_say():
    sweeps, roles, final_norm = swept(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), torch.randn(3, WIDTH)
    )
    assert (sweeps, roles, final_norm) == ((), {"1": "unknown"}, None)


def test_a_block_that_cannot_be_scaled_is_unknown():
    class Picky(Block):
        def forward(self, x):
            if x.abs().max() > 50:
                raise RuntimeError("too large")
            return super().forward(x)

    sweeps, _, _ = swept(nn.Sequential(Picky(), Picky()), torch.randn(1, TOKENS, WIDTH))
    assert [one.placement for one in sweeps] == ["unknown"] * 2
    assert all(math.isnan(one.output_slope) for one in sweeps)


def test_how_far_a_block_moves_its_stream():
    class Adding(nn.Module):
        """Adds a fixed share of its input, in a direction orthogonal to it; overwrites what it was given."""

        def __init__(self, share):
            super().__init__()
            self.norm, self.share = nn.LayerNorm(WIDTH), share

        def forward(self, x):
            self.norm(x)
            turned = x.reshape(*x.shape[:-1], -1, 2).flip(-1) * torch.tensor([1.0, -1.0])
            return x.add_(self.share * turned.reshape(x.shape))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Adding(0.01), Adding(0.5)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = Model().eval()
    x = torch.randn(1, TOKENS, WIDTH)
    called = trace(model, lambda: model(x.clone()))
    sites, _ = find_sites(model, called)
    sweeps, _, _ = sweep(model, sites, find_blocks(model, called), lambda: model(x.clone()))
    assert [one.branch_share for one in sweeps] == pytest.approx([0.01, 0.5], rel=1e-4)
    assert [one.cosine for one in sweeps] == pytest.approx([1 / math.hypot(1, 0.01), 1 / math.hypot(1, 0.5)], rel=1e-6)


class Noisy(nn.Module):
    """A pre-norm block in training: dropout draws numbers, buffers count calls and remember the last input."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x):
        self.calls += 1
        self.last.copy_(x[0, 0])
        CALLS.set(CALLS.get() + 1)
        return x + nn.functional.dropout(self.linear(self.norm(x)), 0.5, training=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Noisy(), Noisy()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_and_the_random_numbers_are_left_as_they_were(dtype):
    model, x = Model().to(dtype), torch.randn(2, 5, 8, dtype=dtype)
    parameters, before = list(model.parameters()), copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    model(x)
    expected, drawn = copy.deepcopy(model.state_dict()), torch.rand(4)
    called = trace(model, lambda: model(x))
    sites, _ = find_sites(model, called)
    model.load_state_dict(before)
    torch.manual_seed(3)
    CALLS.set(0)
    sweeps, _, _ = sweep(model, sites, find_blocks(model, called), lambda: model(x))
    # Not a replay was counted, in a context variable too, and the run drew the numbers that it draws alone.
    assert CALLS.get() == 2
    assert torch.equal(torch.rand(4), drawn)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert hooks(model) == 0
    # Every replay drew the same numbers too: another dropout mask would be another branch.
    assert [one.placement for one in sweeps] == ["pre", "pre"]


@pytest.mark.slow
def test_hooks_are_gone_when_the_model_raises():
    model, x = Model(), torch.randn(2, 5, 8)
    called = trace(model, lambda: model(x))
    sites, _ = find_sites(model, called)

    def run():
        model(x)
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        sweep(model, sites, find_blocks(model, called), run)
    assert hooks(model) == 0
    assert model.layers[0].calls == 2


def test_arguments_are_replayed_as_they_were_given():
    class Curious(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(4, 4, dtype=torch.bfloat16), []

        def forward(self, positions, x, *, mask, pair, flag):
            self.seen.append((positions, x, mask, pair, flag))
            return (self.linear(x), positions)

    block = Curious()
    x = torch.ones(1, 2, 4, dtype=torch.bfloat16)
    positions, mask, pair = torch.arange(2), torch.ones(2, 2, dtype=torch.bool), (torch.ones(2), torch.ones(2).half())
    called, scaled = BlockCall(path="block", index=0, module=block), {"scale": 10.0, "factors": {}}
    named = {"mask": mask, "pair": pair, "flag": "yes"}
    replay = Replayer().replay(called, (positions, x), named, **scaled, stream=x, dtype=torch.float32)
    seen = block.seen[0]
    assert seen[0] is positions
    assert torch.equal(seen[1], torch.full((1, 2, 4), 10.0))
    assert seen[2] is mask
    assert seen[3][0] is pair[0]
    assert seen[3][1].dtype == torch.float32
    assert seen[4] == "yes"
    assert replay.y.dtype == torch.float32
    assert block.linear.weight.dtype == torch.bfloat16


def test_a_block_that_raises_is_a_replay_error():
    replayer = Replayer()
    arguments, x = {"scale": 1.0, "factors": {}, "dtype": torch.float32}, torch.ones(1, 2, 4)
    with pytest.raises(ReplayError, match="shapes cannot be multiplied"):
        replayer.replay(BlockCall(path="block", index=0, module=nn.Linear(3, 3)), (x,), {}, stream=x, **arguments)
    assert replayer.current is None


@pytest.mark.slow
def test_what_a_norm_took_and_gave():
    model, x = Model().eval(), torch.randn(1, 5, 8)
    seen = []

    class Reader(Replayer):
        def before_block(self, block, args, kwargs, /):
            if self.current is None:
                arguments = {"stream": args[0], "scale": 100.0, "dtype": torch.float32}
                seen.append(self.replay(block, args, kwargs, **arguments, factors={}))
                seen.append(self.replay(block, args, kwargs, **arguments, factors={sites[0].path: 0.0}))

    called = trace(model, lambda: model(x))
    sites, _ = find_sites(model, called)
    with torch.no_grad(), observed(model, sites, find_blocks(model, called)[:1], [], Reader()):
        model(x)
    plain, silenced = seen
    assert list(plain.inputs) == ["layers.0.norm"]
    assert torch.equal(plain.inputs["layers.0.norm"], 100 * x)
    assert torch.equal(plain.outputs["layers.0.norm"], nn.functional.layer_norm(100 * x, (8,)))
    # A silenced norm leaves the linear layer its bias alone, through dropout.
    branch, bias = silenced.y - 100 * x, 2 * model.layers[0].linear.bias
    assert torch.all(torch.isclose(branch, bias, atol=1e-4) | torch.isclose(branch, torch.zeros(()), atol=1e-4))


def test_what_a_norm_overwrites_was_written_down_before():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.div_(x.norm())

    class Copying(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = InPlace()

        def forward(self, x):
            return x + self.norm(x.clone())

    block = Copying()
    site = SimpleNamespace(path="norm", module=block.norm, function=None, parent="norm", ordinal=0)
    replayer, x = Replayer(), torch.ones(1, 2, 4)
    with observed(block, [site], [], [], replayer):
        replay = replayer.replay(
            BlockCall(path="block", index=0, module=block),
            (x,),
            {},
            stream=x,
            scale=3.0,
            factors={},
            dtype=torch.float32,
        )
    assert torch.equal(replay.inputs["norm"], torch.full((1, 2, 4), 3.0))
