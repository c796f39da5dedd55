"""A few rows of each matrix tell whether it is the reference's, transposed, or unrelated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normkit.comparison import other_tensors
from normkit.comparison.causes import causes_of
from normkit.comparison.differences import Comparison
from normkit.comparison.other_tensors import compare_matrices
from normkit.comparison.report import values_facts
from normkit.comparison.rows import Birth, Rows
from normkit.comparison.values import Values, compare_values
from normkit.comparison.weights import weights_of
from planted_gains import gains

LAYERS = 3
OUT = "model.layers.1.attn.o_proj.weight"


def model(size: int = 64) -> dict[str, Tensor]:
    """The norms of a small decoder, and its matrices: square ones and others."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"attn.q_proj": (size, size), "attn.o_proj": (size, size), "mlp.up": (3 * size, size)}
    found = {
        f"model.layers.{layer}.{name}.weight": torch.randn(shape, generator=generator)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    return {**gains(LAYERS), **found}


def turned(tensors: dict[str, Tensor], but: str = "") -> dict[str, Tensor]:
    """All matrices of layers the other way round, but for one."""
    return {
        name: each.T.contiguous() if each.dim() == 2 and "layers" in name and name != but else each
        for name, each in tensors.items()
    }


def compared(
    port: dict[str, Tensor], reference: dict[str, Tensor], runtime: str = "", architecture: str = ""
) -> Values:
    ours = replace(weights_of(port), runtime=runtime, architecture=architecture)
    return compare_values(ours, weights_of(reference))


def told(values: Values, **more: object) -> list[str]:
    given = {"not_looked_at": {"rows": "nothing runs it"}, **more}
    found = Comparison(port="port", reference="reference", forms=("arrays", "arrays"), values=values, **given)  # type: ignore[arg-type]
    assert found.differs == bool(found.causes)
    return [each.sentence for each in causes_of(found)]


@pytest.mark.parametrize("size", [16, 40, 64, 200])
def test_a_right_port_has_no_finding_and_each_fault_is_named(size: int) -> None:
    reference = model(size)
    assert compared(reference, reference).others.matrices == {}
    values = compared({**reference, OUT: reference[OUT].T.contiguous()}, reference)
    assert values.others.matrices == {OUT: "transposed"}
    assert values.is_right is True
    assert told(values) == [f"The matrix {OUT} is transposed. The norms are right."]
    drawn = torch.randn(size, size, generator=torch.Generator().manual_seed(8))
    values = compared({**reference, OUT: drawn}, reference)
    assert values.others.matrices == {OUT: "unrelated"}
    assert told(values) == [f"The matrix {OUT} is unrelated to the reference's. The norms are right."]


@pytest.mark.parametrize("size", [16, 64])
def test_a_port_that_stores_matrices_the_other_way_round_is_right_and_one_left_as_it_was_is_not(size: int) -> None:
    reference = model(size)
    assert compared(turned(reference), reference).others.matrices == {}
    values = compared(turned(reference, but=OUT), reference)
    assert values.others.matrices == {OUT: "not transposed"}
    assert told(values) == [
        f"The matrix {OUT} is not transposed, unlike the others of the layers. The norms are right."
    ]


def test_a_graph_of_onnx_multiplies_by_a_matrix_or_by_its_transpose() -> None:
    reference = model()
    port = {**reference, OUT: reference[OUT].T.contiguous()}
    assert compared(port, reference, runtime="ONNX").others.matrices == {}
    assert compared(turned(reference, but=OUT), reference, runtime="ONNX").others.matrices == {}
    drawn = torch.randn(64, 64, generator=torch.Generator().manual_seed(8))
    assert compared({**reference, OUT: drawn}, reference, runtime="ONNX").others.matrices == {OUT: "unrelated"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "TQ2_0"])
