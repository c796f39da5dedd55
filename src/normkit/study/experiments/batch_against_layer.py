"""`batch-vs-layer`: where statistics over the batch fail, where they serve, and what they make samples depend on."""

from __future__ import annotations

from collections.abc import Callable

from normkit.study.experiments import batch_models
from normkit.study.experiments.batch_charts import charts
from normkit.study.experiments.batch_claims import CLAIMS
from normkit.study.laboratory import Laboratory
from normkit.study.result import Arm, Measurement, Settings, Study

_MEASURES: dict[str, Callable[[Laboratory, Arm], Measurement]] = {
    "MLP": batch_models.perceptron,
    "CNN": batch_models.convolutional,
    "RNN": batch_models.recurrent,
    "Transformer": batch_models.transformer,
    "dependence": batch_models.dependence,
    "variance": batch_models.variance,
}


def _arms(settings: Settings) -> tuple[Arm, ...]:
    sizes, image_sizes, rates = (settings[name] for name in ("batch_sizes", "image_batch_sizes", "text_rates"))
    assert isinstance(sizes, tuple)
    assert isinstance(image_sizes, tuple)
    assert isinstance(rates, tuple)
    perceptrons = [
        _arm("MLP", f"{norm}, batch {size}", norm=norm, batch=size) for norm in batch_models.NORMS for size in sizes
    ]
    images = [
        _arm("CNN", f"{norm}, batch {size}", norm=norm, batch=size)
        for norm in ("BatchNorm", "LayerNorm", "no norm")
        for size in image_sizes
    ]
    sequences = [
        _arm("RNN", words, cost=4.0, norm=norm, own_statistics=own)
        for words, norm, own in (
            ("one BatchNorm", "BatchNorm", False),
            ("a BatchNorm for each time", "BatchNorm", True),
            ("LayerNorm", "LayerNorm", False),
            ("no norm", "no norm", False),
        )
    ]
    texts = [
        _arm("Transformer", f"{norm}, rate {rate:g}", cost=6.0, norm=norm, rate=rate)
        for norm in ("BatchNorm", "LayerNorm")
        for rate in rates
    ]
    dependences = [
        _arm("dependence", f"{norm}, {mode}", cost=0.3, norm=norm, training=mode == "training")
        for norm in batch_models.NORMS
        for mode in ("training", "evaluation")
    ]
    return (*perceptrons, *images, *sequences, *texts, *dependences, _arm("variance", "Gaussian rows", cost=0.1))


def _arm(kind: str, words: str, cost: float = 1.0, **choices: object) -> Arm:
    return Arm(name=f"{kind}: {words}", choices={"kind": kind, **choices}, cost=cost)


def _measure(lab: Laboratory, arm: Arm) -> Measurement:
    return _MEASURES[arm.choices["kind"]](lab, arm)


STUDY = Study(
    name="batch-vs-layer",
    title="BatchNorm against LayerNorm",
    question="Where do statistics over the batch fail where those of single samples serve, and where not?",
    claims=CLAIMS,
    quick={
        "seeds": 3,
        "width": 64,
        "layers": 3,
        "steps": 600,
        "learning_rate": 1e-3,
        "batch_sizes": (1, 2, 4, 16, 64, 256),
        "channels": 16,
        "image_steps": 500,
        "image_rate": 1e-3,
        "image_batch_sizes": (2, 32),
        "sequence_steps": 600,
        "sequence_rate": 3e-3,
        "sequence_batch": 32,
        "extra_rows": (0, 1, 2, 4, 8),
        "text_layers": 4,
        "text_steps": 250,
        "text_rates": (1e-3, 3e-3),
        "text_batch": 8,
        "window": 64,
    },
    full={"seeds": 8, "steps": 3000, "image_steps": 2000, "sequence_steps": 2000, "text_steps": 1000},
    arms=_arms,
    measure=_measure,
    charts=charts,
    data="scikit-learn's digits, the last 450 of 1,797 held out; bytes of Python's standard library",
    regime="nets of width 64 or 16 to 64 channels, a few hundred steps of AdamW, images of 8 x 8 pixels; the same rate "
    "for all norms of a kind of net; BatchNorm with a momentum of 0.1. At 1 row a batch BatchNorm cannot be trained",
    needs=("sklearn",),
)
