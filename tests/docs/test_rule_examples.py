"""The program on each rule's page runs, and prints that rule."""

from __future__ import annotations

import pytest
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from normkit.rules import RULES
from rule_examples import EXAMPLES, program

SINGLE = [rule for rule, example in EXAMPLES.items() if "words" not in example and "run" not in example]
RUNS = [rule for rule, example in EXAMPLES.items() if "run" in example]


def printed(rule: str, tmp_path, monkeypatch, capsys) -> list[str]:
    """The rules that a program names; it may replace the forward of this class."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LlamaRMSNorm, "forward", LlamaRMSNorm.forward)
    exec(compile(program(rule), f"the example of {rule}", "exec"), {"__name__": "example"})
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()]


def test_every_rule_has_an_example_or_says_why_not():
    assert sorted(EXAMPLES) == sorted(rule.id for rule in RULES)
    assert [rule for rule in EXAMPLES if len(program(rule).splitlines()) > 50] == []


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*in the checkpoint but not used")
@pytest.mark.parametrize("rule", SINGLE)
def test_an_inspection_names_the_rule(rule, tmp_path, monkeypatch, capsys):
    assert rule in printed(rule, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("rule", RUNS)
def test_a_run_names_the_rule(rule, tmp_path, monkeypatch, capsys):
    assert rule in printed(rule, tmp_path, monkeypatch, capsys)
