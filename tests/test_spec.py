"""NormSpec is a value: checked, printed, written to JSON and back without loss."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import given

from helpers import PRESETS, valid_specs
from normkit import NormSpec, specs
from normkit.errors import SpecError

# One bad value each, and what the one-line message must say.
BAD = [
    ({"eps_placement": "under"}, "eps_placement must be one of 'inside', 'outside', 'clamp', got 'under'"),
    ({"correction": 2}, "correction must be one of 0, 1, got 2"),
    ({"correction": True}, "correction must be one of 0, 1, got True"),
    ({"correction": 1.0}, "correction must be one of 0, 1, got 1.0"),
    ({"reduction": "max"}, "reduction must be one of 'mean', 'sum', got 'max'"),
    ({"multiplier": 2.0}, "multiplier must be one of 'one', 'sqrt_n', got 2.0"),
    ({"offset_dtype": "bfloat16"}, "offset_dtype must be one of 'float32', 'parameter', got 'bfloat16'"),
    ({"weight_placement": None}, "weight_placement must be one of 'after', 'before', got None"),
    ({"statistics_dtype": "float64"}, "statistics_dtype must be one of 'float32', 'input', got 'float64'"),
    ({"cast": ["late"]}, "cast must be one of 'early', 'late', 'weight', 'input', 'none', got ['late']"),
    (
        {"output_dtype": "float64"},
        "output_dtype must be one of 'input', 'promote', 'weight', 'float32', got 'float64'",
    ),
    ({"centre_numerator": 1}, "centre_numerator must be True or False, got 1"),
    ({"centre_statistics": None}, "centre_statistics must be True or False, got None"),
    ({"has_weight": "yes"}, "has_weight must be True or False, got 'yes'"),
    ({"has_bias": 0}, "has_bias must be True or False, got 0"),
    ({"round_rstd": 1}, "round_rstd must be True or False, got 1"),
    ({"eps": float("nan")}, "eps must be a finite number or None, got nan"),
    ({"eps": float("inf")}, "eps must be a finite number or None, got inf"),
    ({"eps": "1e-5"}, "eps must be a finite number or None, got '1e-5'"),
    ({"eps": True}, "eps must be a finite number or None, got True"),
    ({"eps": 1j}, "eps must be a finite number or None, got 1j"),
    ({"weight_offset": float("-inf")}, "weight_offset must be a finite number, got -inf"),
    ({"weight_offset": None}, "weight_offset must be a finite number, got None"),
    ({"axes": (0,)}, "or one of 'all_but_batch', 'all_but_batch_channels_last', got (0,)"),
    ({"axes": ()}, "or one of 'all_but_batch', 'all_but_batch_channels_last', got ()"),
    ({"axes": (-2,)}, "or one of 'all_but_batch', 'all_but_batch_channels_last', got (-2,)"),
    ({"axes": (-1, -2)}, "or one of 'all_but_batch', 'all_but_batch_channels_last', got (-1, -2)"),
    ({"axes": (1, 2)}, "or one of 'all_but_batch', 'all_but_batch_channels_last', got (1, 2)"),
    ({"axes": (True,)}, "or one of 'all_but_batch', 'all_but_batch_channels_last', got (True,)"),
    ({"axes": [-1]}, "or one of 'all_but_batch', 'all_but_batch_channels_last', got [-1]"),
    ({"axes": -1}, "or one of 'all_but_batch', 'all_but_batch_channels_last', got -1"),
    ({"axes": "channels"}, "or one of 'all_but_batch', 'all_but_batch_channels_last', got 'channels'"),
    ({"groups": 0}, "groups must be a whole number of at least 1, got 0"),
    ({"groups": 2.0}, "groups must be a whole number of at least 1, got 2.0"),
    ({"groups": True}, "groups must be a whole number of at least 1, got True"),
    ({"groups": 2, "axes": (1,)}, "one of 'all_but_batch', 'all_but_batch_channels_last', got axes (1,)"),
    ({"axes": "channels_last"}, "or one of 'all_but_batch', 'all_but_batch_channels_last', got 'channels_last'"),
    ({"groups": 2, "axes": (-2, -1)}, "one of 'all_but_batch', 'all_but_batch_channels_last', got axes (-2, -1)"),
    ({"reduction": "sum", "correction": 1}, "correction=1 divides by n - 1; with reduction='sum' nothing is divided"),
    ({"has_weight": False, "weight_offset": 1.0}, "weight_offset and weight_placement='before' need has_weight=True"),
    ({"has_weight": False, "weight_placement": "before"}, "weight_placement='before' need has_weight=True"),
    ({"cast": "none"}, "cast='none' keeps everything in the input's dtype: statistics_dtype='input'"),
]

STRINGS = {
    "TORCH_LAYER_NORM": "y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05) + bias",
    "BERT": "y = weight * (x - mean(x)) / sqrt(var(x) + 1e-12) + bias",
    "MODERNBERT": "y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05)",
    "OLMO": "y = (x - mean(x)) / sqrt(var(x) + 1e-05)",
    "COHERE": "y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05)",
    "NEMOTRON": "y = (1 + weight) * (x - mean(x)) / sqrt(var(x) + 1e-05) + bias [offset added in the weight's dtype]",
    "DEBERTA": "y = weight * (x - mean(x)) / sqrt(var(x) + 1e-07) + bias [early cast, promoted output]",
    "CONVNEXT": "y = weight * (x - mean(x)) / sqrt(var(x) + 1e-06) + bias [over axis 1]",
    "POOLFORMER": "y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05) + bias [over all axes but the first]",
    "ANNOTATED_TRANSFORMER": "y = weight * (x - mean(x)) / (std(x, correction=1) + 1e-06) + bias [no cast]",
    "TORCH_RMS_NORM": "y = weight * x / sqrt(mean(x^2) + machine_eps)",
    "OLMO2": "y = weight * x / sqrt(mean(x^2) + 1e-06)",
    "LLAMA": "y = weight * x / sqrt(mean(x^2) + 1e-06) [early cast, promoted output]",
    "GEMMA": "y = (1 + weight) * x / sqrt(mean(x^2) + 1e-06)",
    "MUSE_SPARK": "y = (1 + weight) * x / sqrt(mean(x^2) + 1e-06) [offset added in the weight's dtype]",
    "MUSE_SPARK_INPUT_SCALED": (
        "y = u / sqrt(mean(u^2) + 1e-06), u = (1 + weight) * x [offset added in the weight's dtype]"
    ),
    "T5": "y = weight * x / sqrt(mean(x^2) + 1e-06) [cast to the weight's dtype, output in the weight's dtype]",
    "NANOCHAT": "y = x / sqrt(mean(x^2) + 1e-06)",
    "DEEPSEEK_V4_UNWEIGHTED": "y = x / sqrt(mean(x^2) + 1e-06) [rounded rstd]",
    "IMAGEGPT": "y = weight * x / sqrt(mean(x^2) + 1e-05) [no cast, promoted output]",
    "POCKET_TTS": "y = weight * x / sqrt(var(x, correction=1) + 1e-05) [no cast, rounded rstd, promoted output]",
    "SCALE_NORM": "y = weight * x / max(norm(x), 1e-05)",
    "L2_NORM": "y = x / max(norm(x), 1e-12) [no cast]",
    "X_TRANSFORMERS_RMS": "y = weight * sqrt(n) * x / max(norm(x), 1e-12) [no cast, promoted output]",
}

# What no preset shows.
MORE_STRINGS = [
    (NormSpec(eps=0), "y = weight * (x - mean(x)) / std(x) + bias"),
    (NormSpec(eps=-0.5), "y = weight * (x - mean(x)) / sqrt(var(x) - 0.5) + bias"),
    (NormSpec(reduction="sum"), "y = weight * (x - mean(x)) / sqrt(sum((x - mean(x))^2) + 1e-05) + bias"),
    (NormSpec(reduction="sum", eps=0.0), "y = weight * (x - mean(x)) / norm(x - mean(x)) + bias"),
    (
        specs.OLMO2.replace(correction=1, eps_placement="outside"),
        "y = weight * x / (sqrt(sum(x^2) / (n - 1)) + 1e-06)",
    ),
    (specs.OLMO2.replace(correction=1), "y = weight * x / sqrt(sum(x^2) / (n - 1) + 1e-06)"),
    (specs.OLMO2.replace(eps_placement="clamp", eps=None), "y = weight * x / max(rms(x), machine_eps)"),
    (
        specs.LLAMA.replace(output_dtype="float32"),
        "y = weight * x / sqrt(mean(x^2) + 1e-06) [early cast, output in float32]",
    ),
    (specs.OLMO2.replace(cast="input"), "y = weight * x / sqrt(mean(x^2) + 1e-06) [early cast, gain and bias too]"),
    (specs.GEMMA.replace(weight_offset=-0.5), "y = (-0.5 + weight) * x / sqrt(mean(x^2) + 1e-06)"),
    (
        specs.OLMO2.replace(groups=4, statistics_dtype="input"),
        "y = weight * x / sqrt(mean(x^2) + 1e-06) [4 groups, statistics in the input's dtype]",
    ),
    (
        NormSpec(axes="all_but_batch_channels_last", groups=4, has_bias=False),
        "y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05) [over all axes but the first, channels last, 4 groups]",
    ),
    (
        NormSpec(axes=(-2, -1), weight_placement="before"),
        "y = (u - mean(u)) / sqrt(var(u) + 1e-05) + bias, u = weight * x [over axes -2, -1]",
    ),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=[str(values) for values, _ in BAD])
def test_a_bad_value_gives_one_clear_line(values, message):
    with pytest.raises(SpecError) as caught:
        NormSpec(**values)
    assert str(caught.value).endswith(message)
    assert "\n" not in str(caught.value)


def test_every_field_has_a_bad_value():
    assert {name for values, _ in BAD for name in values} == {field.name for field in dataclasses.fields(NormSpec)}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_print_as_written(name):
    assert str(PRESETS[name]) == STRINGS[name]


@pytest.mark.parametrize(("spec", "expected"), MORE_STRINGS)
def test_unusual_specs_print_as_written(spec, expected):
    assert str(spec) == expected


@pytest.mark.slow
@given(valid_specs())
def test_every_valid_spec_survives_json_pickle_and_copy_and_prints_on_one_line(spec):
    text = json.dumps(spec.to_json(), allow_nan=False)
    back = NormSpec.from_json(json.loads(text))
    assert back == spec
    assert hash(back) == hash(spec)
    assert json.dumps(back.to_json()) == text
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
    assert str(spec).startswith("y = ")
    assert "\n" not in str(spec)
    assert str(spec).count("(") == str(spec).count(")")


@pytest.mark.slow
@given(valid_specs())
def test_latex_is_one_balanced_line(spec):
    latex = spec._repr_latex_()
    assert "\n" not in latex
    assert latex.startswith("$y = ")
    assert latex.endswith("$")
    assert latex.count("$") == 2
    depth = 0
    for character in latex:
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0
    assert latex.count("(") == latex.count(")")
    assert "e-" not in latex
    assert "+ -" not in latex


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (NormSpec(), r"$y = w \odot \frac{x - \mu_x}{\sqrt{\tfrac{1}{n}\sum_i (x_i - \mu_x)^2 + 10^{-5}}} + b$"),
        (
            specs.ANNOTATED_TRANSFORMER.replace(eps=2e-6),
            r"$y = w \odot \frac{x - \mu_x}{\sqrt{\tfrac{1}{n - 1}\sum_i (x_i - \mu_x)^2} + 2 \cdot 10^{-6}} + b$",
        ),
        (specs.GEMMA, r"$y = (1 + w) \odot \frac{x}{\sqrt{\tfrac{1}{n}\sum_i x_i^2 + 10^{-6}}}$"),
        (specs.X_TRANSFORMERS_RMS, r"$y = w \odot \sqrt{n}\,\frac{x}{\max(\sqrt{\sum_i x_i^2}, 10^{-12})}$"),
        (specs.TORCH_RMS_NORM.replace(has_weight=False, eps=0), r"$y = \frac{x}{\sqrt{\tfrac{1}{n}\sum_i x_i^2}}$"),
        (
            NormSpec(has_weight=False, has_bias=False, eps=-1e-5),
            r"$y = \frac{x - \mu_x}{\sqrt{\tfrac{1}{n}\sum_i (x_i - \mu_x)^2 - 10^{-5}}}$",
        ),
    ],
)
def test_latex_is_the_formula(spec, expected):
    assert spec._repr_latex_() == expected


def test_a_spec_is_frozen_and_hashable_and_replace_checks_too():
    with pytest.raises(dataclasses.FrozenInstanceError):
        specs.LLAMA.eps = 1e-5
    assert {specs.LLAMA: "llama"}[specs.OLMO2.replace(cast="early", output_dtype="promote")] == "llama"
    assert specs.LLAMA.replace(eps=1e-5) == dataclasses.replace(specs.LLAMA, eps=1e-5)
    with pytest.raises(SpecError, match="eps must be a finite number"):
        specs.LLAMA.replace(eps=float("nan"))


def test_json_is_the_same_for_numbers_of_other_types_takes_defaults_and_refuses_strangers():
    assert NormSpec(eps=0) == NormSpec(eps=0.0)
    pairs = (
        (NormSpec(eps=0, weight_offset=1), NormSpec(eps=0.0, weight_offset=1.0)),
        (NormSpec(eps=np.float32(0.5)), NormSpec(eps=0.5)),
    )
    assert all(json.dumps(one.to_json()) == json.dumps(other.to_json()) for one, other in pairs)
    assert NormSpec.from_json({}) == NormSpec()
    assert all(NormSpec.from_json(json.loads(json.dumps(one.to_json()))) == one for one in PRESETS.values())
    assert NormSpec.from_json({"axes": [-2, -1]}).axes == (-2, -1)
    with pytest.raises(SpecError, match="a NormSpec has no 'epsilon', 'gamma'; it has centre_numerator, "):
        NormSpec.from_json({"gamma": 1, "epsilon": 1e-5})
