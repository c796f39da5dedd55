"""A plan and a verification on a screen."""

from __future__ import annotations

import re

import pytest

from folding_cases import graph_of
from normkit.checkpoint.logits import Agreement
from normkit.checkpoint.plan import Constant, FoldPlan, Gain, NormChange, Refusal, TensorEdit, VectorEdit
from normkit.checkpoint.reader import TensorInfo
from normkit.checkpoint.report import describe_plan, describe_proof, norm_mappings
from normkit.checkpoint.verification import Checked, Verification
from normkit.show.parts import Section
from planned_models import model_of
from screens import shown
from tiny_models import RECIPES

TENSORS = {"w": TensorInfo("BF16", (1000, 1000)), "g": TensorInfo("BF16", (1000,))}
EDITS = (
    TensorEdit(name="w", source="w", dtype="F32", gain=Gain(weight="g"), gain_axis=1),
    VectorEdit(name="g", source="g", size=1000, dtype="F32", value=Constant(value=1.0)),
)
PASSED = Checked(name="plan", passed=True, what="it is the one recorded")
FAILED = Checked(name="sum", passed=False, what="h.0.bias[3] is 1.0, 2.0 follows from the source")
UNTRIED = Checked(name="reload", passed=None, what="not tried: accelerate is not installed")


def planned(*norms: NormChange, **more) -> Section:
    plan = FoldPlan(
        family="f", architecture="Model", operations=("gain",), untie=False, edits=EDITS, norms=norms, **more
    )
    return describe_plan(plan, TENSORS)


def folded(name: str, **more) -> NormChange:
    return NormChange(name=name, gain="folded", bias="none", readers=(f"{name}.q", f"{name}.k"), **more)


def found(*checks: Checked, result: str = "GPT2LMHeadModel") -> Verification:
    return Verification(source="GPT2LMHeadModel", result=result, checks=checks)


def test_a_plan_says_the_fate_of_each_norm_what_is_not_done_and_the_size():
    reason = "layers.{0}.q reads sum.{0}, and more"
    refusals = [Refusal(operation="rms", place=f"layers.{i}.norm", reason=reason.format(i)) for i in range(12)]
    kept = NormChange(name="ln_f", gain="folded", bias="divided", kept=(3,), reasons=("its bias stays", "x"))
    part = planned(
        *(folded(f"layers.{layer}.norm") for layer in range(3)),
        folded("norm"),
        kept,
        refusals=(*refusals, Refusal(operation="final", place="ln_f", reason="x")),
        remarks=("load it with nk.load",),
    )
    assert shown(part).split("\n") == [
        "Model  5 of 5 norms folded",
        "",
        "norm            count   gain                        bias            becomes   folded into",
        f"{'─' * 89}",
        "layers.*.norm       3   folded                      -               -         q, k",
        "norm                1   folded                      -               -         q, k",
        "ln_f                1   folded, 1 coordinate kept   kept as b / g   -         -",
        "",
        "! asked for and not done, as it would change what the model computes",
        "rms: layers.*.norm (12)",
        "    layers.*.q reads sum.*, and more",
        "final: ln_f",
        "    x",
        "",
        "i kept where it is, exactly",
        "bias: ln_f",
        "    its bias stays",
        "",
        "tensors  1 one product, rounded once, 1 constants",
        "size     2 MB -> 4 MB",
        "i load it with nk.load",
        "",
    ]


def test_a_verification_says_its_verdict_and_every_check():
    assert [" ".join(line.split()) for line in shown(describe_proof(found(PASSED, FAILED, UNTRIED))).split("\n")] == [
        "GPT2LMHeadModel",
        "x not proved 1 of 3 checks failed",
        "",
        "+ plan it is the one recorded",
        "x sum h.0.bias[3] is 1.0, 2.0 follows from the source",
        "- reload not tried: accelerate is not installed",
        "",
    ]
    untried = describe_proof(found(PASSED, UNTRIED, result="LlamaForCausalLM"))
    assert (untried.verdict.tone, untried.verdict.headline) == ("good", "proved")
    assert untried.title == "GPT2LMHeadModel -> LlamaForCausalLM"


@pytest.mark.parametrize(("difference", "headline"), [(1.5e-6, "proved"), (1.5, "not proved")])
def test_logits_are_a_check_of_their_own(difference: float, headline: str):
    agreement = Agreement(
        tokens=512,
        largest=29.4,
        difference=difference,
        rounding=2.9e-6,
        unit=2.0**-24,
        divergence=4e-5,
        same_first=0.995,
    )
    described = describe_proof(found(PASSED), agreement, "demo text")
    assert described.verdict.headline == headline
    assert described.facts[-1].label == "logits"
    said = "of 29.4, in float64, on 512 tokens (demo text); KL 4e-5, the same first token at 99.5 %"
    assert said in described.facts[-1].value
    assert described.facts[-1].value.endswith(": 2.9e-6")
    exact = Agreement(tokens=8, largest=1.0, difference=0.0, rounding=0.0, unit=0.0)
    assert "moving" not in describe_proof(found(PASSED), exact, "x").facts[-1].value


def test_hostile_words_do_not_reach_the_terminal():
    hostile = "a\x1b[2J\x1b]0;title\x07\r\n\u202e[bold]x[/bold]"
    proof = describe_proof(found(Checked(name=hostile, passed=False, what=hostile), result=hostile))
    for part in (planned(folded(hostile)), proof):
        screen = shown(part)
        assert not {"\x1b", "\x07", "\r", "\u202e"} & set(screen)
        assert "[bold]x[/bold]" in screen


@pytest.mark.parametrize("width", [40, 80, 100])
def test_it_fits_its_width(width: int):
    long = Checked(name="identical", passed=True, what="word " * 60)
    assert max(map(len, shown(describe_proof(found(long, PASSED)), width).splitlines())) <= width


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", RECIPES)
def test_mappings_match_the_readers_of_each_norm_and_no_other_module(family):
    model = model_of(family)
    graph = graph_of(model)
    names = [name for name, _ in model.named_modules()] + [linear.name for linear in graph.linears]
    found = norm_mappings(graph)

    def matched(targets):
        return {name for target in targets for name in names if re.match(target.removeprefix("re:"), name)}

    readers = {norm.name: {linear.name for linear in graph.readers(norm.gives)} for norm in graph.norms}
    legal = {
        norm.name
        for norm in graph.norms
        if not graph.against_folding(norm, untie=True) and not any(each.is_joined for each in graph.readers(norm.gives))
    }
    seen = {name: matched(each["linears"]) for each in found["norm_mappings"] for name in matched([each["norm"]])}
    assert seen.keys() == legal
    for each in found["norm_mappings"]:
        norms = matched([each["norm"]])
        assert matched(each["linears"]) == set().union(*(readers[name] for name in norms))
    heads = {linear.name for linear in graph.linears if linear.is_head}
    for each in found["awq_mappings"]:
        assert not matched(each["balance_layers"]) & heads
