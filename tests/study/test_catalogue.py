import pickle
from pathlib import Path

import pytest

from normkit.errors import InputError
from normkit.study import experiments
from normkit.study.catalogue import CATALOGUE, NAMES, load
from normkit.study.workers import ArmRun


@pytest.mark.parametrize("name", NAMES)
def test_each_study_is_what_the_catalogue_says(name):
    study = load(name)
    assert study.name == name
    assert study.question.endswith("?")
    assert isinstance(study.quick["seeds"], int)
    assert study.quick.keys() >= study.full.keys()
    arms = [arm.name for arm in study.arms(study.quick)]
    assert len(set(arms)) == len(arms)
    assert all(claim.conditions for claim in study.claims)


@pytest.mark.parametrize("name", NAMES)
def test_each_trial_can_be_sent_to_another_process(name):
    study = load(name)
    for arm in study.arms(study.quick):
        sent = pickle.loads(pickle.dumps(ArmRun(measure=study.measure, arm=arm, seed=1, settings=study.quick)))
        assert (sent.measure, sent.arm, sent.settings) == (study.measure, arm, study.quick)


def test_all_quick_budgets_together_take_less_than_a_quarter_of_an_hour_on_two_cores():
    assert sum(entry.seconds for entry in CATALOGUE.values()) / 2 < 15 * 60


def test_what_is_asked_fits_a_line():
    assert all(len(entry.asks) <= 70 for entry in CATALOGUE.values())


@pytest.mark.parametrize(
    ("name", "offer"),
    [
        ("warmp", "did you mean warmup?"),
        ("zzz", "it is none of 13, such as invariances, gradients, depth; `normkit study --list` lists them"),
    ],
)
def test_an_unknown_name_is_refused(name, offer):
    with pytest.raises(InputError) as refused:
        load(name)
    assert str(refused.value).startswith(f"no study is called {name!r}; {offer}")


def test_every_study_file_is_in_the_catalogue():
    (folder,) = experiments.__path__
    # What several studies share stands beside them.
    files = {path.stem for path in Path(folder).glob("*.py") if "STUDY = Study(" in path.read_text()}
    assert files <= {entry.module for entry in CATALOGUE.values()}
