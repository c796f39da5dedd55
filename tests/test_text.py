"""Numbers, names and errors in words."""

import math
from importlib import metadata

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import normkit
from normkit.cli.entry import verbs
from normkit.text import (
    clipped,
    counted,
    degrees,
    dtype_name,
    first_line,
    installed_version,
    numbered,
    offer,
    own_version,
    percent,
    percent_spread,
    quoted,
    rounded_percent,
    shortened,
    significant,
    spread,
    typed_line,
)

PATHS = [f"model.layers.{layer}.{name}" for layer in range(30) for name in ("input_layernorm", "post_norm")]


@pytest.mark.parametrize(
    ("name", "known", "listing", "said"),
    [
        ("warmp", ["depth", "warmup"], "", "did you mean warmup?"),
        ("warmp", ["depth", "warmup"], "list", "did you mean warmup? `list` lists them"),
        ("x", [], "list", "there are none"),
        ("x", ["only"], "list", "there is only"),
        ("x", ["one", "two"], "list", "there are one, two"),
        ("zzz", PATHS, "list", f"it is none of 60, such as {', '.join(PATHS[:3])}; `list` lists them"),
        ("layernorm", PATHS, "", f"did you mean {', '.join(PATHS[:10:2])}?"),
        ("*.inputlayernorm", PATHS, "", f"did you mean {', '.join(PATHS[:10:2])}?"),
    ],
)
def test_at_most_five_names_the_nearest_and_what_lists_them_all(name, known, listing, said):
    assert offer(name, known, listing) == said


def test_lists_steps_long_texts_errors_dtypes_angles_nouns_and_versions():
    assert shortened(["a", "b", "c"], 3) == "a, b, c"
    assert shortened(["a", "b", "c", "d"], 2) == "a, b and 2 more"
    assert [numbered(steps) for steps in ([], ["a"], ["a", "b"])] == ["", "a", "1. a\n2. b"]
    assert clipped("12345678", 8) == "12345678"
    assert clipped("123456789", 8) == "12345..."
    assert quoted("x" * 10**6) == f"'{'x' * 76}..."
    assert quoted({"a": "\n"}) == "{'a': '\\n'}"
    # An error without a message is its type.
    error = ValueError("\n first\nsecond")
    assert (first_line(error), typed_line(error)) == ("first", "ValueError: first")
    assert (first_line(KeyError()), typed_line(KeyError())) == ("KeyError", "KeyError")
    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert [degrees(angle) for angle in (90.0, 88.156, math.nan)] == ["90.00°", "88.16°", "NaN"]
    assert [counted(number, "norm") for number in (0, 1, 1300)] == ["0 norms", "1 norm", "1,300 norms"]
    assert installed_version("normkit") is not None
    assert installed_version("no-such-package") is None


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.951, "95.1 %"), (0.01, "1 %"), (0.00794, "0.794 %"), (1.5, "150 %"), (12.345, "1234 %"), (0.0, "0 %")],
)
def test_shares_in_a_sentence(share, words):
    assert percent(share) == words


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
def test_percentages_in_a_table(share, text):
    assert rounded_percent(share) == text


def test_a_spread_of_equal_numbers_is_one_number():
    assert spread([0.12, 0.1201]) == "0.120"
    assert spread([3.0, 0.5]) == "0.500 to 3.00"
    assert spread([math.nan, 1.0]) == "1.00 to NaN"
    assert spread([]) == "none"
    assert percent_spread([0.2, 0.01]) == "1.0 to 20.0 %"
    assert percent_spread([0.2]) == "20.0 %"


def test_without_an_installed_distribution_the_version_is_unknown(monkeypatch):
    """As with PYTHONPATH=src."""
    normal = metadata.version
    hidden = metadata.PackageNotFoundError("normkit")
    monkeypatch.setattr(metadata, "version", lambda name: raised(hidden) if name == "normkit" else normal(name))
    assert own_version() == normkit.__version__ == "unknown"
    done = CliRunner().invoke(verbs, ["--version"], prog_name="normkit")
    assert (done.exit_code, done.output) == (0, "normkit unknown\n")


def raised(error):
    raise error
