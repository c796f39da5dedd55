"""The rules: facts in, findings out.

rule.py        what a rule is; Facts, its input
scale.py       what eps and divisor do to a row of a given length
formula.py     A: eps and variance
gain.py        B: gain and bias
placing.py     D: where the norms sit
precision.py   E: 16-bit statistics, overflow, NaN
dynamics.py    F: attention logits, growth over the depth
"""

from __future__ import annotations

from normkit.inspection.result import Check, Finding, Status
from normkit.inspection.rules import dynamics, formula, gain, placing, precision
from normkit.inspection.rules.rule import SEVERITIES, Facts, Hit, NotChecked, Rule

__all__ = ["RULES", "Facts", "Rule", "check"]

RULES: tuple[Rule, ...] = (*formula.RULES, *gain.RULES, *placing.RULES, *precision.RULES, *dynamics.RULES)
"""All rules, in the order in which reports list them."""


def check(facts: Facts) -> tuple[tuple[Finding, ...], tuple[Check, ...]]:
    """Hold every rule against the facts.

    Args:
        facts: What was measured.

    Returns:
        Findings, worst first, at most one a rule; and what became of each rule, in the rules' order.
    """
    findings, checks = [], []
    for rule in RULES:
        outcome = rule.check(facts)
        status: Status = "clean"
        if isinstance(outcome, Hit):
            status = "finding"
            findings.append(_finding(rule, outcome))
        elif isinstance(outcome, NotChecked):
            status = "not checked"
        reason = outcome.reason if isinstance(outcome, NotChecked) else ""
        checks.append(Check(rule=rule.id, title=rule.title, status=status, reason=reason))
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return tuple(findings), tuple(checks)


def _finding(rule: Rule, hit: Hit) -> Finding:
    return Finding(
        rule=rule.id,
        title=rule.title,
        severity=hit.severity,
        sites=hit.sites,
        measured=hit.measured,
        threshold=rule.threshold,
        source=rule.source,
        evidence=hit.evidence,
        why=rule.why,
        remedy=rule.remedy,
        confirm=rule.confirm,
    )
