import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normkit import specs
from normkit.report.parts import Fact
from normkit.report.wording import formula_name, printable, tail


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (specs.TORCH_LAYER_NORM, "LayerNorm, eps 1e-5"),
        (specs.TORCH_RMS_NORM, "RMSNorm, machine eps"),
        (specs.GEMMA, "RMSNorm, eps 1e-6, 1 + weight"),
        (specs.ANNOTATED_TRANSFORMER, "LayerNorm, eps 1e-6 outside, n - 1"),
        (specs.SCALE_NORM, "L2 norm, eps 1e-5 clamp"),
        (specs.POOLFORMER, "GroupNorm, eps 1e-5"),
        (specs.POCKET_TTS, "half-centred norm, eps 1e-5, n - 1"),
        (specs.MUSE_SPARK_INPUT_SCALED, "RMSNorm, eps 1e-6, 1 + weight, gain before normalizing"),
        (specs.TORCH_LAYER_NORM.replace(eps=0.0), "LayerNorm, no eps"),
        (specs.TORCH_LAYER_NORM.replace(eps=0.5), "LayerNorm, eps 0.5"),
        (specs.TORCH_LAYER_NORM.replace(groups=4), "GroupNorm, eps 1e-5, 4 groups"),
    ],
)
def test_a_formula_is_named_by_what_is_unusual_about_it(spec, name):
    assert formula_name(spec) == name


@pytest.mark.slow
@given(st.text())
def test_printed_text_moves_no_cursor_and_can_be_written(text):
    shown = printable(text)
    assert all(unicodedata.category(character)[0] != "C" for character in shown)
    shown.encode()


def test_what_is_not_to_be_seen_becomes_an_escape():
    assert printable("a\x1b[31m\n\u202eß\ud800 é") == "a\\x1b[31m\\n\\u202eß\\ud800 é"


def test_every_string_of_a_part_is_made_printable():
    assert printable((Fact(label="\x07", value="ok"), 3)) == (Fact(label="\\x07", value="ok"), 3)


def test_the_end_of_a_path_is_kept():
    assert tail("model.layers.0.norm", 8) == "….0.norm"
    assert tail("norm", 4) == "norm"
