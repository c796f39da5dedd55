"""What `check` makes of the rules, and the rules as texts."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch import nn

from normkit import rules
from normkit.rules import RULES, check
from normkit.rules.rule import NO_RUN, Case, Hit, NotChecked, evidence_lines, worst
from normkit.rules.rule import hit as cases_hit
from watched_runs import block

# Facts of which a rule finds all that it may look at.
EVERYTHING = SimpleNamespace(has=lambda _subject: True, has_few_tokens=False)


def fixed(outcome):
    return lambda _facts: outcome


def hit(severity):
    return Hit(severity=severity, sites=("a",), measured="m", evidence=("e",))


def test_findings_come_worst_first_and_then_in_the_rules_order(monkeypatch):
    outcomes = {
        "A1": hit("note"),
        "B1": hit("error"),
        "B2": NotChecked("why not"),
        "B7": NO_RUN,
        "D1": hit("warning"),
        "E3": hit("error"),
    }
    bent = tuple(replace(rule, check=fixed(outcomes.get(rule.id))) for rule in RULES)
    monkeypatch.setattr(rules, "RULES", bent)
    findings, checks = rules.check(EVERYTHING)
    assert [found.rule for found in findings] == ["B1", "E3", "D1", "A1"]
    assert [check.rule for check in checks] == [rule.id for rule in RULES]
    by_rule = {check.rule: (check.status, check.reason, check.needs_run) for check in checks}
    assert by_rule["B1"] == ("finding", "", False)
    assert by_rule["B2"] == ("not checked", "why not", False)
    assert by_rule["B7"] == ("not checked", "it takes a training run under nk.watch", True)
    assert by_rule["F2"] == ("clean", "", False)


def found(monkeypatch, **severities):
    """The order of findings, where these rules find something and no others do."""
    outcomes = {rule: hit(severity) for rule, severity in severities.items()}
    monkeypatch.setattr(rules, "RULES", tuple(replace(rule, check=fixed(outcomes.get(rule.id))) for rule in RULES))
    return [finding.rule for finding in rules.check(EVERYTHING)[0]]


@pytest.mark.parametrize(("cause", "effect"), [(cause, rule.id) for rule in RULES for cause in rule.follows])
def test_a_cause_comes_before_what_follows_from_it(monkeypatch, cause, effect):
    assert found(monkeypatch, **{effect: "error", cause: "error"}) == [cause, effect]
    assert found(monkeypatch, **{effect: "note", cause: "warning"}) == [cause, effect]
    assert found(monkeypatch, **{effect: "error", cause: "warning"}) == [effect, cause]


def test_chains_of_causes_leave_the_others_where_they_are(monkeypatch):
    mixed = dict.fromkeys(("A2", "E7", "E8", "F1", "F5", "F11", "F12"), "error")
    assert found(monkeypatch, **mixed) == ["A2", "E8", "E7", "F12", "F11", "F1", "F5"]


def test_no_rule_follows_itself():
    follows = {rule.id: set(rule.follows) for rule in RULES}
    assert set().union(*follows.values()) <= follows.keys()
    while follows:
        roots = {rule for rule, causes in follows.items() if not causes & follows.keys()}
        assert roots, f"a circle among {sorted(follows)}"
        follows = {rule: causes for rule, causes in follows.items() if rule not in roots}


def test_all_rules_at_once_are_ranked(monkeypatch):
    order = found(monkeypatch, **{rule.id: "error" for rule in RULES})
    assert sorted(order) == sorted(rule.id for rule in RULES)
    for rule in RULES:
        assert all(order.index(cause) < order.index(rule.id) for cause in rule.follows)


def test_a_finding_carries_the_rules_text(monkeypatch):
    rule = RULES[0]
    monkeypatch.setattr(rules, "RULES", (replace(rule, check=fixed(hit("warning"))),))
    (found,), _ = rules.check(EVERYTHING)
    assert (found.title, found.threshold, found.source) == (rule.title, rule.threshold, rule.source)
    assert (found.why, found.remedy, found.confirm, found.page) == (rule.why, rule.remedy, rule.confirm, rule.page)
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


def test_a_model_without_norms_is_never_clean(inspected):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(99, 8)

        def forward(self, input_ids):
            return self.embedding(input_ids)

    inspection = inspected(Bare())
    assert inspection.findings == ()
    assert {check.status for check in inspection.checks} == {"not applicable", "not checked"}
    idle = {check.rule: check.reason for check in inspection.checks if check.status == "not applicable"}
    assert {"A1", "B3", "C1", "D1", "E1", "E3"} <= idle.keys()
    assert idle["A1"] == "no norm of single rows was found"
    assert idle["A5"] == "no norm of single rows and no other norm was found"
    # What only a run shows is still said so.
    assert all(check.status == "not checked" for check in inspection.checks if check.needs_run)


@pytest.mark.slow
def test_on_too_few_distinct_tokens_what_depends_on_the_text_is_a_note(models, facts_of, inspected):
    """F3 on one token repeated and A1 on a single one were warnings on healthy trained models."""
    model = models.train(models.tiny("GPT2"))
    idle = tuple(block(index, branch_share=0.0, cosine=1.0) for index in range(4))
    given = replace(facts_of(inspected(model), model), blocks=idle)
    severities = {}
    for distinct in (None, 7, 8):
        findings, _ = check(replace(given, model=replace(given.model, distinct=distinct)))
        (found,) = [each for each in findings if each.rule == "F3"]
        severities[distinct] = found.severity
        assert ("only 7 distinct tokens" in found.evidence[0]) == (distinct == 7)
    assert severities == {None: "warning", 7: "note", 8: "warning"}


@pytest.mark.slow
def test_what_does_not_depend_on_the_text_stays_as_bad_on_few_tokens(models, facts_of, inspected):
    model = models.tiny("GPT2")
    model.transformer.h[1].ln_1.weight.data[3] = math.nan
    given = facts_of(inspected(model), model)
    findings, _ = check(replace(given, model=replace(given.model, distinct=1)))
    assert next(each for each in findings if each.rule == "E3").severity == "error"


def test_the_worst_severity_and_many_lines():
    assert worst(["note", "error", "warning"]) == "error"
    assert worst(["note", "warning"]) == "warning"
    lines = [str(number) for number in range(9)]
    assert evidence_lines(lines[:6]) == tuple(lines[:6])
    assert evidence_lines(lines) == (*lines[:6], "and 3 more norms")
    assert evidence_lines(lines[:7])[-1] == "and 1 more norm"
    assert evidence_lines(lines, "block")[-1] == "and 3 more blocks"


def test_sites_keep_their_order_and_lines_come_by_effect():
    cases = [
        Case("a", "note", "little", 0.1),
        Case("b", "warning", "much", 0.9),
        Case("a", "note", "more", 0.5, name="c"),
    ]
    found = cases_hit(cases, "three")
    assert (found.severity, found.sites, found.measured) == ("warning", ("a", "b"), "three")
    assert found.evidence == ("b: much", "c: more", "a: little")
    assert cases_hit([], "none") is None
    found = cases_hit([Case(str(index), "note", "x") for index in range(9)], "many", "parameter")
    assert found.evidence[-1] == "and 3 more parameters"
