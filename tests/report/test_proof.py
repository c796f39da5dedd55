"""A verification and a certificate on a screen."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from normkit import demo
from normkit.checkpoint import Certificate, fold
from normkit.checkpoint.logits import Agreement
from normkit.checkpoint.verification import Checked, Verification
from normkit.report.proof import certificate_lines, describe_proof, proof_list

PASSED = Checked(name="plan", passed=True, what="it is the one recorded")
FAILED = Checked(name="sum", passed=False, what="h.0.bias[3] is 1.0, 2.0 follows from the source")
UNTRIED = Checked(name="reload", passed=None, what="not tried: accelerate is not installed")
NEAR = Agreement(tokens=512, largest=29.4, difference=1.5e-6, rounding=2.9e-6, unit=2.0**-24)
FAR = Agreement(tokens=512, largest=29.4, difference=1.5, rounding=2.9e-6, unit=2.0**-24)


def found(*checks: Checked, result: str = "GPT2LMHeadModel") -> Verification:
    return Verification(source="GPT2LMHeadModel", result=result, checks=checks)


def shown(part: RenderableType, width: int = 100) -> str:
    screen = io.StringIO()
    Console(file=screen, width=width, markup=False, highlight=False, emoji=False).print(part)
    return screen.getvalue()


def test_every_check_has_its_mark_and_its_words() -> None:
    lines = [" ".join(line.split()) for line in shown(proof_list(found(PASSED, FAILED, UNTRIED))).splitlines()]
    assert lines == [
        "GPT2LMHeadModel",
        "x not proved 1 of 3 checks failed",
        "",
        "+ plan it is the one recorded",
        "x sum h.0.bias[3] is 1.0, 2.0 follows from the source",
        "- reload not tried: accelerate is not installed",
    ]


def test_what_was_not_tried_leaves_the_rest_proved() -> None:
    described = describe_proof(found(PASSED, UNTRIED))
    assert (described.verdict.tone, described.verdict.headline) == ("good", "proved")


def test_a_class_that_changed_is_in_the_title() -> None:
    assert describe_proof(found(PASSED, result="LlamaForCausalLM")).title == "GPT2LMHeadModel -> LlamaForCausalLM"


@pytest.mark.parametrize(("agreement", "headline"), [(NEAR, "proved"), (FAR, "not proved")])
def test_logits_are_a_check_of_their_own(agreement: Agreement, headline: str) -> None:
    described = describe_proof(found(PASSED), agreement, "demo text")
    assert described.verdict.headline == headline
    line = described.checks[-1]
    assert line.name == "logits"
    assert "of 29.4, in float64, on 512 tokens (demo text); moving the source's weights" in line.what
    assert "2.9e-6" in line.what


def test_without_a_rounding_there_is_no_yardstick() -> None:
    exact = Agreement(tokens=8, largest=1.0, difference=0.0, rounding=0.0, unit=0.0)
    assert "moving" not in describe_proof(found(PASSED), exact, "x").checks[-1].what


def test_hostile_words_do_not_reach_the_terminal() -> None:
    hostile = Checked(name="a\x1b[31m", passed=False, what="\x1b]0;title\x07\r\n\u202e[bold]x[/bold]")
    screen = shown(proof_list(found(hostile, result="\x1b[2J")))
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(screen)
    assert "[bold]x[/bold]" in screen


@pytest.mark.parametrize("width", [40, 80, 100])
def test_it_fits_its_width(width: int) -> None:
    long = Checked(name="identical", passed=True, what="word " * 60)
    assert max(map(len, shown(proof_list(found(long, PASSED)), width).splitlines())) <= width


@pytest.mark.slow
def test_a_certificate_in_short(tmp_path) -> None:
    certificate = fold(demo.directory("layernorm"), tmp_path / "folded", untie=True)
    lines = [" ".join(line.split()) for line in shown(certificate_lines(certificate)).splitlines()]
    assert [line.split()[0] for line in lines] == [
        "identical",
        "product",
        "sum",
        "constant",
        "largest",
        "smallest",
        "loads",
        "files",
    ]
    relations = [entry["relation"] for entry in certificate.tensors.values()]
    assert lines[0] == f"identical {relations.count('identical')} tensors: the source's bits"
    assert "the gain at transformer.ln_f.weight[" in lines[5]
    assert lines[6] == "loads as GPT2LMHeadModel"
    assert shown(certificate_lines(Certificate.read(tmp_path / "folded"))) == shown(certificate_lines(certificate))
