"""The rules: facts in, findings out.

facts.py            the input of every rule, and the formula that is meant at each norm
rule.py             a rule and its answers (Hit, NotChecked, Case)
finding.py          what is reported: findings, and the outcome of each rule
scale.py            what eps and divisor do to a row of a given length
meant.py            A, B: each convention against the one that is meant
epsilon.py          A: the size and the place of eps, eps of the dtype, lost in 16 bits, under a rescale
arithmetic.py       A: the divisor, homogeneity, cancellation, degenerate rows, the input's gradient
gain.py             B: the 1 of a 1 + weight gain
values.py           B: the numbers of gains and biases
modulation.py       B: scale and shift that a condition gives
parameters.py       B: start, decay, training and gradient of gains and biases
lost_updates.py     B: 16-bit parameters whose updates are lost in rounding
axes.py             C: axes, heads
coupling.py         C: time, batch, padding, ranks
batch_norms.py      C: statistics of batch norms, frozen and dead ones
batch_statistics.py C: what these statistics are of: modes, eps, divisors, dropout, padding
placement.py        D: where the norms sit
wiring.py           D: what was declared, norms used twice, norms that overwrite
precision.py        E: 16-bit statistics, overflow, NaN, differences between processes
backend.py          E: cast order, results off the formula, dtypes
dynamics.py         F: attention logits, the stream over the depth
depth.py            F: idle blocks, gradients over the depth, the initialisation
optimizer_steps.py  F: spikes, gradients at the end, the optimizer's eps, updates
data.py             F: what a run is fed, and where that changed
interventions.py    F: parameters changed by no optimizer, norms and blocks that stop
stepping.py         F: inputs too small for eps, weights before a norm, gradients not cleared, wrong or missing updates
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from normkit.rules import (
    arithmetic,
    axes,
    backend,
    batch_norms,
    batch_statistics,
    coupling,
    data,
    depth,
    dynamics,
    epsilon,
    gain,
    interventions,
    lost_updates,
    meant,
    modulation,
    optimizer_steps,
    parameters,
    placement,
    precision,
    stepping,
    values,
    wiring,
)
from normkit.rules.facts import Facts, Subject
from normkit.rules.finding import Check, Finding, Status
from normkit.rules.rule import SEVERITIES, Hit, NotChecked, Rule
from normkit.text import counted

__all__ = ["RULES", "Facts", "Rule", "check", "ranked"]

_GROUPS = (
    *(meant, epsilon, arithmetic, gain, values, modulation, parameters, lost_updates),
    *(axes, coupling, batch_norms, batch_statistics, placement, wiring, precision, backend),
    *(dynamics, depth, optimizer_steps, data, interventions, stepping),
)
RULES: tuple[Rule, ...] = tuple(
    sorted(
        (rule for group in _GROUPS for rule in group.RULES),
        # By letter and number: A10 comes after A9.
        key=lambda rule: (rule.id[0], int(re.sub(r"\D", "", rule.id))),
    )
)
"""All rules, in the order in which reports list them."""

_NOUNS: dict[Subject, str] = {
    "norms": "norm of single rows",
    "other norms": "other norm",
    "batch norms": "batch norm",
    "adaptive norms": "adaptive norm",
    "blocks": "repeated block",
    "attentions": "attention call",
    "loss": "loss of a text",
    "run": "training run",
}


def check(facts: Facts) -> tuple[tuple[Finding, ...], tuple[Check, ...]]:
    """Hold every rule against the facts.

    Args:
        facts: All that was measured.

    Returns:
        Findings, worst first and causes before what follows from them, at most one per rule; and the outcome of each
        rule, in the rules' order.
    """
    findings, checks = [], []
    for rule in RULES:
        outcome = rule.check(facts)
        status: Status = "clean"
        reason = outcome.reason if isinstance(outcome, NotChecked) else ""
        needs_run = isinstance(outcome, NotChecked) and outcome.needs_run
        # Attention calls and blocks that were not seen may exist; norms that were not found do not.
        has_nothing = not any(facts.has(subject) for subject in rule.looks_at)
        if isinstance(outcome, Hit):
            status = "finding"
            findings.append(_finding(rule, outcome, facts))
        elif not needs_run and has_nothing and (outcome is None or "norms" in rule.looks_at):
            nouns = (_NOUNS[subject] for subject in rule.looks_at)
            status, reason = "not applicable", f"no {' and no '.join(nouns)} was found"
        elif isinstance(outcome, NotChecked):
            status = "not checked"
        checks.append(Check(rule=rule.id, title=rule.title, status=status, reason=reason, needs_run=needs_run))
    return ranked(findings), tuple(checks)


def _finding(rule: Rule, hit: Hit, facts: Facts) -> Finding:
    """The hit with the rule's texts; a note if it depends on the text and the text has too few distinct tokens."""
    if rule.is_of_text and hit.severity != "note" and facts.has_few_tokens:
        tokens = counted(facts.model.distinct or 0, "distinct token")
        line = f"a note, as the text has only {tokens}, and other texts may differ: give a longer one"
        hit = replace(hit, severity="note", evidence=(line, *hit.evidence))
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
        remedy=rule.remedy if hit.remedy is None else hit.remedy,
        confirm=rule.confirm,
        page=rule.page,
    )


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings, worst first; of the same severity, a cause before what follows from it, else in the given order."""
    causes_of = {rule.id: rule.follows for rule in RULES}
    left = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
    ordered = []
    while left:
        alike = {finding.rule for finding in left if finding.severity == left[0].severity}
        first = next(finding for finding in left if alike.isdisjoint(causes_of[finding.rule]))
        left.remove(first)
        ordered.append(first)
    return tuple(ordered)
