"""A NormSpec as MathML, which every browser draws by itself; its one-line text is there for those that do not."""

from __future__ import annotations

from markupsafe import Markup

from normkit.spec import NormSpec


def mathml(spec: NormSpec) -> Markup:
    """The formula as a `math` element in display style: mu is the row's mean, w its gain, b its bias."""
    # Conventions write constants and numbers; only the text could ever need escaping.
    return Markup('<math display="block" alttext="{}">').format(str(spec)) + Markup(spec.mathml()) + Markup("</math>")
