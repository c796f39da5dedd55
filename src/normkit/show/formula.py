"""A NormSpec in a few words, and as MathML, which browsers draw themselves."""

from __future__ import annotations

from markupsafe import Markup

from normkit.spec import NormSpec


def mathml(spec: NormSpec) -> Markup:
    """The formula as a `math` element in display style: mu is the row's mean, w its gain, b its bias."""
    # The conventions write constants and numbers, so only the text could need escaping.
    return Markup('<math display="block" alttext="{}">').format(str(spec)) + Markup(spec.mathml()) + Markup("</math>")


def formula_name(spec: NormSpec) -> str:
    """A spec in a few words: the family, its eps, and what is unusual.

    Example:
        >>> formula_name(NormSpec(eps=1e-12)), formula_name(NormSpec(eps=None, correction=1))
        ('LayerNorm, eps 1e-12', 'LayerNorm, machine eps, n - 1')
    """
    unusual = (*spec.divisor.labels, *spec.gain.labels, *spec.rows.labels)
    return ", ".join((_family(spec), spec.placement.label(spec.eps), *unusual))


def _family(spec: NormSpec) -> str:
    is_centred = spec.centring.numerator
    if spec.centring.is_half:
        return "half-centred norm"
    if spec.divisor.is_unit:
        return "centred L2 norm" if is_centred else "L2 norm"
    if spec.rows.are_samples or spec.rows.groups > 1:
        return "GroupNorm" if is_centred else "group RMSNorm"
    return "LayerNorm" if is_centred else "RMSNorm"
