"""`normkit rule`: what a rule looks for, why, and what to do; without one, all of them."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import click

from normkit.cli.terminal import results
from normkit.errors import InputError

if TYPE_CHECKING:
    from normkit.inspection.rules.rule import Rule


@click.command("rule", short_help="Explain a rule of inspect and watch; without one, list them all.")
@click.argument("name", required=False, metavar="[RULE]")
def explain_rule(name: str | None) -> None:
    """Explain RULE, as in F2: what it holds against what, where that comes from, why it matters, what to do.

    Without RULE, every rule with its title.
    """
    from normkit.inspection.rules import RULES
    from normkit.report.grids import lines
    from normkit.report.parts import Fact

    console = results()
    if name is None:
        console.print(lines(Fact(label=rule.id, value=rule.title) for rule in RULES))
        return
    rule = next((rule for rule in RULES if rule.id == name.upper()), None)
    if rule is None:
        raise InputError(f"there is no rule {name}; {_nearest(name, RULES)}normkit rule lists them all")
    steps = rule.remedy if len(rule.remedy) < 2 else [f"{n}. {step}" for n, step in enumerate(rule.remedy, 1)]
    console.print(f"{rule.id}  {rule.title}", style="bold")
    facts = {
        "severity": f"at worst {'an error' if rule.severity == 'error' else f'a {rule.severity}'}",
        "threshold": rule.threshold,
        "source": rule.source,
        "why": rule.why,
        "do": "\n".join(steps),
        "confirm": rule.confirm,
        "follows from": " ".join(rule.follows),
        "page": rule.page,
    }
    console.print(lines(Fact(label=label, value=value) for label, value in facts.items() if value))


def _nearest(name: str, rules: tuple[Rule, ...]) -> str:
    """The rule whose identifier or title is most like what was typed, as half a sentence; "" where none is."""
    titles = {**{rule.title.lower(): rule for rule in rules}, **{rule.id.lower(): rule for rule in rules}}
    found = difflib.get_close_matches(name.lower(), titles, n=1, cutoff=0.5)
    return f"the nearest is {titles[found[0]].id}, {titles[found[0]].title}; " if found else ""
