import inspect
from xml.etree import ElementTree

import pytest

from normkit import specs
from normkit.show.html import mathml
from normkit.show.parts import formula_name
from normkit.spec import NormSpec

PRESETS = {name: value for name, value in inspect.getmembers(specs) if isinstance(value, NormSpec)}


def plain(spec):
    """The formula's characters, without its tree."""
    return "".join(ElementTree.fromstring(mathml(spec)).itertext())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_tree_whose_text_stands_in(name):
    tree = ElementTree.fromstring(mathml(PRESETS[name]))
    assert tree.tag == "math"
    assert tree.get("alttext") == str(PRESETS[name])


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (specs.TORCH_LAYER_NORM, "y=w⊙x−μ1n∑i(xi−μ)2+10−5+b"),
        (specs.TORCH_RMS_NORM, "y=w⊙x1n∑ixi2+εmachine"),
        (specs.GEMMA, "y=(1+w)⊙x1n∑ixi2+10−6"),
        (specs.NANOCHAT, "y=x1n∑ixi2+10−6"),
        (specs.SCALE_NORM, "y=w⊙xmax(∑ixi2,10−5)"),
        (specs.ANNOTATED_TRANSFORMER, "y=w⊙x−μ1n−1∑i(xi−μ)2+10−6+b"),
        (specs.MUSE_SPARK_INPUT_SCALED, "y=u1n∑iui2+10−6,u=(1+w)⊙x"),
        (specs.SCALE_NORM.replace(multiplier="sqrt_n", eps=0.0), "y=w⊙nx∑ixi2"),
        (specs.TORCH_LAYER_NORM.replace(eps=2.5e-4), "y=w⊙x−μ1n∑i(xi−μ)2+0.00025+b"),
        (specs.TORCH_LAYER_NORM.replace(eps=2.5e-9), "y=w⊙x−μ1n∑i(xi−μ)2+2.5·10−9+b"),
    ],
)
def test_a_formula_reads_as_the_spec_computes(spec, text):
    assert plain(spec) == text


def test_eps_stands_inside_or_outside_the_root():
    def under_the_root(spec):
        root = ElementTree.fromstring(mathml(spec)).find(".//msqrt")
        return "".join(root.itertext())

    assert under_the_root(specs.TORCH_LAYER_NORM).endswith("+10−5")
    assert under_the_root(specs.ANNOTATED_TRANSFORMER).endswith("2")


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
