"""A plan in words."""

from __future__ import annotations

import io

from rich.console import Console

from normkit.checkpoint.plan import Constant, FoldPlan, Gain, NormChange, Refusal, TensorEdit, VectorEdit
from normkit.checkpoint.reader import TensorInfo
from normkit.report.folding import describe_plan, plan_summary

TENSORS = {"w": TensorInfo("BF16", (1000, 1000)), "g": TensorInfo("BF16", (1000,))}
EDITS = (
    TensorEdit(name="w", source="w", dtype="F32", gain=Gain(weight="g"), gain_axis=1),
    VectorEdit(name="g", source="g", size=1000, dtype="F32", value=Constant(value=1.0)),
)


def plan(*norms: NormChange, **more) -> FoldPlan:
    return FoldPlan(
        family="f", architecture="Model", operations=("gain",), untie=False, edits=EDITS, norms=norms, **more
    )


def folded(name: str, **more) -> NormChange:
    return NormChange(name=name, gain="folded", bias="none", readers=(f"{name}.q", f"{name}.k"), **more)


def test_alike_norms_of_layers_share_a_row():
    described = describe_plan(plan(*(folded(f"layers.{layer}.norm") for layer in range(3)), folded("norm")), TENSORS)
    rows = [[cell.text for cell in row] for row in described.norms.rows]
    assert rows == [["layers.*.norm", "3", "folded", "-", "-", "q, k"], ["norm", "1", "folded", "-", "-", "q, k"]]
    assert described.summary == "4 of 4 norms folded"


def test_sizes_before_and_after_and_what_becomes_of_tensors():
    facts = {fact.label: fact.value for fact in describe_plan(plan(), TENSORS).facts}
    assert facts["size"] == "2 MB -> 4 MB"
    assert facts["tensors"] == "1 one product, rounded once, 1 constants"


def test_reasons_that_differ_in_layers_only_are_one():
    refusals = [
        Refusal(operation="rms", place=f"layers.{layer}.norm", reason=f"layers.{layer}.q reads sum.{layer}, and more")
        for layer in range(12)
    ]
    described = describe_plan(plan(refusals=(*refusals, Refusal(operation="final", place="norm", reason="x"))), TENSORS)
    assert [(fact.label, fact.value) for fact in described.left] == [
        ("rms: layers.*.norm (12)", "layers.*.q reads sum.*, and more"),
        ("final: norm", "x"),
    ]


def test_what_stays_in_a_norm_exactly_is_no_refusal():
    kept = NormChange(name="norm", gain="folded", bias="divided", kept=(3,), reasons=("its bias stays",))
    described = describe_plan(plan(kept), TENSORS)
    assert described.left == ()
    assert [(fact.label, fact.value) for fact in described.kept] == [("bias: norm", "its bias stays")]
    assert described.norms.rows[0][2].text == "folded, 1 coordinate kept"


def test_names_out_of_a_file_cannot_move_the_cursor():
    screen = io.StringIO()
    Console(file=screen, width=100, force_terminal=False).print(plan_summary(plan(folded("a\x1b[2Jb")), TENSORS))
    assert "\x1b" not in screen.getvalue()
