"""`normkit rule`: what a rule looks for, why, and what to do; without RULE, a list of all rules."""

from __future__ import annotations

import click

from normkit.cli.options import json_option
from normkit.cli.terminal import print_json, results
from normkit.errors import InputError
from normkit.text import numbered, offer

_FIELDS = ("id", "title", "severity", "threshold", "source", "why", "remedy", "confirm", "follows")


@click.command("rule", short_help="Explain a rule of inspect and watch; without RULE, list them all.")
@click.argument("name", required=False, metavar="[RULE]")
@json_option
def explain_rule(name: str | None, as_json: bool) -> None:
    """Explain RULE, such as F2: what it compares, where its threshold comes from, why it matters, what to do.

    Without RULE, list every rule with its title.
    """
    from normkit.rules import RULES
    from normkit.show.parts import Fact
    from normkit.show.terminal import lines

    chosen = [rule for rule in RULES if name is None or rule.id == name.upper()]
    if name is not None and not chosen:
        known = [f"{rule.id} {rule.title}" for rule in RULES]
        raise InputError(f"there is no rule {name}; {offer(name, known, 'normkit rule')}")
    if as_json:
        listed = [{field: getattr(rule, field) for field in _FIELDS} for rule in chosen]
        print_json({"schema_version": 1, "rules": listed})
        return
    console = results()
    if name is None:
        console.print(lines(Fact(rule.id, rule.title) for rule in RULES))
        return
    rule = chosen[0]
    console.print(f"{rule.id}  {rule.title}", style="bold")
    facts = {
        "severity": f"at worst {'an error' if rule.severity == 'error' else f'a {rule.severity}'}",
        "threshold": rule.threshold,
        "source": rule.source,
        "why": rule.why,
        "do": numbered(rule.remedy),
        "confirm": rule.confirm,
        "follows from": " ".join(rule.follows),
        "page": rule.page,
    }
    console.print(lines(Fact(label, value) for label, value in facts.items() if value))
