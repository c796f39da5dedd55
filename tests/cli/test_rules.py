"""`normkit rule`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from normkit.cli.entry import verbs
from normkit.rules import RULES


def rule(*arguments: str) -> Result:
    return CliRunner().invoke(verbs, ["rule", *arguments], prog_name="normkit")


def test_all_rules_with_their_titles() -> None:
    done = rule()
    assert (done.exit_code, done.stderr) == (0, "")
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert [(name, title.rstrip()) for name, title in lines] == [(rule.id, rule.title) for rule in RULES]


@pytest.mark.parametrize("name", ["F2", "f2"])
def test_one_rule_is_explained(name: str) -> None:
    done = rule(name)
    assert (done.exit_code, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    known = next(rule for rule in RULES if rule.id == "F2")
    for part in (
        known.title,
        known.threshold,
        known.source,
        known.why,
        *known.remedy,
        known.confirm,
        *known.follows,
        known.page,
    ):
        assert part in text
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.slow
def test_every_rule_can_be_explained() -> None:
    for each in RULES:
        assert rule(each.id).exit_code == 0


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("F33", "did you mean F3 "), ("eps is added outside the rot", "did you mean A2 "), ("zzz", "it is none of ")],
)
def test_an_unknown_rule_is_one_line_with_the_nearest(name: str, nearest: str) -> None:
    done = rule(name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"normkit: there is no rule {name}; {nearest}")
    assert done.stderr.endswith(" `normkit rule` lists them\n")
    assert done.stderr.count("\n") == 1


def test_json_is_one_document_of_the_rules_that_were_asked_for() -> None:
    one, all_of_them = (json.loads(rule(*asked, "--json").stdout) for asked in (("f2",), ()))
    assert [each["id"] for each in all_of_them["rules"]] == [each.id for each in RULES]
    assert one["schema_version"] == all_of_them["schema_version"] == 1
    assert one["rules"] == [each for each in all_of_them["rules"] if each["id"] == "F2"]
    assert one["rules"][0]["remedy"] == [*next(each for each in RULES if each.id == "F2").remedy]
