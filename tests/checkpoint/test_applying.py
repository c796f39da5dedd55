"""Gains and biases of a plan: constants, quotients, and sums whose terms may hang on other sums."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from normkit.checkpoint import arithmetic
from normkit.checkpoint.applying import MadeVector, vectors
from normkit.checkpoint.arithmetic import rounded
from normkit.checkpoint.folding import Workers
from normkit.checkpoint.matrices import Outcome, made
from normkit.checkpoint.plan import (
    Constant,
    FoldPlan,
    Gain,
    Product,
    Quotient,
    Reference,
    Rows,
    Sum,
    TensorEdit,
    VectorEdit,
)
from normkit.checkpoint.reader import TORCH, CheckpointSource, ModelSource
from normkit.errors import ModelError
from tensor_files import FLOATS, drawn, source_of

F64 = torch.float64


def plan_of(*edits: VectorEdit | TensorEdit) -> FoldPlan:
    return FoldPlan(family="any", architecture="Any", operations=("gain",), untie=False, edits=edits)


def edit_of(
    value: Constant | Quotient | Sum, source: str | None, size: int, dtype: str = "F64", name: str = "o"
) -> VectorEdit:
    return VectorEdit(name=name, source=source, size=size, dtype=dtype, value=value)


def one(source: CheckpointSource | ModelSource, edit: VectorEdit) -> MadeVector:
    return vectors(plan_of(edit), source, Workers())[edit.name]


def close(made_vector: MadeVector, expected: Tensor) -> bool:
    """Equal but for the order of a few additions in float64."""
    return torch.allclose(made_vector.value.to(F64), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", FLOATS)
def test_constants_and_what_is_kept(tmp_path, dtype):
    gain = drawn(dtype, 5)
    source = source_of(tmp_path, g=gain)
    ones = one(source, edit_of(Constant(value=1.0, kept=(1, 3)), "g", 5, dtype))
    assert ones.value.dtype is TORCH[dtype]
    assert ones.value.tolist() == [1, gain[1].item(), 1, gain[3].item(), 1]
    assert ones.residual == 0
    assert one(source, edit_of(Constant(value=0.0), None, 3, dtype)).value.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_bias_of_a_norm_whose_gain_has_left(tmp_path, dtype, offset):
    gain, bias = drawn(dtype, 6), drawn(dtype, 6, seed=1)
    gain[1], gain[2], bias[2] = -offset, -offset, 0
    source = source_of(tmp_path, g=gain, b=bias)
    result = one(source, edit_of(Quotient(gain=Gain(weight="g", offset=offset, kept=(1,))), "b", 6, dtype))
    divisor = gain.to(F64) + offset
    divisor[[1, 2]] = 1
    expected = rounded(bias.to(F64) / divisor, TORCH[dtype])
    assert torch.equal(result.value, expected)
    assert result.value[1] == bias[1]
    assert result.value[2] == 0
    assert result.residual <= torch.finfo(TORCH[dtype]).eps


def test_a_quotient_by_zero_or_beyond_the_range(tmp_path):
    source = source_of(tmp_path, g=torch.tensor([1.0, 0.0]), b=torch.tensor([1.0, 2.0]))
    with pytest.raises(ModelError, match="g is zero where b is not"):
        one(source, edit_of(Quotient(gain=Gain(weight="g")), "b", 2, "F32"))
    source = source_of(tmp_path, g=torch.tensor([1e-4, 1.0]), b=torch.tensor([60.0, 2.0]))
    with pytest.raises(ModelError, match="o does not fit into F16 once folded"):
        one(source, edit_of(Quotient(gain=Gain(weight="g")), "b", 2, "F16"))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5, 4), (4, 5), (4, 4), (1, 6), (6, 1), (0, 3), (3, 0), (300, 7)])
@pytest.mark.parametrize("in_axis", [0, 1])
def test_a_matrix_times_a_vector(tmp_path, dtype, shape, in_axis):
    matrix, by, bias = (
        drawn(dtype, *shape),
        drawn(dtype, shape[in_axis], seed=1),
        drawn(dtype, shape[1 - in_axis], seed=2),
    )
    source = source_of(tmp_path, w=matrix, v=by, c=bias)
    terms = (Product(matrix="w", in_axis=in_axis, vector=Reference(name="v")),)
    oriented = (matrix if in_axis == 1 else matrix.t()).to(F64)
    expected = bias.to(F64) + (oriented @ by.to(F64))
    result = one(source, edit_of(Sum(terms=terms), "c", len(bias)))
    assert close(result, expected)
    assert result.residual == 0
    # Without a bias to start from.
    assert close(one(source, edit_of(Sum(terms=terms), None, len(bias))), oriented @ by.to(F64))
    # In the dtype of the output it is rounded once.
    narrow = one(source, edit_of(Sum(terms=terms), "c", len(bias), "BF16"))
    assert torch.equal(narrow.value, rounded(result.value, torch.bfloat16))
    assert narrow.residual <= torch.finfo(torch.bfloat16).eps


def test_several_terms_and_a_mean_that_goes(tmp_path):
    source = source_of(
        tmp_path, a=drawn("F32", 4, 3), b=drawn("F32", 2, 4), v=drawn("F32", 3), w=drawn("F32", 2), c=drawn("F32", 4)
    )
    terms = (
        Product(matrix="a", in_axis=1, vector=Reference(name="v")),
        Product(matrix="b", in_axis=0, vector=Reference(name="w")),
    )
    expected = (
        drawn("F32", 4).to(F64)
        + drawn("F32", 4, 3).to(F64) @ drawn("F32", 3).to(F64)
        + drawn("F32", 2, 4).to(F64).t() @ drawn("F32", 2).to(F64)
    )
    assert close(one(source, edit_of(Sum(terms=terms), "c", 4)), expected)
    centred = one(source, edit_of(Sum(terms=terms, is_centred=True), "c", 4))
    assert close(centred, expected - expected.mean())
    assert abs(float(centred.value.mean())) < 1e-15


def test_a_bias_that_only_loses_its_mean_and_values_that_heads_share(tmp_path):
    source = source_of(tmp_path, c=torch.tensor([1.0, 2.0, 6.0], dtype=torch.bfloat16))
    assert one(source, edit_of(Sum(is_centred=True), "c", 3, "BF16")).value.tolist() == [-2, -1, 3]
    # Two heads with values of two each, three query heads on each of them.
    source = source_of(tmp_path, v=torch.tensor([1.0, 2.0, 3.0, 4.0]), w=torch.eye(12))
    reference = Reference(name="v", heads=2, repeat=3)
    terms = (Product(matrix="w", in_axis=1, vector=reference),)
    assert one(source, edit_of(Sum(terms=terms), None, 12)).value.tolist() == [1, 2] * 3 + [3, 4] * 3


def test_a_row_of_values_is_taken_out_of_a_fused_bias(tmp_path):
    # Three heads of two, each as (query, key, value): the values are the last two of each block of six.
    fused = torch.arange(18.0)
    source = source_of(tmp_path, c=fused, w=torch.eye(6))
    rows = Rows(blocks=3, tail=2)
    terms = (Product(matrix="w", in_axis=1, vector=Reference(name="c", rows=rows)),)
    assert one(source, edit_of(Sum(terms=terms), None, 6)).value.tolist() == [4, 5, 10, 11, 16, 17]
    zeroed = one(source, edit_of(Sum(zeroed=rows), "c", 18)).value
    assert zeroed.tolist() == [0, 1, 2, 3, 0, 0, 6, 7, 8, 9, 0, 0, 12, 13, 14, 15, 0, 0]
    # Queries, keys and values one after the other.
    straight = Rows(blocks=1, tail=6)
    terms = (Product(matrix="w", in_axis=1, vector=Reference(name="c", rows=straight)),)
    assert one(source, edit_of(Sum(terms=terms), None, 6)).value.tolist() == [12, 13, 14, 15, 16, 17]


def chain(dtype: str) -> tuple[dict[str, Tensor], tuple[VectorEdit, ...]]:
    """The bias of a norm goes into the values, and these into the output: both sums, in the wrong order."""
    tensors = {
        "b": drawn(dtype, 6),
        "qkv": drawn(dtype, 12, 6),
        "c": drawn(dtype, 12, seed=1),
        "o": drawn(dtype, 6, 4),
        "d": drawn(dtype, 6),
    }
    values = Rows(blocks=1, tail=4)
    first = Sum(terms=(Product(matrix="qkv", in_axis=1, vector=Reference(name="b")),), zeroed=values)
    second = Sum(terms=(Product(matrix="o", in_axis=1, vector=Reference(name="c", is_folded=True, rows=values)),))
    return tensors, (edit_of(second, "d", 6, dtype, "d"), edit_of(first, "c", 12, dtype, "c"))


@pytest.mark.parametrize("threads", [1, 4])
def test_a_sum_of_another_sum(tmp_path, threads):
    tensors, edits = chain("BF16")
    result = vectors(plan_of(*edits), source_of(tmp_path, **tensors), Workers(threads))
    assert list(result) == ["d", "c"]
    wide = {name: tensor.to(F64) for name, tensor in tensors.items()}
    first = wide["c"] + wide["qkv"] @ wide["b"]
    # Not what is written: neither rounded nor zeroed.
    second = wide["d"] + wide["o"] @ first[8:]
    assert torch.equal(result["d"].value, rounded(second, torch.bfloat16))
    assert torch.equal(result["c"].value[:8], rounded(first[:8], torch.bfloat16))
    assert not result["c"].value[8:].any()


@pytest.mark.slow
def test_bits_do_not_depend_on_jobs_chunks_or_threads(tmp_path, monkeypatch):
    edits = [
        edit_of(
            Sum(terms=(Product(matrix="w", in_axis=axis, vector=Reference(name="v")),)),
            None,
            300,
            "F64",
            f"o{axis}{number}",
        )
        for axis in (0, 1)
        for number in range(5)
    ]
    source = source_of(tmp_path, w=drawn("BF16", 300, 300), v=drawn("BF16", 300, seed=1) * 1e6)
    expected = vectors(plan_of(*edits), source, Workers())
    threads = torch.get_num_threads()
    for size, threads, count in ((2**17, 3, 1), (300, 1, 3), (1000, 2, 2), (77_777, 5, 1)):
        monkeypatch.setattr(arithmetic, "CHUNK", size)
        try:
            torch.set_num_threads(count)
            found = vectors(plan_of(*edits), source, Workers(threads))
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(found[name].value, expected[name].value) for name in expected)


def test_a_module_and_its_file_give_the_same_bits(tmp_path):
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    terms = (Product(matrix="1.weight", in_axis=1, vector=Reference(name="0.bias")),)
    vector_edit = edit_of(Sum(terms=terms), "1.bias", 5, "F32")
    matrix_edit = TensorEdit(name="m", source="1.weight", dtype="F32", gain=Gain(weight="0.weight"), gain_axis=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    results = []
    for source in (ModelSource(model), CheckpointSource(tmp_path)):
        results.append([one(source, vector_edit).value, torch.cat(list(made(matrix_edit, source, Outcome())))])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_float64_parameters_of_a_module_are_left_alone():
    model = nn.LayerNorm(4).double()
    source = ModelSource(model)
    one(source, edit_of(Quotient(gain=Gain(weight="weight", kept=(1,))), "bias", 4))
    zeroed = one(source, edit_of(Sum(zeroed=Rows(blocks=1, tail=2)), "weight", 4))
    kept = one(source, edit_of(Constant(value=3.0, kept=(0,)), "weight", 4))
    assert zeroed.value.tolist() == [1, 1, 0, 0]
    assert kept.value.tolist() == [1, 3, 3, 3]
    assert model.weight.tolist() == [1, 1, 1, 1]


def test_progress_is_told(tmp_path):
    _, edits = chain("F32")
    told = []
    vectors(plan_of(*edits), source_of(tmp_path, **chain("F32")[0]), Workers(progress=lambda *step: told.append(step)))
    assert told == [("gains and biases", 1, 2), ("gains and biases", 2, 2)]
    assert vectors(plan_of(), source_of(tmp_path, x=torch.ones(1)), Workers()) == {}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bad", ["w", "v", "c"])
def test_weights_that_are_no_numbers(tmp_path, bad, threads):
    tensors = {"w": drawn("BF16", 5, 4), "v": drawn("BF16", 4), "c": drawn("BF16", 5)}
    tensors[bad].view(-1)[2] = math.nan
    terms = (Product(matrix="w", in_axis=1, vector=Reference(name="v")),)
    with pytest.raises(ModelError, match=f"{bad} holds a NaN"):
        vectors(plan_of(edit_of(Sum(terms=terms), "c", 5)), source_of(tmp_path, **tensors), Workers(threads))


def test_tensors_that_do_not_fit_the_plan(tmp_path):
    source = source_of(
        tmp_path, w=drawn("F32", 5, 4), v=drawn("F32", 4), c=drawn("F32", 5), i=torch.ones(5, 4, dtype=torch.int8)
    )

    def terms(matrix: str, in_axis: int, name: str) -> tuple[Product, ...]:
        return (Product(matrix=matrix, in_axis=in_axis, vector=Reference(name=name)),)

    for edit, said in (
        (
            edit_of(Sum(terms=terms("w", 0, "v")), "c", 5),
            r"expected a matrix with 4 along axis 0 in w, found F32 of shape",
        ),
        (edit_of(Sum(terms=terms("i", 1, "v")), "c", 5), r"in i, found I8"),
        (edit_of(Sum(terms=terms("v", 1, "v")), "c", 5), r"in v, found F32 of shape \(4,\)"),
        (edit_of(Sum(terms=terms("w", 0, "c")), "c", 5), "expected 5 elements for o, w gives 4"),
        (edit_of(Sum(), "c", 6), "expected 6 elements for o, c gives 5"),
        (edit_of(Quotient(gain=Gain(weight="v")), "c", 5), "expected 5 elements for o, v gives 4"),
        (edit_of(Sum(terms=terms("absent", 1, "v")), "c", 5), "expected the tensor absent, found none"),
    ):
        with pytest.raises(ModelError, match=said):
            one(source, edit)
