"""A NormSpec as MathML, which browsers draw themselves; the one-line text is an alternative for those that do not."""

from __future__ import annotations

from markupsafe import Markup

from normkit.spec import NormSpec


def mathml(spec: NormSpec) -> Markup:
    """The formula as a `math` element in display style: mu is the row's mean, w its gain, b its bias."""
    # The conventions write constants and numbers, so only the text could need escaping.
    return Markup('<math display="block" alttext="{}">').format(str(spec)) + Markup(spec.mathml()) + Markup("</math>")
