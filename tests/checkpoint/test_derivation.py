"""Tensors made anew and compared: from hand-made plans, whatever their shapes, dtypes and chunks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from folded_checkpoints import flip, tensors
from normkit.checkpoint.applying import vectors
from normkit.checkpoint.arithmetic import CHUNK
from normkit.checkpoint.derivation import derive, header_faults
from normkit.checkpoint.folding import Workers, write_shards
from normkit.checkpoint.plan import Constant, FoldPlan, Gain, Product, Quotient, Reference, Sum, TensorEdit, VectorEdit
from normkit.checkpoint.reader import CheckpointSource
from normkit.checkpoint.shard import lay_out
from normkit.checkpoint.staging import Staging
from normkit.errors import ModelError

pytestmark = pytest.mark.slow

# The matrix has three chunks, the last of which is short.
ROWS, COLUMNS = 3 * CHUNK // 640, 513


def source_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    return {
        "matrix": drawn(ROWS, COLUMNS),
        "experts": drawn(3, 5, COLUMNS),
        "out": drawn(COLUMNS, 40),
        "bias": drawn(ROWS),
        "gain": drawn(COLUMNS),
        "shift": drawn(COLUMNS),
        "count": torch.arange(7),
        "number": torch.tensor(3.0).to(dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
    }


def plan(name: str) -> FoldPlan:
    by = Gain(weight="gain")
    edits = (
        TensorEdit(name="matrix", source="matrix", dtype=name, gain=by, gain_axis=1),
        TensorEdit(name="experts", source="experts", dtype=name, gain=by, gain_axis=2, centred_axis=1),
        TensorEdit(name="out", source="out", dtype=name, centred_axis=1),
        VectorEdit(
            name="bias",
            source="bias",
            size=ROWS,
            dtype=name,
            value=Sum(terms=(Product(matrix="matrix", in_axis=1, vector=Reference(name="shift")),)),
        ),
        VectorEdit(name="gain", source="gain", size=COLUMNS, dtype=name, value=Constant(value=1.0)),
        VectorEdit(name="shift", source="shift", size=COLUMNS, dtype=name, value=Quotient(gain=by)),
        *(TensorEdit(name=kept, source=kept, dtype=name) for kept in ("number", "empty")),
        TensorEdit(name="count", source="count", dtype="I64"),
        TensorEdit(name="matrix.copy", source="matrix", dtype=name),
    )
    return FoldPlan(family="none", architecture="none", operations=("gain",), untie=False, edits=edits)


@pytest.fixture(params=[(torch.float32, "F32"), (torch.bfloat16, "BF16"), (torch.float64, "F64")], ids=lambda p: p[1])
def written(request, tmp_path) -> tuple[Path, Path, FoldPlan]:
    dtype, name = request.param
    source = tmp_path / "source"
    source.mkdir()
    save_file(source_tensors(dtype), source / "model.safetensors", {"format": "pt"})
    made = plan(name)
    with CheckpointSource(source) as opened, Staging(tmp_path / "result", source=source) as staging:
        write_shards(made, opened, staging)
        staging.finish()
    return source, tmp_path / "result", made


def derived(source: Path, result: Path, made: FoldPlan, threads: int = 1):
    workers = Workers(threads)
    with CheckpointSource(source) as opened:
        layouts = lay_out(made, opened)
        assert header_faults(layouts, result) == {}
        return derive(vectors(made, opened, workers), opened, layouts, result, workers=workers)


def test_what_was_written_is_derived_again(written):
    found = derived(*written, threads=2)
    assert found.deviations == {}
    assert found.tensors == {"identical": 4, "product": 2, "sum": 3, "constant": 1}
    assert found.elements["product"] == ROWS * COLUMNS + COLUMNS
    assert found.residuals.keys() == {"experts", "out", "bias"}


@pytest.mark.sampled(2)
def test_any_element_of_any_tensor_is_placed(written):
    _, result, made = written
    for name, place in tensors(result).items():
        width = place.nbytes // max(1, math.prod(place.shape))
        count = math.prod(place.shape)
        for element in {0, count // 2, count - 1} if count else ():
            byte = place.start + element * width
            flip(place.file, byte)
            found = derived(*written)
            flip(place.file, byte)
            (deviation,) = [each for faults in found.deviations.values() for each in faults]
            index = ", ".join(str(axis) for axis in unravelled(element, place.shape))
            assert deviation.startswith(f"{name}[{index}] is ")
            assert next(edit for edit in made.edits if edit.name == name).relation in found.deviations


def unravelled(element: int, shape: tuple[int, ...]) -> list[int]:
    index = []
    for length in reversed(shape):
        index.insert(0, element % length)
        element //= length
    return index


def test_differences_in_every_chunk_are_counted(written):
    source, result, made = written
    place = tensors(result)["matrix"]
    width = place.nbytes // (ROWS * COLUMNS)
    for row in (0, ROWS // 2, ROWS - 1):
        flip(place.file, place.start + row * COLUMNS * width)
    (deviation,) = derived(source, result, made).deviations["product"]
    assert deviation.startswith("matrix[0, 0] is ")
    assert deviation.endswith("(and 2 more of its elements)")


def test_every_byte_that_is_compared_is_counted(written):
    source, result, made = written
    workers, steps = Workers(), []
    workers.step = steps.append
    with CheckpointSource(source) as opened:
        layouts = lay_out(made, opened)
        derive(vectors(made, opened, Workers()), opened, layouts, result, workers=workers)
    assert sum(steps) == layouts[0].size - layouts[0].starts[0]


def test_a_tensor_that_cannot_be_made_is_told(written):
    source, result, made = written
    place = tensors(source)["out"]
    with place.file.open("r+b") as file:
        file.seek(place.start)
        file.write(b"\xff" * 8)
    (deviation,) = derived(source, result, made).deviations["sum"]
    assert deviation.startswith("out holds a NaN")
    place = tensors(source)["shift"]
    with place.file.open("r+b") as file:
        file.seek(place.start)
        file.write(b"\xff" * 8)
    with pytest.raises(ModelError, match="shift holds a NaN"):
        derived(source, result, made)


def test_faults_of_headers(written):
    source, result, made = written
    file = result / "model.safetensors"
    whole = file.read_bytes()
    with CheckpointSource(source) as opened:
        layouts = lay_out(made, opened)
        for content, said in (
            (whole + b"\0", f"has {len(whole) + 1:,} bytes, {len(whole):,} follow from the source"),
            (whole.replace(b'"out"', b'"oat"', 1), "lacks out"),
            (whole.replace(b'"pt"', b'"tp"', 1), "gives another order, other shapes or other texts"),
            (b"\0" * 20, "truncated or corrupt"),
        ):
            file.write_bytes(content)
            (fault,) = header_faults(layouts, result).values()
            assert said in fault
        file.unlink()
        assert header_faults(layouts, result) == {"model.safetensors": "model.safetensors is missing"}
