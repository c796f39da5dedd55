import pickle
from pathlib import Path

import pytest

import tiny_study
from normkit.errors import InputError
from normkit.study import experiments
from normkit.study.catalogue import CATALOGUE, NAMES, assignments, check_seeds, load, settings_of
from normkit.study.result import Study
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


def test_the_catalogue_is_whole_and_short():
    assert sum(entry.seconds for entry in CATALOGUE.values()) / 2 < 20 * 60
    assert all(len(entry.asks) <= 70 for entry in CATALOGUE.values())
    (folder,) = experiments.__path__
    # What several studies share stands beside them.
    files = {path.stem for path in Path(folder).glob("*.py") if "STUDY = Study(" in path.read_text()}
    assert files <= {entry.module for entry in CATALOGUE.values()}


@pytest.mark.parametrize(
    ("name", "offer"),
    [
        ("warmp", "did you mean warmup?"),
        ("zzz", f"it is none of {len(NAMES)}, such as invariances, gradients, depth; `normkit study --list`"),
    ],
)
def test_an_unknown_name_is_refused(name, offer):
    with pytest.raises(InputError) as refused:
        load(name)
    assert str(refused.value).startswith(f"no study is called {name!r}; {offer}")


TYPES = {"seeds": 2, "whole": 3, "rate": 0.5, "word": "a", "yes": True, "widths": (1, 2), "rates": (0.1, 1)}


@pytest.fixture
def study() -> Study:
    return tiny_study.renamed("typed", quick=TYPES, full={"seeds": 8, "whole": 30}, standard={})


def test_a_budget_is_its_defaults(study):
    assert settings_of(study, "quick") == TYPES
    assert settings_of(study) == {**TYPES, "seeds": 10}
    assert settings_of(study, "full") == {**TYPES, "seeds": 8, "whole": 30}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("whole", "-4", -4),
        ("rate", "1e-3", 1e-3),
        ("rate", "2", 2.0),
        ("word", "b c", "b c"),
        ("yes", "No", False),
        ("yes", "1", True),
        ("widths", "3", (3,)),
        ("widths", "3, 4,5", (3, 4, 5)),
        ("widths", "3,", (3,)),
        ("rates", "1,2e-1", (1.0, 0.2)),
    ],
)
def test_a_value_has_the_type_of_its_default(study, name, text, value):
    for budget in ("quick", "full"):
        found = settings_of(study, budget, {name: text})[name]
        assert found == value
        assert type(found) is type(TYPES[name])
    if name == "rates":
        assert {type(member) for member in found} == {float}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("whole", "2.5", "whole takes a whole number, got '2.5'"),
        ("rate", "fast", "rate takes a number, got 'fast'"),
        ("rate", "nan", "rate takes a number, got 'nan'"),
        ("rate", "1e999", "rate takes a number"),
        ("yes", "maybe", "yes takes true or false, got 'maybe'"),
        ("widths", "1,2.5", "widths takes whole numbers with commas between, as in 1,2, got '1,2.5'"),
        ("widths", ",", "widths takes whole numbers"),
        ("rates", "1,,2", "rates takes numbers with commas between, as in 0.1,1, got '1,,2'"),
        ("seeds", "0", "seeds must be a whole number from 1, got 0"),
    ],
)
def test_what_is_no_value_is_refused(study, name, text, expected):
    with pytest.raises(InputError) as refused:
        settings_of(study, "quick", {name: text})
    assert str(refused.value).startswith(expected)


def test_assignments_may_be_of_any_of_the_studies(study):
    assert assignments(["steps=3", " whole = a=b "], [study, tiny_study.STUDY]) == {"steps": "3", "whole": "a=b"}
    # A study passes over what is another's.
    assert settings_of(study, "quick", {"steps": "3"}) == TYPES
    with pytest.raises(InputError, match="these studies have no setting 'stps'; did you mean steps"):
        assignments(["stps=3"], [study, tiny_study.STUDY])


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["whole"], "--set takes name=value, as in steps=100, got 'whole'"),
        (["=3"], "--set takes name=value"),
        (["whole="], "--set takes name=value"),
        (["whol=3"], "typed has no setting 'whol'; did you mean whole?"),
        (["q=3"], "typed has no setting 'q'; it is none of 7, such as seeds, whole, rate"),
        (["whole=3", "whole=4"], "--set whole is given twice: 3 and 4; give it once"),
    ],
)
def test_a_text_that_assigns_nothing_is_refused(study, texts, expected):
    with pytest.raises(InputError) as refused:
        assignments(texts, [study])
    assert str(refused.value).startswith(expected)


@pytest.mark.parametrize("seeds", [0, -1, "3", 1.5])
def test_seeds_are_counted_from_one(seeds):
    with pytest.raises(InputError, match="seeds must be a whole number from 1"):
        check_seeds(seeds)
