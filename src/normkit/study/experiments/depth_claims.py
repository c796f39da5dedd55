"""What the study `depth` decides."""

from __future__ import annotations

import math

from normkit.study.curves import curve
from normkit.study.experiments.depth_charts import LONG, VARIANTS
from normkit.study.growth import Statistic, exponent
from normkit.study.result import Claim, Condition, Paired

_NORMED = VARIANTS[1:]


def _growth(paired: Paired) -> float:
    """Of the stream's rms without a norm, from the least depth to the greatest."""
    stream = curve(paired["no norm"]["stream"])
    return math.sqrt(stream[-1] / stream[0])


def _gradient_growth(paired: Paired) -> float:
    gradients = curve(paired["no norm"]["all_gradients"])
    return gradients[-1] / gradients[0]


def _steepest(paired: Paired) -> float:
    """The exponent of the stream's rms that is farthest from 1/4, the middle of what theory has."""
    exponents = [exponent(name, "stream", 0.5)(paired) for name in _NORMED]
    return max(exponents, key=lambda value: abs(value - 0.25))


def _spread(paired: Paired) -> float:
    """Greatest gradient of a block over the least, in the deepest model, whichever arm has most."""
    profiles = [curve(paired[name]["deepest_gradients"]) for name in _NORMED if name != "depth-scaled"]
    return max(max(profile) / min(profile) for profile in profiles)


def _against_stream(paired: Paired) -> float:
    return exponent(LONG, "last_gradient")(paired) / exponent(LONG, "stream", 0.5)(paired)


def _added(paired: Paired) -> float:
    """What a block adds to E|x|^2 / n in the deepest Pre-LN model, on the average."""
    stream = paired["pre"]["deepest_stream"]
    return float(stream[-1] - stream[0]) / (len(stream) - 1)


def _post_stream(paired: Paired) -> float:
    """The value of E|x|^2 / n after a block that is farthest from 1, over all blocks of the deepest Post-LN model."""
    return float(max(paired["post"]["deepest_stream"][1:], key=lambda value: abs(value - 1)))


def _difference(layers: int) -> Statistic:
    return lambda paired: float(
        paired[f"no norm, {layers} layers trained"]["loss"] - paired[f"pre, {layers} layers trained"]["loss"]
    )


_XIONG = "Xiong et al. 2020, arXiv:2002.04745"

