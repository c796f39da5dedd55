"""Faults planted in clean models and runs are named and placed; clean models and healthy runs are left alone."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator

import pytest
import torch

import altered_norms
import injected_runs
import injection
import planting
import subjects
from clean_models import clean_models, own_models
from helpers import ROOT
from injected_runs import RUN_FAULTS
from injection import FAULTS

PAGE = ROOT / "docs" / "explanation" / "faults.md"
OWN = {f"{clean.group}: {clean.name}": clean for clean in own_models()}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


def alarms(inspection):
    return [(each.rule, each.severity, each.measured) for each in inspection.findings if each.severity != "note"]


def missed(trials):
    """Trials in which the report began with another rule or place."""
    return [(trial.fault, trial.family, trial.planted, trial.reported[:2]) for trial in trials if not trial.is_found]


def stated(column):
    """The share that the page states of all trials of models, in per cent."""
    row = re.search(r"^\| \*\*all\*\* \|.*\| ([\d.]+) % \| ([\d.]+) % \|$", PAGE.read_text(), re.MULTILINE)
    return float(row[column])


@pytest.mark.slow
def test_a_few_faults():
    chance = random.Random(1)
    trials = [injection.attempt(fault, chance.choice(fault.families), 1) for fault in FAULTS[::26]]
    assert missed(trials) == []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_one_fault_of_each_other_kind():
    chance = random.Random(0)
    others = [fault for fault in FAULTS if fault not in FAULTS[::26]]
    trials = [injection.attempt(fault, chance.choice(fault.families), 0) for fault in others]
    assert len(missed(trials)) <= 0.05 * len(trials), missed(trials)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_one_fault_of_a_run():
    fault = next(fault for fault in RUN_FAULTS if fault.name == "a frozen norm")
    assert missed([injected_runs.attempt(fault, "rmsnorm", 0)]) == []


@pytest.mark.slow
def test_a_few_clean_models():
    sample = random.Random(0).sample([*OWN], 2)
    assert {name: found for name in sample if (found := alarms(OWN[name].inspected()))} == {}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_faults_of_runs():
    """The catalogue's runs on windows of a quarter of their bytes, which show the same."""
    trials = [
        injected_runs.attempt(fault, twin, 2, window=32)
        for fault, twin in zip(RUN_FAULTS, itertools.cycle(injected_runs.TWINS), strict=False)
        if twin in fault.twins
    ]
    assert len(missed(trials)) <= 0.05 * len(trials), missed(trials)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("twin", "window"), [*((twin, 128) for twin in injected_runs.TWINS), *((twin, 32) for twin in injected_runs.TWINS)]
)
def test_a_healthy_run(twin, window):
    assert alarms(injected_runs.healthy(twin, 7, window=window)) == []


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_larger_sample_of_clean_models():
    """Five of each kind."""
    kinds = itertools.groupby(sorted(OWN), lambda name: name.partition(":")[0])
    sample = [name for _, names in kinds for name in random.Random(1).sample([*names], 5)]
    assert len(sample) == 30
    assert {name: found for name in sample if (found := alarms(OWN[name].inspected()))} == {}


def test_there_are_enough_faults():
    assert len(FAULTS) + len(RUN_FAULTS) >= 60


@pytest.mark.exhaustive
@pytest.mark.slow
def test_there_are_enough_clean_models():
    assert len({(clean.group, clean.name) for clean in clean_models()}) >= 400


def test_the_page_states_the_bars():
    assert stated(1) >= 95
    assert stated(2) >= 95
    assert "0 with an error or a warning" in PAGE.read_text()


@pytest.mark.parametrize("family", ["GPT2", "Llama", "Gemma", "Cohere", "Bert", "T5Encoder", "PlainRMS"])
def test_a_norm_written_anew_computes_the_same(family):
    model = subjects.subject(family).model
    for norm in planting.norms(model).values():
        x = torch.randn(2, 5, *norm.weight.shape)
        torch.testing.assert_close(altered_norms.Altered(norm, altered_norms.right)(x), norm(x))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_the_model(fault):
    family = fault.families[0]
    clean, broken = (subjects.subject(family, **fault.options) for _ in range(2))
    planted = fault.plant(broken.model, random.Random(0))
    assert planted
    assert len(set(planted)) == len(planted)
    before = {name: repr(module) for name, module in clean.model.named_modules()}
    after = {name: repr(module) for name, module in broken.model.named_modules()}
    weights = zip(clean.model.parameters(), broken.model.parameters(), strict=False)
    moved = any(not torch.equal(a, b) for a, b in weights if a.shape == b.shape)
    patched = any("forward" in vars(module) for module in broken.model.modules())
    assert moved or patched or before != after or _epsilons(clean.model) != _epsilons(broken.model)


def _epsilons(model):
    return [altered_norms.eps_of(norm) for norm in planting.norms(model).values()]
