import math

import pytest

from normkit.study.growth import exponent

ARM = {"a": {"depths": [2, 12, 24, 48], "square": [900.0, 12.0, 48.0, 192.0], "lost": [1.0, 2.0, None, 4.0]}}


def test_a_power_law_of_the_deep_models_is_found_whatever_the_shallow_do():
    assert exponent("a", "square")(ARM) == pytest.approx(2.0)


def test_the_root_of_a_square_has_half_its_exponent():
    assert exponent("a", "square", 0.5)(ARM) == pytest.approx(1.0)


def test_a_value_that_was_not_finite_leaves_no_exponent():
    assert math.isnan(exponent("a", "lost")(ARM))