def test_quantization_is_no_finding(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    reference = model(256)
    quantization = getattr(gguf.GGMLQuantizationType, kind)
    port = {
        name: torch.from_numpy(gguf.dequantize(gguf.quantize(each.numpy(), quantization), quantization))
        if each.dim() == 2 and "layers" in name
        else each
        for name, each in reference.items()
    }
    assert compared(port, reference).others.matrices == {}


def on_grid(matrix: Tensor, most: int, columns: int) -> Tensor:
    """The matrix rounded to whole numbers up to `most` of a step of each so many columns of a row."""
    blocks = matrix.reshape(-1, columns)
    step = blocks.abs().amax(1, keepdim=True) / most
    return ((blocks / step).round() * step).reshape(matrix.shape)


def edited(change: Callable[[Tensor], Tensor]) -> Values:
    reference = model(128)
    port = {name: change(each) if each.dim() == 2 and "layers" in name else each for name, each in reference.items()}
    return compared(port, reference)


@pytest.mark.parametrize(
    ("most", "columns", "words"),
    [(127, 128, "8 bits with a step for each row"), (7, 32, "4 bits with a step for each group of 32 columns")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rounded_matrices_that_are_stored_as_floats_are_named_with_their_error(
    most: int, columns: int, words: str, dtype: torch.dtype
) -> None:
    reference = model(128)
    values = edited(lambda each: on_grid(each, most, columns).to(dtype))
    assert (values.is_right, values.others.matrices) == (True, {})
    assert len(values.others.rounded) == 3 * LAYERS
    (said,) = values.others.near
    assert said.startswith(f"the reference's, rounded to {words} (relative error at most ")
    for name, found in values.others.rounded.items():
        rows = reference[name][:8]
        off = float((on_grid(rows, most, columns).to(dtype) - rows).norm() / rows.norm())
        assert found.error == pytest.approx(off, rel=0.1)
    without_rows, with_rows = (
        Comparison(port="port", reference="reference", forms=("arrays", "arrays"), values=values, **more)
        for more in (
            {"not_looked_at": {"rows": "nothing runs it"}},
            {"rows": Rows(birth=Birth(where="after", path=None, since="b", agreed=0.0, differs=0.5), compared=2)},
        )
    )
    assert (without_rows.differs, without_rows.verdict, without_rows.causes) == (False, "undecided", ())
    assert "stored gains the same" in str(without_rows)
    assert (
        f"9 matrices (model.layers.0.attn.q_proj.weight, model.layers.0.attn.o_proj.weight and 7 more) are {said}"
        in (" ".join(str(without_rows).split()))
    )
    assert [each.sentence for each in with_rows.causes] == [
        "9 matrices (model.layers.0.attn.q_proj.weight, model.layers.0.attn.o_proj.weight and 7 more) are "
        f"{said}. The norms are right."
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        lambda each: each * (each.abs() > 0.3),
        lambda each: each + 0.007 * torch.randn(each.shape, generator=torch.Generator().manual_seed(5)),
    ],
    ids=["pruned", "noise"],
)
def test_pruned_matrices_and_noise_of_the_size_of_rounding_are_not_called_rounded(
    change: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    values = edited(lambda each: change(each).to(dtype))
    assert {each.bits for each in values.others.rounded.values()} == {0}
    (said,) = values.others.near
    assert said.startswith("close to the reference's, but neither equal nor rounded to a grid (relative error at most ")
    found = Comparison(port="a", reference="b", forms=("arrays", "arrays"), values=values, not_looked_at={"rows": "no"})
    assert (found.verdict, "+ the same" in str(found)) == ("undecided", False)
    # A run says where they differ.
    birth = Birth(where="after", path=None, since="b", agreed=0.0, differs=0.5)
    assert (
        Comparison(port="a", reference="b", forms=("arrays", "arrays"), values=values, rows=Rows(birth=birth)).causes
        == ()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_copy_in_16_bits_is_the_same(dtype: torch.dtype) -> None:
    for values in (edited(lambda each: each.to(dtype)), edited(lambda each: each.to(dtype).float())):
        assert values.others.rounded == {}
        found = Comparison(
            port="a", reference="b", forms=("arrays", "arrays"), values=values, not_looked_at={"rows": "no"}
        )
        assert (found.verdict, "+ the same" in str(found)) == ("the same", True)


@pytest.mark.parametrize("runtime", ["llama.cpp", "MLX", "ONNX"])
def test_files_of_runtimes_that_quantize_hold_rounded_matrices_rightly(runtime: str) -> None:
    reference = model(128)
    port = {name: on_grid(each, 127, 128) if "proj" in name else each for name, each in reference.items()}
    assert compared(port, reference, runtime).others.rounded == {}


def test_where_no_matrix_was_compared_only_the_gains_are_the_same() -> None:
    reference = model(128)
    for port in (
        {name: each.to(torch.int8) if each.dim() == 2 else each for name, each in reference.items()},
        {name: each for name, each in reference.items() if each.dim() == 1},
    ):
        values = compared(port, reference)
        found = Comparison(
            port="a", reference="b", forms=("arrays", "arrays"), values=values, not_looked_at={"rows": "no"}
        )
        assert (values.others.is_compared, found.verdict) == (False, "undecided")
        assert "stored gains the same  All 7 gains that are stored are right; no matrix was compared." in str(found)


@pytest.mark.parametrize("is_turned", [False, True])
def test_gains_that_are_folded_into_a_matrix_keep_it_the_reference_s(is_turned: bool) -> None:
    """Layers of GPT-2 hold a matrix the other way round, and a gain in its rows."""
    matrix = torch.randn(192, 64, generator=torch.Generator().manual_seed(1))
    gain = 1 + 0.3 * torch.randn(64, generator=torch.Generator().manual_seed(2))
    port, reference = (
        weights_of({"h.0.c_fc.weight": each.T.contiguous() if is_turned else each}) for each in (matrix * gain, matrix)
    )
    pairs, factor = [("h.0.c_fc.weight", "h.0.c_fc.weight")], gain.double()[:, None] if is_turned else gain.double()
    found = compare_matrices(port, reference, pairs, lambda *_: None, {"h.0.c_fc.weight": factor})
    assert (found.rounded, found.is_compared) == ({}, True)
    assert [*compare_matrices(port, reference, pairs, lambda *_: None).rounded] == ["h.0.c_fc.weight"]
    # The folded matrix may be rounded.
    rounded = on_grid((matrix * gain).T.contiguous() if is_turned else matrix * gain, 7, 32)
    found = compare_matrices(
        weights_of({"h.0.c_fc.weight": rounded}), reference, pairs, lambda *_: None, {"h.0.c_fc.weight": factor}
    )
    assert found.rounded["h.0.c_fc.weight"].bits == 4


@pytest.mark.parametrize("bits", [1, 2])
def test_one_bit_a_number_is_no_finding(bits: int) -> None:
    reference = model()
    levels = {1: lambda each: each.sign(), 2: lambda each: (each / 1.0).round().clamp(-2, 1)}[bits]
    port = {name: levels(each) if "proj" in name else each for name, each in reference.items()}
    assert compared(port, reference).others.matrices == {}


def test_rows_in_another_order_are_no_finding() -> None:
    reference = model()
    name = "model.layers.0.attn.q_proj.weight"
    port = {**reference, name: reference[name].reshape(2, 2, 16, 64).swapaxes(1, 2).reshape(64, 64)}
    for runtime, architecture in (("llama.cpp", "llama"), ("llama.cpp", "qwen2"), ("", "")):
        assert compared(port, reference, runtime, architecture).others.matrices == {}
    port[name] = torch.randn(64, 64, generator=torch.Generator().manual_seed(8))
    assert compared(port, reference, "llama.cpp", "qwen2").others.matrices == {name: "unrelated"}


def test_what_is_neither_is_only_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = model()
    port = {**reference, OUT: -reference[OUT]}
    values = compared(port, reference)
    assert values.others.matrices == {OUT: "other values"}
    assert told(values) == []
    monkeypatch.setattr(other_tensors, "BUDGET", 64 * 64)
    drawn = {name: torch.randn_like(each) if "o_proj" in name else each for name, each in reference.items()}
    found = compared(drawn, reference).others.matrices
    assert [*found.values()] == ["unrelated", "other values", "other values"]


def test_matrices_of_models_whose_rows_agree_are_not_blamed() -> None:
    reference = model()
    values = compared({**reference, OUT: reference[OUT].T.contiguous()}, reference)
    assert told(values, not_looked_at={}, rows=Rows(compared=7)) == []


def test_zeros_and_small_matrices_say_nothing() -> None:
    reference = {**gains(), "model.a.weight": torch.zeros(64, 64), "model.b.weight": torch.randn(4, 4)}
    port = {**reference, "model.a.weight": torch.randn(64, 64), "model.b.weight": torch.randn(4, 4)}
    assert compared(port, reference).others.matrices == {}


def test_a_matrix_that_is_not_square_shows_it_by_its_shape() -> None:
    reference, name = model(), "model.layers.2.mlp.up.weight"
    port = {**reference, name: reference[name].T.contiguous()}
    assert compared(port, reference).others.matrices == {name: "transposed"}
    assert compared(turned(reference, but=name), reference).others.matrices == {name: "not transposed"}


@pytest.mark.parametrize("back", [False, True])
def test_rows_in_the_rotary_order_of_another_runtime_are_named(back: bool) -> None:
    """llama.cpp interleaves the halves of each head; a folder of transformers must not."""
    port, name = model(), "model.layers.2.attn.q_proj.weight"
    heads = port[name].reshape(2, 16, 2, 64) if back else port[name].reshape(2, 2, 16, 64)
    port[name] = heads.transpose(1, 2).reshape(64, 64)
    sides = [replace(weights_of(each), runtime="transformers") for each in (port, model())]
    found = compare_values(*sides)
    assert found.others.matrices == {name: "rows in rotary order"}
    assert told(found)[0].startswith(f"The matrix {name} is the reference's with the rows of each head in another rot")
    # Of a runtime that is not known nobody says what it computes.
    assert compared(port, model()).others.matrices == {}


def test_numbers_of_an_exporter_are_no_names() -> None:
    """Two exports of one model number other matrices alike."""
    port, reference = ({**gains(LAYERS), "onnx::MatMul_920": torch.randn(64, 64), "head": torch.eye(64)} for _ in "ab")
    sides = [replace(weights_of(each), runtime="ONNX") for each in (port, reference)]
    others = compare_values(*sides).others
    assert (others.paired, others.matrices, others.missing, others.extra) == (2, {}, (), ())
    assert others.notes == ("1 tensor with a number for a name, as onnx::MatMul_920, not paired",)


def in_other_words(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model whose author chose other words for all but the norms."""
    words = {
        "layers": "h",
        "attn.q_proj": "mix.w1",
        "attn.o_proj": "mix.w2",
        "mlp.up": "grow",
        "embed.weight": "tokens",
    }
    found = {}
    for name, each in tensors.items():
        for word, other in words.items() if "norm" not in name else ():
            name = name.replace(word, other)
        found[name] = each
    return found


def test_tensors_with_other_names_are_paired_by_their_values() -> None:
    reference, generator = model(), torch.Generator().manual_seed(4)
    reference["model.embed.weight"] = torch.randn(100, 64, generator=generator)
    for layer in range(LAYERS):
        # A constant tensor is paired with the one beside the paired matrix.
        reference[f"model.layers.{layer}.mlp.up.bias"] = torch.zeros(3 * 64)
        reference[f"model.layers.{layer}.attn.o_proj.bias"] = torch.randn(64, generator=generator)
    port, name = in_other_words(reference), "model.h.1.mix.w2.weight"
    found = compared(port, reference).others
    assert found.renamed == {one: two for one, two in zip(port, reference, strict=True) if one != two}
    assert (found.matrices, found.missing, found.extra, found.undecided) == ({}, (), (), ())
    assert compared({**port, name: port[name].T.contiguous()}, reference).others.matrices == {name: "transposed"}
    drawn = torch.randn(64, 64, generator=generator)
    assert compared({**port, name: drawn}, reference).others.matrices == {name: "unrelated"}
    around = {one: each.T.contiguous() if each.dim() == 2 and ".h." in one else each for one, each in port.items()}
    assert compared(around, reference).others.matrices == {}
    lost = compared({one: each for one, each in port.items() if one != name}, reference).others
    assert (lost.missing, lost.extra) == (("model.layers.1.attn.o_proj.weight",), ())


def test_tensors_that_neither_names_nor_values_pair_are_not_said_to_be_missing() -> None:
    reference, generator = model(), torch.Generator().manual_seed(8)
    drawn = {
        name: torch.randn(each.shape, generator=generator) if each.dim() == 2 else each
        for name, each in reference.items()
    }
    values = compared(in_other_words(drawn), reference)
    others = values.others
    # The one kind of its shape is paired by that, and is another model's.
    assert [*others.renamed] == [f"model.h.{layer}.grow.weight" for layer in range(LAYERS)]
    assert others.matrices == dict.fromkeys(others.renamed, "unrelated")
    assert len(others.missing) == len(others.extra) == 2 * LAYERS
    assert others.undecided == others.missing
    told_of = [fact.value for fact in values_facts(values) if fact.label == "other tensors"]
    assert "under no name of the port, which has others of their shapes (model.layers.0.attn." in told_of[0]
    assert "missing" not in told_of[0]
    assert "3 by values or shapes, as names differ (model.h.0.grow.weight for model.layers.0.mlp.up" in told_of[0]
