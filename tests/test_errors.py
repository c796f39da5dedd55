"""The exception tree: one base to catch, and torch's own types where torch has one."""

from __future__ import annotations

import inspect
import pickle

import pytest

from normkit import errors

CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, Exception)]


def test_the_tree_is_the_one_that_the_docstring_draws():
    drawn = {word for word in (errors.__doc__ or "").replace("`--", "|--").split() if word.endswith("Error")}
    assert drawn >= {error.__name__ for error in CLASSES}
    assert len(CLASSES) == 10


BUILTINS = {"ShapeError": RuntimeError, "DtypeError": RuntimeError, "UseError": RuntimeError, "KindError": TypeError}


@pytest.mark.parametrize("error", CLASSES)
def test_one_base_and_torchs_type_catch_it_and_it_survives_a_process_boundary(error):
    assert issubclass(error, errors.NormkitError)
    assert issubclass(error, ValueError)
    assert error.__doc__
    with pytest.raises(BUILTINS.get(error.__name__, ValueError), match="a message"):
        raise error("a message")
    copy = pickle.loads(pickle.dumps(error("a message")))
    assert type(copy) is error
    assert str(copy) == "a message"
