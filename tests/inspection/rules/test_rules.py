"""What `check` makes of the rules, and the rules as texts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from normkit.inspection import rules
from normkit.inspection.rules import RULES
from normkit.inspection.rules.rule import Hit, NotChecked


def fixed(outcome):
    return lambda _facts: outcome


def hit(severity):
    return Hit(severity=severity, sites=("a",), measured="m", evidence=("e",))


def test_findings_come_worst_first_and_then_in_the_rules_order(monkeypatch):
    outcomes = {
        "A1": hit("note"),
        "B1": hit("error"),
        "B2": NotChecked("why not"),
        "D1": hit("warning"),
        "E3": hit("error"),
    }
    bent = tuple(replace(rule, check=fixed(outcomes.get(rule.id))) for rule in RULES)
    monkeypatch.setattr(rules, "RULES", bent)
    findings, checks = rules.check(None)
    assert [found.rule for found in findings] == ["B1", "E3", "D1", "A1"]
    assert [check.rule for check in checks] == [rule.id for rule in RULES]
    by_rule = {check.rule: (check.status, check.reason) for check in checks}
    assert by_rule["B1"] == ("finding", "")
    assert by_rule["B2"] == ("not checked", "why not")
    assert by_rule["F2"] == ("clean", "")


def test_a_finding_carries_the_rules_text(monkeypatch):
    rule = RULES[0]
    monkeypatch.setattr(rules, "RULES", (replace(rule, check=fixed(hit("warning"))),))
    (found,), _ = rules.check(None)
    assert (found.title, found.threshold, found.source) == (rule.title, rule.threshold, rule.source)
    assert (found.why, found.remedy, found.confirm) == (rule.why, rule.remedy, rule.confirm)
    assert (found.severity, found.sites, found.measured, found.evidence) == ("warning", ("a",), "m", ("e",))


def test_identifiers_are_unique_and_sorted():
    identifiers = [rule.id for rule in RULES]
    assert identifiers == sorted(set(identifiers), key=lambda identifier: (identifier[0], int(identifier[1:])))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_says_what_why_and_what_to_do(rule):
    for text in (rule.title, rule.threshold, rule.source, rule.why, rule.confirm, *rule.remedy):
        assert text == text.strip() != ""
        assert "  " not in text
    assert len(rule.title) <= 60
    assert any(mark in rule.source for mark in ("#", "arXiv:"))


def test_a_model_without_norms_is_clean_or_not_checked(inspected):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(99, 8)

        def forward(self, input_ids):
            return self.embedding(input_ids)

    inspection = inspected(Bare())
    assert inspection.findings == ()
    assert {check.status for check in inspection.checks} == {"clean", "not checked"}
