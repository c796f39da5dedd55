"""A violation is one line; the error holds them all, and their names."""

from __future__ import annotations

import pickle

import pytest

from normkit import specs
from normkit.testing import ConformanceError, Violation
from normkit.testing.violation import CHECKS

SEEN = Violation(check="eps", expected="1e-06 inside the root", found="none", confirm="norm(torch.zeros(1, 8))")


def test_one_line():
    assert str(SEEN) == "eps: expected 1e-06 inside the root; found none; to confirm: norm(torch.zeros(1, 8))"


def test_the_error():
    error = ConformanceError("MyNorm", specs.NANOCHAT, [SEEN])
    assert isinstance(error, AssertionError)
    assert error.violations == (SEEN,)
    assert str(error).splitlines() == [
        "MyNorm is not y = x / sqrt(mean(x^2) + 1e-06)",
        f"  {SEEN}",
        "  (a check is left out by its name: skip=('eps',))",
    ]


def test_causes_come_before_symptoms():
    order = list(CHECKS)
    assert order.index("rows") < order.index("eps") < order.index("casts") < order.index("gain gradient")
    assert all(words and not words.endswith(".") for words in CHECKS.values())


@pytest.mark.parametrize("protocol", [2, 5])
def test_the_error_survives_another_process(protocol):
    # pytest-xdist sends reports as text; multiprocessing sends the exception itself.
    error = pickle.loads(pickle.dumps(ConformanceError("MyNorm", specs.NANOCHAT, [SEEN]), protocol))
    assert error.violations == (SEEN,)
