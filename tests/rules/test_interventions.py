"""Group F, what was done to a run."""

from __future__ import annotations

import pytest

from normkit.measurement.training import Change, Setting, Stop
from normkit.rules.interventions import RULES, changed_parameters, changed_settings, stopped_blocks, stopped_norms
from normkit.rules.rule import NO_RUN, NotChecked
from watched_runs import facts, parameter, series, training

PARAMETERS = (parameter("norm.weight", "gain", site="norm"), parameter("w"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_healthy_run_is_clean(rule):
    assert rule.check(facts(training(parameters=PARAMETERS))) is None
    assert rule.check(facts(None)) is NO_RUN


def change(path, ratio=1.4, factor=1.0, step=20):
    return Change(step=step, path=path, ratio=ratio, factor=factor)


@pytest.mark.parametrize(
    ("changed", "severity", "site", "told"),
    [
        (change("norm.weight", 29.0, 30.0), "error", "norm", "norm.weight became 30 times as large"),
        (change("norm.weight", 0.6, 1.1), "error", "norm", "norm.weight was replaced: its change is 0.6 times its rms"),
        (change("w"), "warning", "w", "w was replaced: its change is 1.4 times its rms"),
        (change("w", 1.0, 0.0), "error", "w", "w was set to 0"),
        (change("w", 9.0, 10.0), "error", "w", "w became 10 times as large"),
    ],
)
def test_a_parameter_that_no_optimizer_changed(changed, severity, site, told):
    found = changed_parameters.check(facts(training(changes=(changed,), parameters=PARAMETERS)))
    assert (found.severity, found.sites) == (severity, (site,))
    assert found.measured == f"step 20: {told}, by no optimizer"
    assert found.evidence == (f"step 20: {told}" + ("; it is the norm's gain" if site == "norm" else ""),)


def test_what_a_change_did_to_the_logits_is_told():
    logits = series("logit bound", [40.0, 40.0, 5e3], "attention", first=10, every=5)
    run = training(logits, changes=(change("attention.q.weight", 11.0, 12.0),), parameters=PARAMETERS)
    lines = changed_parameters.check(facts(run)).evidence
    assert lines[-1] == "attention logits of attention may reach 5e+03 since, 40 before"
    assert (
        len(changed_parameters.check(facts(training(logits, changes=(change("w"),), parameters=PARAMETERS))).evidence)
        == 1
    )


def test_a_norm_comes_before_other_parameters():
    changes = (change("w", 9.0, 10.0), change("norm.weight", 1.0, 2.0))
    assert changed_parameters.check(facts(training(changes=changes, parameters=PARAMETERS))).sites == ("norm", "w")


def test_without_an_optimizer_nothing_is_known_of_who_changes_parameters():
    assert isinstance(changed_parameters.check(facts(training(optimizers=(), parameters=PARAMETERS))), NotChecked)


def test_what_stopped():
    stops = [Stop(kind=kind, path=kind, step=20, before=20, since=40) for kind in ("norm", "block", "gradient")]
    run = facts(training(stopped=tuple(stops), parameters=PARAMETERS))
    norms, blocks = stopped_norms.check(run), stopped_blocks.check(run)
    assert (norms.severity, norms.sites) == ("error", ("norm",))
    assert (blocks.severity, blocks.sites) == ("error", ("block", "gradient"))
    assert norms.evidence == ("norm: took part in 20 measured steps, and in none of the 40 from step 20 on",)
    assert stopped_blocks.check(facts(training(stopped=tuple(stops[2:])))).severity == "warning"


def test_settings_that_changed():
    def found(name):
        setting = Setting(path="norm", name=name, before=1e-6, after=1.0, step=20)
        return changed_settings.check(facts(training(settings=(setting,), parameters=PARAMETERS)))

    assert (found("variance_epsilon").severity, found("variance_epsilon").sites) == ("error", ("norm",))
    assert found("eps").measured == "norm: eps, its eps, went from 1e-06 to 1 by step 20"
    assert found("calls").severity == "note"
