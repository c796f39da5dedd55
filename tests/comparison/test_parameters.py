"""Which tensors are gains and biases of norms."""

from __future__ import annotations

import pytest

from normkit.checkpoint.reader import TensorInfo
from normkit.comparison.parameters import LONGEST, Sorted, norm_tensors


def sorted_of(**shapes: tuple[int, ...]) -> Sorted:
    return norm_tensors({name.replace("__", "."): TensorInfo("F32", shape) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.0.input_layernorm.weight", "h.3.ln_1.weight", "blk.0.attn_norm.weight", "encoder.ln1.gamma"),
        *("params.decoder.layers.pre_self_attention_norm.scale", "to_out.1.g", "layers.3.2.weight", "blocks.3.norm1"),
        *("attn_norm_weight", "weight", "model/layers/0/norm/weight"),
    ],
)
def test_a_vector_without_a_matrix_beside_it_is_a_gain(name: str) -> None:
    found = norm_tensors({name: TensorInfo("BF16", (64,))})
    assert [norm.weight for norm in found.norms] == [name]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("encoder.layer.0.ls1.gamma", "scale of a branch"),
        ("layers.0.layer_scale.weight", "scale of a branch"),
        ("mixer.D.weight", "parameter of a state-space layer"),
        ("act.weight", "parameter of an activation"),
    ],
)
def test_other_vectors_are_left_out_with_the_reason(name: str, reason: str) -> None:
    found = norm_tensors({name: TensorInfo("F32", (64,))})
    assert found.norms == ()
    assert found.left_out == {name: reason}


@pytest.mark.parametrize("name", ["mixer.A_log", "mixer.dt_bias", "cls_token", "attn.sinks", "x.running_mean"])
def test_vectors_with_no_gain_s_name_are_other_tensors(name: str) -> None:
    assert norm_tensors({name: TensorInfo("F32", (64,))}).others == (name,)


def test_a_matrix_makes_the_vector_beside_it_a_linear_bias() -> None:
    found = sorted_of(q__weight=(8, 8), q__bias=(8,), ln__weight=(8,), ln__bias=(8,), wte__weight=(50, 8))
    assert [(norm.path, norm.weight, norm.bias) for norm in found.norms] == [("ln", "ln.weight", "ln.bias")]
    assert found.others == ("q.weight", "q.bias", "wte.weight")


def test_a_gain_for_each_head_is_a_norm_s_if_its_name_says_so() -> None:
    assert [norm.shape for norm in sorted_of(q_norm__weight=(4, 16)).norms] == [(4, 16)]
    assert sorted_of(proj__weight=(4, 16)).norms == ()


def test_a_bias_alone_needs_the_name() -> None:
    assert [norm.bias for norm in sorted_of(ln_f__bias=(8,)).norms] == ["ln_f.bias"]
    assert sorted_of(head__bias=(8,)).norms == ()


def test_sizes_and_dtypes_that_no_gain_has() -> None:
    assert sorted_of(norm__weight=(1,)).left_out == {"norm.weight": "it has one number"}
    assert "numbers" in sorted_of(norm__weight=(LONGEST + 1,)).left_out["norm.weight"]
    assert norm_tensors({"norm.weight": TensorInfo("U8", (8,))}).left_out == {"norm.weight": "its numbers are U8"}


def test_a_bias_of_another_size_is_no_norm_s() -> None:
    assert [norm.bias for norm in sorted_of(norm__weight=(8,), norm__bias=(9,)).norms] == [None]


@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 64), (1, 64, 1, 1), (64, 1, 1)])
def test_axes_of_one_number_do_not_hide_a_gain(shape: tuple[int, ...]) -> None:
    found = norm_tensors(
        {"h.0.input_layernorm.weight": TensorInfo("F32", shape), "h.0.input_layernorm.bias": TensorInfo("F32", (64,))}
    )
    assert [(norm.weight, norm.bias, norm.shape) for norm in found.norms] == [
        ("h.0.input_layernorm.weight", "h.0.input_layernorm.bias", (64,))
    ]


def test_without_a_norm_s_name_only_a_long_last_axis_beside_ones_is_a_gain() -> None:
    assert [norm.weight for norm in sorted_of(stack__0__n1__g=(1, 1, 64)).norms] == ["stack.0.n1.g"]
    assert sorted_of(score__weight=(1, 64), conv__weight=(1, 1, 3), depth__weight=(64, 1, 1)).norms == ()
