"""The rules: facts in, findings out.

rule.py             a rule, its input (Facts) and its answers (Hit, Case)
scale.py            what eps and divisor do to a row of a given length
meant.py            A, B: each convention against the one that is meant
formula.py          A: eps and variance
epsilon.py          A: eps as a clamp or none, of the dtype, lost in 16 bits, under a rescale
arithmetic.py       A: homogeneity, cancellation, degenerate rows
gain.py             B: gain and bias
values.py           B: the numbers of gains and biases
parameters.py       B: start, decay, training and gradient of gains and biases
axes.py             C: axes, heads
coupling.py         C: time, batch, padding, ranks
placement.py        D: where the norms sit
wiring.py           D: what was declared, norms used twice, norms that overwrite
precision.py        E: 16-bit statistics, overflow, NaN
backend.py          E: cast order, results off the formula, dtypes
replicas.py         E: what differs between processes
dynamics.py         F: attention logits, the stream over the depth
depth.py            F: idle blocks, gradients over the depth, the initialisation
optimizer_steps.py  F: spikes, gradients at the end, the optimizer's eps, updates
data.py             F: what a run is fed
interventions.py    F: parameters changed by no optimizer, norms and blocks that stop
stepping.py         F: inputs too small for eps, weights before a norm, gradients not cleared, wrong or missing updates
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from normkit.rules import (
    arithmetic,
    axes,
    backend,
    coupling,
    data,
    depth,
    dynamics,
    epsilon,
    formula,
    gain,
    interventions,
    meant,
    optimizer_steps,
    parameters,
    placement,
    precision,
    replicas,
    stepping,
    values,
    wiring,
)
from normkit.rules.finding import Check, Finding, Status
from normkit.rules.rule import SEVERITIES, Facts, Hit, NotChecked, Rule
from normkit.text import counted

__all__ = ["RULES", "Facts", "Rule", "check", "ranked"]


def _place(rule: Rule) -> tuple[str, int]:
    """The letter and the number of a rule: A10 comes after A9."""
    return rule.id[0], int(re.sub(r"\D", "", rule.id))


_GROUPS = (
    *(meant, formula, epsilon, arithmetic, gain, values, parameters, axes, coupling, placement, wiring),
    *(precision, backend, replicas),
    *(dynamics, depth, optimizer_steps, data, interventions, stepping),
)
RULES: tuple[Rule, ...] = tuple(sorted(chain.from_iterable(group.RULES for group in _GROUPS), key=_place))
"""All rules, in the order in which reports list them."""


_NOUNS = {
    "norms": "norm that a spec describes",
    "other norms": "other norm",
    "blocks": "repeated block",
    "attentions": "attention call",
    "run": "training run",
}


def check(facts: Facts) -> tuple[tuple[Finding, ...], tuple[Check, ...]]:
    """Hold every rule against the facts.

    Args:
        facts: All that was measured.

    Returns:
        Findings, worst first and causes before what follows from them, at most one a rule; and what became of each
        rule, in the rules' order.
    """
    findings, checks = [], []
    for rule in RULES:
        outcome = rule.check(facts)
        status: Status = "clean"
        reason = outcome.reason if isinstance(outcome, NotChecked) else ""
        needs_run = isinstance(outcome, NotChecked) and outcome.needs_run
        if isinstance(outcome, Hit):
            status = "finding"
            findings.append(_finding(rule, _on_few_tokens(outcome, facts) if rule.is_of_text else outcome))
        elif not needs_run and _is_idle(rule, outcome, facts):
            nouns = (_NOUNS[subject] for subject in rule.looks_at)
            status, reason = "not applicable", f"no {' and no '.join(nouns)} was found"
        elif isinstance(outcome, NotChecked):
            status = "not checked"
        checks.append(Check(rule=rule.id, title=rule.title, status=status, reason=reason, needs_run=needs_run))
    return ranked(findings), tuple(checks)


def _is_idle(rule: Rule, outcome: NotChecked | None, facts: Facts) -> bool:
    """It had nothing to look at; a model whose attention or blocks were not seen may have some."""
    return not any(facts.has(subject) for subject in rule.looks_at) and (outcome is None or "norms" in rule.looks_at)


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings, worst first; of the same severity, a cause before what follows from it, else in the given order."""
    causes = {rule.id: rule.follows for rule in RULES}
    left = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
    ordered = []
    while left:
        alike = {finding.rule for finding in left if finding.severity == left[0].severity}
        first = next(finding for finding in left if alike.isdisjoint(causes[finding.rule]))
        left.remove(first)
        ordered.append(first)
    return tuple(ordered)


def _on_few_tokens(hit: Hit, facts: Facts) -> Hit:
    """The answer as a note where the text has too few distinct tokens to tell; else as it is."""
    if hit.severity == "note" or not facts.has_few_tokens:
        return hit
    tokens = counted(facts.model.distinct or 0, "distinct token")
    line = f"a note, as the text has only {tokens}, which need not be like those of other texts: give a longer one"
    return replace(hit, severity="note", evidence=(line, *hit.evidence))


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
        page=rule.page,
    )
