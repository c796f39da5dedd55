"""Matrices of any shape: multiplied along one axis, centred along another, rounded once, in chunks of any size."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from normkit.checkpoint import arithmetic
from normkit.checkpoint.arithmetic import rounded
from normkit.checkpoint.hadamard import rotate_columns
from normkit.checkpoint.matrices import Outcome, factors, made
from normkit.checkpoint.plan import Gain, Rotation, Rows, TensorEdit
from normkit.checkpoint.reader import NAME, TORCH, CheckpointSource, ModelSource, vector
from normkit.errors import ModelError
from normkit.kernels import cpu
from tensor_files import FLOATS, drawn, same_bits, source_of

# Experts with the inner axis in the middle, patches of a convolution, positions with an axis of one, and what is left.
SHAPES = [(6, 5), (5, 6), (7, 7), (9, 1), (1, 9), (1, 1), (3, 4, 10), (6, 3, 2, 2), (1, 8, 5), (4, 1, 3), (2, 3, 4, 5)]


def gained(dtype: str, size: int) -> Tensor:
    """A gain with a zero, a one and negative numbers."""
    gain = drawn(dtype, size, seed=1)
    gain[size // 2] = 0
    gain[0] = 1
    return gain


def edited(source: CheckpointSource, edit: TensorEdit) -> tuple[Tensor, float]:
    outcome = Outcome()
    chunks = list(made(edit, source, outcome))
    shape = source.tensors[edit.source].shape
    assert all(chunk.dtype is TORCH[edit.dtype] and chunk.ndim == 2 and chunk.is_contiguous() for chunk in chunks)
    return torch.cat(chunks).view(shape), outcome.residual


def along(values: Tensor, axis: int, axes: int) -> Tensor:
    return values.view([-1 if axis == place else 1 for place in range(axes)])


@pytest.fixture(params=[1, 7, 2**17])
def chunk(request, monkeypatch):
    monkeypatch.setattr(arithmetic, "CHUNK", request.param)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_gain_along_any_axis(tmp_path, offset, dtype):
    for shape, axis in [(sizes, axis) for sizes in SHAPES for axis in range(len(sizes))]:
        weight, size = drawn(dtype, *shape), shape[axis]
        gain = gained(dtype, size)
        source = source_of(tmp_path, w=weight, g=gain)
        edit = TensorEdit(name="o", source="w", dtype=dtype, gain=Gain(weight="g", offset=offset), gain_axis=axis)
        result, residual = edited(source, edit)
        exact = [
            Fraction(x) * Fraction(g)
            for x, g in zip(
                weight.flatten().tolist(),
                along(gain.to(torch.float64) + offset, axis, len(shape)).expand(shape).flatten().tolist(),
                strict=True,
            )
        ]
        # What is nearest leaves no neighbour that is nearer.
        for value, truth in zip(result.flatten(), exact, strict=True):
            error = abs(Fraction(value.item()) - truth)
            for end in (math.inf, -math.inf):
                neighbour = torch.nextafter(value, torch.tensor(end, dtype=value.dtype))
                assert error <= abs(Fraction(neighbour.item()) - truth)
        assert residual == 0.0


def test_a_gain_of_another_dtype_and_a_wider_output(tmp_path):
    weight, gain = drawn("BF16", 6, 5), drawn("F32", 5, seed=2)
    source = source_of(tmp_path, w=weight, g=gain)
    product = weight.to(torch.float64) * gain.to(torch.float64)
    for dtype in FLOATS:
        edit = TensorEdit(name="o", source="w", dtype=dtype, gain=Gain(weight="g"), gain_axis=1)
        assert same_bits(edited(source, edit)[0], rounded(product, TORCH[dtype]))
    for narrow, wide in (("BF16", "F32"), ("F16", "F32"), ("F32", "F64")):
        weight = drawn(narrow, 6, 5)
        result, _ = edited(source_of(tmp_path, w=weight), TensorEdit(name="o", source="w", dtype=wide))
        assert same_bits(result, weight.to(TORCH[wide]))


def test_coordinates_that_the_norm_keeps(tmp_path):
    weight, gain = drawn("BF16", 4, 6), drawn("BF16", 6)
    gain[[1, 4]] = 0
    source = source_of(tmp_path, w=weight, g=gain)
    kept = Gain(weight="g", kept=(1, 4))
    assert factors(kept, vector(source, kept.weight))[[1, 4]].tolist() == [1, 1]
    result, _ = edited(source, TensorEdit(name="o", source="w", dtype="BF16", gain=kept, gain_axis=1))
    assert same_bits(result[:, [1, 4]], weight[:, [1, 4]])
    assert same_bits(result[:, [0, 2]], weight[:, [0, 2]] * gain[[0, 2]])
    # Where a gain is added to one, zero is what is stored as -1.
    source = source_of(tmp_path, w=weight, g=gain - 1)
    shifted = Gain(weight="g", offset=1.0, kept=(1, 4))
    assert factors(shifted, vector(source, shifted.weight))[[1, 4]].tolist() == [1, 1]


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gain_axis", [None, 0, -1])
def test_centring_along_any_axis(tmp_path, dtype, gain_axis):
    for shape in SHAPES:
        check_centring(tmp_path, shape, dtype, gain_axis)


def check_centring(tmp_path: Path, shape: tuple[int, ...], dtype: str, gain_axis: int | None) -> None:
    weight = drawn(dtype, *shape) + 3
    gain = None
    axes = len(shape)
    exact = weight.to(torch.float64)
    tensors = {"w": weight}
    if gain_axis is not None:
        gain_axis %= axes
        tensors["g"] = gained(dtype, shape[gain_axis])
        exact = exact * along(tensors["g"].to(torch.float64), gain_axis, axes)
        gain = Gain(weight="g")
    source = source_of(tmp_path, **tensors)
    for axis in range(axes):
        edit = TensorEdit(name="o", source="w", dtype=dtype, gain=gain, gain_axis=gain_axis, centred_axis=axis)
        result, residual = edited(source, edit)
        truth = exact - exact.mean(axis, keepdim=True)
        # Half a unit in the last place, and what float64 adds to sums of a few numbers of that size.
        spacing = torch.finfo(TORCH[dtype]).eps * truth.abs() / 2 + torch.finfo(TORCH[dtype]).smallest_normal
        assert bool(((result.to(torch.float64) - truth).abs() <= spacing + 1e-14).all())
        written = result.to(torch.float64)
        means, size = written.mean(axis).abs().max(), written.square().mean().sqrt()
        assert residual == pytest.approx(float(means / size) if size else 0.0, rel=1e-6, abs=1e-14)


def test_centring_is_rounded_once_and_nothing_is_left_of_a_constant(tmp_path):
    # 16 bits of a sum that is a little more than a middle; through float32 it would be a middle.
    weight = torch.tensor([[1 + 2.0**-8 + 2.0**-40, -1 - 2.0**-8 - 2.0**-40]], dtype=torch.float64)
    source = source_of(tmp_path, w=weight)
    result, _ = edited(source, TensorEdit(name="o", source="w", dtype="BF16", centred_axis=1))
    assert result.tolist() == [[1 + 2.0**-7, -1 - 2.0**-7]]
    source = source_of(tmp_path, w=torch.full((3, 4), 2.0))
    result, residual = edited(source, TensorEdit(name="o", source="w", dtype="F32", centred_axis=0))
    assert not result.any()
    assert residual == 0.0


@pytest.mark.slow
@pytest.mark.usefixtures("chunk")
def test_bits_do_not_depend_on_chunks(tmp_path):
    weight = drawn("BF16", 40, 30) + 1
    source = source_of(tmp_path, w=weight, g=gained("F32", 40))
    expected = []
    for size in (10**6, arithmetic.CHUNK):
        arithmetic.CHUNK = size
        expected.append(
            [
                edited(source, TensorEdit(name="o", source="w", dtype=dtype, centred_axis=axis, gain=gain, gain_axis=0))
                for axis in (0, 1)
                for dtype in FLOATS
                for gain in (None, Gain(weight="g"))
            ]
        )
    for (whole, residual), (chunked, other) in zip(*expected, strict=True):
        assert same_bits(whole, chunked)
        assert other == pytest.approx(residual, rel=1e-12)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 3), (0,)])
def test_empty_tensors(tmp_path, shape):
    for axis, size in enumerate(shape):
        source = source_of(tmp_path, w=torch.empty(shape), g=torch.ones(size))
        for edit in (
            TensorEdit(name="o", source="w", dtype="F32"),
            TensorEdit(name="o", source="w", dtype="BF16", gain=Gain(weight="g"), gain_axis=axis),
            TensorEdit(name="o", source="w", dtype="F32", centred_axis=axis),
        ):
            outcome = Outcome()
            chunks = list(made(edit, source, outcome))
            assert sum(chunk.numel() for chunk in chunks) == 0
            assert outcome.residual == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("how", [{"gain": Gain(weight="g"), "gain_axis": 1}, {"centred_axis": 0}, {"centred_axis": 1}])
def test_weights_that_are_no_numbers(tmp_path, bad, dtype, how):
    weight = drawn(dtype, 5, 4)
    weight[3, 2] = bad
    source = source_of(tmp_path, **{"layer.w": weight, "g": drawn(dtype, 4)})
    found = "a NaN" if math.isnan(bad) else "an infinity"
    with pytest.raises(ModelError, match=f"layer.w holds {found}"):
        edited(source, TensorEdit(name="o", source="layer.w", dtype=dtype, **how))


def test_a_gain_that_is_no_number(tmp_path):
    source = source_of(tmp_path, w=drawn("F32", 3, 2), g=torch.tensor([1.0, math.nan]))
    with pytest.raises(ModelError, match="g holds a NaN"):
        edited(source, TensorEdit(name="o", source="w", dtype="F32", gain=Gain(weight="g"), gain_axis=1))


@pytest.mark.parametrize("how", [{"gain": Gain(weight="g"), "gain_axis": 1}, {"centred_axis": 0}, {"centred_axis": 1}])
def test_products_beyond_the_range(tmp_path, how):
    weight = torch.tensor([[6e4, -6e4], [-6e4, 6e4]], dtype=torch.float16)
    source = source_of(tmp_path, w=weight, g=torch.tensor([2.0, 1.0]))
    edit = TensorEdit(name="o", source="w", dtype="F16", **{"gain": Gain(weight="g"), "gain_axis": 1, **how})
    with pytest.raises(ModelError, match="o does not fit into F16 once folded; fold with --dtype float32"):
        edited(source, edit)


def test_tensors_that_do_not_fit_the_plan(tmp_path):
    source = source_of(tmp_path, w=drawn("F32", 3, 2), g=torch.ones(3), i=torch.ones(3, 2, dtype=torch.int32))
    gain = Gain(weight="g")
    for edit, said in (
        (
            TensorEdit(name="o", source="w", dtype="F32", gain=gain, gain_axis=1),
            r"expected 3 along axis 1 of w, the size",
        ),
        (TensorEdit(name="o", source="w", dtype="F32", gain=gain, gain_axis=2), r"expected 3 axes or more in w, found"),
        (TensorEdit(name="o", source="w", dtype="F32", centred_axis=2), r"expected 3 axes or more in w, found"),
        (TensorEdit(name="o", source="absent", dtype="F32"), "expected the tensor absent, found none"),
        (
            TensorEdit(name="o", source="i", dtype="I32", gain=gain, gain_axis=0),
            "i is I32, and only F64, F32, F16, BF16",
        ),
        (TensorEdit(name="o", source="i", dtype="I32", centred_axis=0), "i is I32"),
    ):
        with pytest.raises(ModelError, match=said):
            edited(source, edit)


@pytest.mark.parametrize("dtype", list(TORCH))
def test_copies_are_the_very_bits(tmp_path, dtype):
    size = TORCH[dtype].itemsize
    bits = torch.randint(0, 2 if dtype == "BOOL" else 256, (35 * size,), dtype=torch.uint8)
    weight = bits.view(TORCH[dtype]).view(7, 5)
    source = source_of(tmp_path, w=weight)
    result, _ = edited(source, TensorEdit(name="o", source="w", dtype=NAME[weight.dtype]))
    assert torch.equal(result.view(torch.uint8).flatten(), bits)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_rotation_of_a_transposed_parameter_is_that_of_its_numbers(kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(cpu, "load", lambda: "switched off")
    values = drawn("BF16", 64, 48).T
    rotations = (
        Rotation(axis=0, size=12, seed="x", construction=""),
        Rotation(axis=1, size=64, seed="y", construction=""),
    )
    edit = TensorEdit(name="o", source="weight", dtype="BF16", rotations=rotations)
    model = torch.nn.Linear(64, 48, bias=False).bfloat16()
    found = []
    for held in (values, values.contiguous()):
        model.weight = torch.nn.Parameter(held)
        found.append(torch.cat(list(made(edit, ModelSource(model), Outcome()))))
    wide = values.double().contiguous().numpy()
    for size, seed in ((12, "x"), (64, "y")):
        turn = rotate_columns(np.eye(size), seed)
        wide = (turn @ wide.reshape(-1, size, 64)).reshape(48, 64) if seed == "x" else wide @ turn.T
    assert torch.equal(found[0], found[1])
    assert float((found[0].double() - torch.from_numpy(wide)).abs().max()) <= 2**-8 * np.abs(wide).max()


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((60, 8), None),
        ((64, 8), Rows(blocks=3, tail=16)),
        ((64, 8), Rows(blocks=4, tail=32)),
        ((64, 8), Rows(blocks=2, tail=24)),
    ],
)
def test_rows_that_no_rotation_fits_are_one_line(tmp_path, shape, rows):
    source = source_of(tmp_path, w=drawn("BF16", *shape))
    turn = Rotation(axis=0, size=16, seed="x", construction="", rows=rows)
    with pytest.raises(ModelError, match="expected a multiple of 16 along axis 0 of w, found the shape"):
        edited(source, TensorEdit(name="o", source="w", dtype="BF16", rotations=(turn,)))
