"""In true float64 nothing is rounded to less, in any family; the model is left as it was found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import normkit as nk
from folded_checkpoints import folded
from normkit import specs
from normkit.checkpoint.build_model import quiet_libraries
from normkit.checkpoint.logits import Agreement, TrueFloat64, compare_logits, half_unit, true_logits
from normkit.errors import InputError
from tiny_models import RECIPES, tiny

NARROW = (torch.float32, torch.float16, torch.bfloat16)
# These round nothing but the angles of their positions, if anything.
EXACT = {"gpt2", "bert", "whisper", "falcon", "falcon_two_norms", "falcon_one_norm", "falcon_sequential"}
EXACT |= {"roberta", "xlm-roberta", "camembert", "mpnet", "distilbert", "electra", "electra_wide"}
EXACT |= {"wav2vec2", "wav2vec2_stable", "hubert", "hubert_stable", "wavlm", "wavlm_stable", "deberta-v2", "albert"}
EXACT |= {"bart", "mbart", "dinov2", "dinov2_gated"}


class Spy(TorchDispatchMode):
    """Notes whatever makes a narrower tensor out of a float64 one, below every mode that was entered after it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [value.dtype for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        made = [value.dtype for value in tree_leaves(out) if isinstance(value, Tensor)]
        if torch.float64 in given and any(dtype in NARROW for dtype in made):
            self.seen.append(str(func))
        return out


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", RECIPES)
def test_nothing_is_rounded_on_the_way(family: str) -> None:
    model, inputs = tiny(family)
    with Spy() as spy:
        logits = true_logits(model, **inputs)
    assert spy.seen == []
    assert logits.dtype == torch.float64
    assert logits.isfinite().all()
    with quiet_libraries():
        model.set_attn_implementation("eager")
    with torch.no_grad(), Spy() as plain:
        model(**inputs)
    with Spy() as spy:
        other = true_logits(model, **inputs)
    assert spy.seen == []
    # The spy sees what there is to be seen.
    assert bool(plain.seen) == (family not in EXACT)
    assert (other - logits).abs().max() < 1e-12


@pytest.mark.slow
def test_the_logits_of_llama_are_those_of_its_formula_in_forty_digits() -> None:
    model, inputs = tiny("llama", eps=1e-5)
    ids = inputs["input_ids"][:1, :5]
    with mpmath.workdps(40):
        expected = exact_llama(model, ids[0].tolist())
    # A logit adds some thousand terms, each at most a hundred times as large as it.
    assert (true_logits(model, input_ids=ids)[0] - expected).abs().max() < 1e-13
    with torch.no_grad():
        assert (model(input_ids=ids).logits[0] - expected).abs().max() > 1e-9


def exact_llama(model: Any, ids: list[int]) -> Tensor:
    """Logits of one row, written down from the paper: RMSNorm, rotated pairs, grouped queries, SwiGLU."""
    config, number = model.config, mpmath.mpf
    heads, width = config.num_attention_heads, config.head_dim
    shared = heads // config.num_key_value_heads
    angles = [number(each) for each in model.model.rotary_emb.inv_freq.double().tolist()]

    def matrix(linear: Any) -> list[list[Any]]:
        return [[number(each) for each in row] for row in linear.weight.tolist()]

    def times(rows: list[list[Any]], x: list[Any]) -> list[Any]:
        return [mpmath.fdot(row, x) for row in rows]

    def normalized(norm: Any, x: list[Any]) -> list[Any]:
        scale = mpmath.sqrt(mpmath.fsum(each**2 for each in x) / len(x) + number(norm.variance_epsilon))
        return [number(gain) * each / scale for gain, each in zip(norm.weight.tolist(), x, strict=True)]

    def rotated(x: list[Any], position: int) -> list[Any]:
        half = width // 2
        out = list(x)
        for index, angle in enumerate(angles):
            cos, sin = mpmath.cos(position * angle), mpmath.sin(position * angle)
            out[index] = x[index] * cos - x[index + half] * sin
            out[index + half] = x[index + half] * cos + x[index] * sin
        return out

    def split(x: list[Any], position: int | None) -> list[list[Any]]:
        parts = [x[start : start + width] for start in range(0, len(x), width)]
        return parts if position is None else [rotated(part, position) for part in parts]

    def attention(block: Any, rows: list[list[Any]]) -> list[list[Any]]:
        query, key, value, out = (matrix(getattr(block, f"{name}_proj")) for name in ("q", "k", "v", "o"))
        queries = [split(times(query, row), place) for place, row in enumerate(rows)]
        keys = [split(times(key, row), place) for place, row in enumerate(rows)]
        values = [split(times(value, row), None) for row in rows]
        mixed = []
        for place in range(len(rows)):
            joined = []
            for head in range(heads):
                scores = [
                    mpmath.exp(mpmath.fdot(queries[place][head], keys[other][head // shared]) / mpmath.sqrt(width))
                    for other in range(place + 1)
                ]
                weights = [score / mpmath.fsum(scores) for score in scores]
                joined += [
                    mpmath.fdot(weights, [values[other][head // shared][column] for other in range(place + 1)])
                    for column in range(width)
                ]
            mixed.append(times(out, joined))
        return mixed

    def mlp(block: Any, row: list[Any]) -> list[Any]:
        gate, up = times(matrix(block.gate_proj), row), times(matrix(block.up_proj), row)
        inner = [a / (1 + mpmath.exp(-a)) * b for a, b in zip(gate, up, strict=True)]
        return times(matrix(block.down_proj), inner)

    def added(rows: list[list[Any]], others: list[list[Any]]) -> list[list[Any]]:
        return [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(rows, others, strict=True)]

    table = model.model.embed_tokens.weight.tolist()
    rows = [[number(each) for each in table[token]] for token in ids]
    for layer in model.model.layers:
        rows = added(rows, attention(layer.self_attn, [normalized(layer.input_layernorm, row) for row in rows]))
        rows = added(rows, [mlp(layer.mlp, normalized(layer.post_attention_layernorm, row)) for row in rows])
    head = matrix(model.lm_head)
    logits = [times(head, normalized(model.model.norm, row)) for row in rows]
    return torch.tensor([[float(each) for each in row] for row in logits], dtype=torch.float64)


DIGITS = torch.tensor([0.1, 0.7, 2.3], dtype=torch.float64) / 3
SINGLE = torch.zeros(3)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.float(),
        lambda x: x.half(),
        lambda x: x.bfloat16(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.bfloat16),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x.to(torch.float32, copy=True),
        lambda x: x.to(SINGLE),
        lambda x: x.to(SINGLE, copy=True),
        lambda x: x.type_as(SINGLE),
        lambda x: x.type(torch.float32),
        lambda x: x.type("torch.FloatTensor"),
        lambda x: x.type(torch.FloatTensor),
    ],
)
def test_whatever_asks_for_a_narrower_dtype_gets_all_digits(ask: Callable[[Tensor], Tensor]) -> None:
    with TrueFloat64():
        given = ask(DIGITS)
    assert given.dtype == torch.float64
    assert torch.equal(given, DIGITS)
    assert ask(DIGITS).dtype in NARROW


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: torch.softmax(x, -1, torch.float32),
        lambda x: x.softmax(-1, dtype=torch.bfloat16),
        lambda x: F.log_softmax(x, dim=-1, dtype=torch.float32),
        lambda x: x.sum(dtype=torch.float32),
        lambda x: torch.mean(x, dim=0, dtype=torch.float32),
        lambda x: torch.full((3,), 1 / 3, dtype=torch.float32) * x,
        lambda x: torch.arange(3).float() / 3 * x,
        lambda x: nk.normalize(x.float(), specs.LLAMA.replace(has_weight=False)),
    ],
)
def test_sums_and_constants_that_ask_for_less_are_float64_too(ask: Callable[[Tensor], Tensor]) -> None:
    with Spy() as spy, TrueFloat64():
        given = ask(DIGITS)
    assert given.dtype == torch.float64
    assert spy.seen == []
    # Outside it is rounded.
    assert not torch.equal(ask(DIGITS).double(), given)


def test_other_dtypes_are_left_alone_and_all_are_after_an_error() -> None:
    with TrueFloat64():
        assert DIGITS.to(torch.int64).dtype == torch.int64
        assert DIGITS.bool().dtype == torch.bool
        assert torch.ones(2).dtype == torch.float32
        assert DIGITS.to(torch.ones(2, dtype=torch.int64)).dtype == torch.int64
        assert SINGLE.to(DIGITS).dtype == torch.float64
        assert DIGITS.type() == "torch.DoubleTensor"
    with pytest.raises(KeyError), TrueFloat64():
        raise KeyError
    assert DIGITS.float().dtype == torch.float32


def test_the_model_is_left_as_it_was_found() -> None:
    model, inputs = tiny("mixtral")
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    model.set_experts_implementation("grouped_mm")
    first = true_logits(model, **inputs)
    assert [module.training for module in model.modules()] == modes
    assert model.config._experts_implementation == "grouped_mm"
    assert not first.requires_grad
    model.set_experts_implementation("eager")
    assert torch.equal(true_logits(model, **inputs), first)


def test_logits_are_of_evaluation_mode_and_of_float64_and_a_body_gives_its_hidden_state() -> None:
    model, inputs = tiny("gpt2", resid_pdrop=0.5)
    expected = true_logits(model, **inputs)
    assert torch.equal(true_logits(model.train(), **inputs), expected)
    model, inputs = tiny("whisper")
    inputs["input_features"] = inputs["input_features"].float()
    given = true_logits(model, **inputs)
    inputs["input_features"] = inputs["input_features"].double()
    assert torch.equal(given, true_logits(model, **inputs))
    model, inputs = tiny("llama")
    assert torch.equal(model.lm_head(true_logits(model.model, **inputs)), true_logits(model, **inputs))
    model, inputs = tiny("llama")
    model.model.norm.float()
    with pytest.raises(InputError, match=r"expected a float64 model, model\.norm\.weight is float32; load it"):
        true_logits(model, **inputs)


def test_any_module_that_gives_an_output_of_transformers_will_do() -> None:
    class Wrapped(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Any) -> Any:
            return self.model(**inputs)

    model, inputs = tiny("llama")
    assert torch.equal(true_logits(Wrapped(model), **inputs), true_logits(model, **inputs))


ALL = ("gain", "bias", "final", "centre", "rms", "value")


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_fold_is_as_near_as_one_rounding_of_its_weights(family, dtype, tmp_path):
    pair = folded(tmp_path, family, dtype, operations=ALL, untie=True)
    inputs = tiny(family)[1]
    unit = torch.finfo(dtype).eps / 2
    models = [nk.load(folder, dtype="float64") for folder in (pair.source, pair.result)]
    found = compare_logits(*models, [inputs], unit=unit)
    assert found.holds
    # Sums of some hundred terms of size 1 to 10, in the unit of the dtype.
    assert unit < found.rounding < 200 * unit
    assert found.difference < 8 * found.rounding + 1e-12
    assert found.tokens == inputs["input_ids"].numel()


def test_another_model_a_changed_gain_and_a_nan_are_too_far_and_the_same_model_is_not():
    (one, inputs), (other, _) = tiny("gpt2"), tiny("gpt2", seed=1)
    found = compare_logits(one, other, [inputs], unit=2.0**-24)
    assert not found.holds
    assert found.difference > 0.1
    (one, inputs), (other, _) = tiny("gpt2"), tiny("gpt2")
    with torch.no_grad():
        other.transformer.h[0].ln_1.weight[3] *= 1.01
    assert not compare_logits(one, other, [inputs], unit=2.0**-24).holds
    (one, inputs), (other, _) = tiny("llama"), tiny("llama")
    found = compare_logits(one, other, [inputs, inputs], unit=0.0)
    assert (found.difference, found.rounding, found.holds) == (0.0, 0.0, True)
    assert found.tokens == 2 * inputs["input_ids"].numel()
    (one, inputs), (other, _) = tiny("llama"), tiny("llama")
    with torch.no_grad():
        other.lm_head.weight[0, 0] = torch.nan
    found = compare_logits(one, other, [inputs], unit=2.0**-8)
    assert found.difference == float("inf")
    assert not found.holds


def test_the_coarsest_dtype_decides():
    assert half_unit({"F32", "BF16", "F64"}) == 2.0**-8
    assert half_unit({"F32"}) == 2.0**-24
    assert half_unit(set()) == 0.0


@pytest.mark.parametrize(("difference", "holds"), [(7.9e-3, True), (8.1e-3, False)])
def test_eight_roundings_are_the_bound(difference, holds):
    found = Agreement(tokens=1, largest=1.0, difference=difference, rounding=1e-3, unit=2.0**-8)
    assert found.holds is holds
    assert found.to_json()["holds"] is holds
