"""A NormSpec as MathML, which every browser draws by itself; its one-line text stands in where none does."""

from __future__ import annotations

from markupsafe import Markup

from normkit.spec import NormSpec


def mathml(spec: NormSpec) -> Markup:
    """The formula as a `math` element in display style: mu is the row's mean, w its gain, b its bias."""
    row = "u" if spec.weight_placement == "before" else "x"
    fraction = f"<mfrac>{_numerator(spec, row)}{_denominator(spec, row)}</mfrac>"
    gain = f"<mrow><mo>(</mo><mn>{spec.weight_offset:g}</mn><mo>+</mo><mi>w</mi><mo>)</mo></mrow>"
    gain = gain if spec.weight_offset else "<mi>w</mi>"
    bias = "<mo>+</mo><mi>b</mi>" if spec.has_bias else ""
    if spec.weight_placement == "before":
        right = f"{fraction}{bias}<mo>,</mo><mspace width='1em'/><mi>u</mi><mo>=</mo>{gain}<mo>⊙</mo><mi>x</mi>"
    else:
        right = f"{gain}<mo>⊙</mo>{fraction}{bias}" if spec.has_weight else f"{fraction}{bias}"
    content = f"<mrow><mi>y</mi><mo>=</mo>{right}</mrow>"
    # Everything above is made of constants and numbers; only the text could ever need escaping.
    return Markup('<math display="block" alttext="{}">').format(str(spec)) + Markup(content) + Markup("</math>")


def _numerator(spec: NormSpec, row: str) -> str:
    numerator = _deviation(row) if spec.centre_numerator else f"<mi>{row}</mi>"
    return f"<mrow><msqrt><mi>n</mi></msqrt>{numerator}</mrow>" if spec.multiplier == "sqrt_n" else numerator


def _denominator(spec: NormSpec, row: str) -> str:
    square = _sum_of_squares(spec, row)
    root = f"<msqrt>{square}</msqrt>"
    if spec.eps == 0:
        return root
    eps = _epsilon(spec.eps)
    match spec.eps_placement:
        case "inside":
            return f"<msqrt><mrow>{square}<mo>+</mo>{eps}</mrow></msqrt>"
        case "outside":
            return f"<mrow>{root}<mo>+</mo>{eps}</mrow>"
        case "clamp":
            return f"<mrow><mi>max</mi><mo>(</mo>{root}<mo>,</mo>{eps}<mo>)</mo></mrow>"


def _sum_of_squares(spec: NormSpec, row: str) -> str:
    square = f"<msubsup><mi>{row}</mi><mi>i</mi><mn>2</mn></msubsup>"
    if spec.centre_statistics:
        element = f"<msub><mi>{row}</mi><mi>i</mi></msub>"
        square = f"<msup><mrow><mo>(</mo>{element}<mo>−</mo><mi>μ</mi><mo>)</mo></mrow><mn>2</mn></msup>"
    squares = f"<munder><mo>∑</mo><mi>i</mi></munder>{square}"
    if spec.reduction == "sum":
        return f"<mrow>{squares}</mrow>"
    count = "<mrow><mi>n</mi><mo>−</mo><mn>1</mn></mrow>" if spec.correction else "<mi>n</mi>"
    return f"<mrow><mfrac><mn>1</mn>{count}</mfrac>{squares}</mrow>"


def _deviation(row: str) -> str:
    return f"<mrow><mi>{row}</mi><mo>−</mo><mi>μ</mi></mrow>"


def _epsilon(eps: float | None) -> str:
    if eps is None:
        return "<msub><mi>ε</mi><mtext>machine</mtext></msub>"
    digits, _, exponent = f"{eps:g}".partition("e")
    if not exponent:
        return f"<mn>{digits}</mn>"
    sign = "<mo>−</mo>" if int(exponent) < 0 else ""
    power = f"<msup><mn>10</mn><mrow>{sign}<mn>{abs(int(exponent))}</mn></mrow></msup>"
    return power if digits == "1" else f"<mrow><mn>{digits}</mn><mo>·</mo>{power}</mrow>"
