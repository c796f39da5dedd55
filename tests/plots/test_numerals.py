import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normkit.plots.numerals import counted, degrees, percent, percent_spread, significant, spread


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1.00"),
        (9.996, "10.0"),
        (0.0012345, "0.00123"),
        (0.00099999, "0.00100"),
        (0.0009994, "9.99e-4"),
        (123.4, "123"),
        (1234.5, "1,230"),
        (99_960.0, "1e5"),
        (1.5e-9, "1.5e-9"),
        (-0.25, "-0.250"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "NaN"),
    ],
)
def test_three_significant_digits(value, text):
    assert significant(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300))
def test_what_is_written_is_the_value_rounded_to_three_digits(value):
    assert float(significant(value).replace(",", "")) == float(f"{value:.2e}")


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (1.0, "100 %"),
        (0.5, "50.0 %"),
        (0.0999, "10.0 %"),
        (0.031, "3.1 %"),
        (0.00996, "1.0 %"),
        (0.00031, "0.031 %"),
        (9e-6, "<0.001 %"),
        (-9e-6, ">-0.001 %"),
        (0.9999, ">99.9 %"),
        (math.nan, "NaN"),
    ],
)
def test_percentages(share, text):
    assert percent(share) == text


def test_a_spread_of_equal_numbers_is_one_number():
    assert spread([0.12, 0.1201]) == "0.120"
    assert spread([3.0, 0.5]) == "0.500 to 3.00"
    assert spread([math.nan, 1.0]) == "1.00 to NaN"
    assert spread([]) == "none"
    assert percent_spread([0.2, 0.01]) == "1.0 to 20.0 %"
    assert percent_spread([0.2]) == "20.0 %"


def test_angles_have_two_decimals():
    assert [degrees(angle) for angle in (90.0, 88.156, math.nan)] == ["90.00°", "88.16°", "NaN"]


def test_nouns_agree_with_their_number():
    assert [counted(number, "norm") for number in (0, 1, 1300)] == ["0 norms", "1 norm", "1,300 norms"]