CLAIMS = (
    Claim(
        says="Without normalization activations and gradients explode with depth; with it neither does",
        source="common knowledge; Brock et al. 2021, arXiv:2101.08692, analyse the growth in residual networks",
        conditions=(
            Condition(
                says="Without a norm the stream's rms is at least 1,000 times as large at 48 layers as at 2",
                statistic=_growth,
                low=1e3,
                source="a factor c > 1 a layer gives c^46; with a norm theory has at most the root of 24, 4.9",
            ),
            Condition(
                says="Without a norm the gradient is at least 1,000 times as large at 48 layers as at 2",
                statistic=_gradient_growth,
                low=1e3,
                source="as for the activations; infinite where float32 overflows",
            ),
            Condition(
                says="With a norm, wherever it stands, the stream's rms grows like L^-0.1 to L^0.6",
                statistic=_steepest,
                low=-0.1,
                high=0.6,
                published="constant (post), the root of L (pre)",
                source=f"theory has 0 to 1/2, {_XIONG}, lemma 2; 0.1 for the width and the draw of the weights",
            ),
            Condition(
                says="At 48 layers no block of post, pre, peri or DeepNorm has 10 times the gradient of another",
                statistic=_spread,
                high=10,
                source="pre and peri divide block l's by the root of l, 6.9 at 48; the rest is the draw",
            ),
        ),
        ledger=("C69",),
    ),
    Claim(
        says="Without normalization a transformer does not train; with it a deep one does",
        source="common knowledge, unqualified",
        conditions=(
            Condition(
                says="At 4 layers no norm ends at least 0.2 nats a byte above Pre-LN",
                statistic=_difference(4),
                low=0.2,
                source="a fifth of a nat is far above the spread of seeds",
                regime="the model has 4 layers",
            ),
            Condition(
                says="At 12 layers no norm ends at least 1 nat a byte above Pre-LN",
                statistic=_difference(12),
                low=1.0,
                source="what does not train ends near the loss of a guess, 5.5, or above",
                regime="the model has 12 layers",
            ),
            Condition(
                says="Pre-LN at 12 layers ends within 0.2 nats a byte of 4 layers",
                statistic=lambda paired: float(
                    paired["pre, 12 layers trained"]["loss"] - paired["pre, 4 layers trained"]["loss"]
                ),
                high=0.2,
                source="depth must not cost Pre-LN what it costs the model without a norm",
            ),
        ),
        ledger=("C69",),
    ),
    Claim(
        says="The gradient of the last MLP does not depend on depth in Post-LN and falls like 1/sqrt(L) in Pre-LN",
        source=f"{_XIONG}, theorem 1",
        conditions=(
            Condition(
                says="Post-LN: exponent 0 within 0.1",
                statistic=exponent("post", "last_gradient"),
                low=-0.1,
                high=0.1,
                published="0",
                source="theory; fitted on 12 layers and more, since the law is one of great L",
            ),
            Condition(
                says="Pre-LN: exponent -1/2 within 0.1",
                statistic=exponent("pre", "last_gradient"),
                low=-0.6,
                high=-0.4,
                published="-1/2",
                source="theory, of layers that all add alike; windows are short, and 12 layers and more are fitted",
            ),
            Condition(
                says="Pre-LN over windows four times as long: exponent",
                statistic=exponent(LONG, "last_gradient"),
                judged=False,
                source="steeper: tokens become alike with depth, so that attention averages less and the stream grows",
            ),
            Condition(
                says="The same against the rms of the stream in place of the depth",
                statistic=_against_stream,
                published="-1",
                judged=False,
                source="the Jacobian of the final norm",
            ),
            Condition(
                says="Peri-LN: exponent, beside Pre-LN's",
                statistic=exponent("peri", "last_gradient"),
                judged=False,
            ),
            Condition(
                says="DeepNorm: exponent; beta alone gives -1/4 - 1/4",
                statistic=exponent("DeepNorm", "last_gradient"),
                judged=False,
            ),
        ),
        ledger=("C70",),
    ),
    Claim(
        says="In Pre-LN each layer adds between n/2 and 3n/2 to E|x|^2; in Post-LN it stays at n",
        source=f"{_XIONG}, lemma 2",
        conditions=(
            Condition(
                says="Pre-LN: n/2 to 3n/2 a layer, on the average over 48",
                statistic=_added,
                low=0.5,
                high=1.5,
                published="(1 + l/2) n to (1 + 3l/2) n after l layers",
                source="theory, of ReLU and an MLP as wide as the stream; here GELU and four times as wide",
            ),
            Condition(
                says="Post-LN: n within 1 % after every block",
                statistic=_post_stream,
                low=0.99,
                high=1.01,
                published="n",
                source="the definition of LayerNorm; eps takes less than 1e-4 of it",
            ),
        ),
        ledger=("C70",),
    ),
    Claim(
        says="When its weights are nudged, the output of Pre-LN changes like log L",
        source="Liu et al. 2020 (Admin), arXiv:2004.08249",
        conditions=(
            Condition(
                says="Pre-LN: exponent of the mean squared change 0 to 0.5",
                statistic=exponent("pre", "change"),
                low=0,
                high=0.5,
                published="log L, which between 12 and 48 is an exponent of 0.32",
                source="theory; 0.5 would be the root of L",
            ),
        ),
        ledger=("C70",),
    ),
    Claim(
        says="When its weights are nudged, the output of Post-LN changes like L",
        source="Liu et al. 2020 (Admin), arXiv:2004.08249",
        conditions=(
            Condition(
                says="Post-LN: exponent of the mean squared change 0.75 to 1.25",
                statistic=exponent("post", "change"),
                low=0.75,
                high=1.25,
                published="1",
                source="theory, within a quarter",
            ),
        ),
        ledger=("C70",),
    ),
)
"""In the order of the study's story."""
