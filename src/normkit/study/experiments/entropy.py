"""`entropy`: attention entropy collapses at high learning rates, and sigma-reparametrization keeps it from doing so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

from normkit.geometry import attention_entropy
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Bars, Chart, arm_values
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, difference, share_of_effect, value_of
from normkit.study.transformer import Transformer, attention_scores

_BARE: Mapping[str, Any] = {"norm": None, "placement": "none"}
MODELS: Mapping[str, Mapping[str, Any]] = {"Pre-LN": {}, "Pre-LN, sigma": {}, "no norm": _BARE, "no norm, sigma": _BARE}
"""Models; "sigma" is reparametrized."""


class Gain(nn.Module):
    """A learned factor on a matrix, from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, weight: Tensor) -> Tensor:
        """The factor times the matrix."""
        return self.gamma * weight


def reparametrize(model: nn.Module) -> None:
    """Replace the matrix W of each linear layer by gamma W / sigma(W), with the spectral norm by power iteration.

    Source:
        Zhai et al. 2023, arXiv:2303.06296, section 3.2; gamma starts at 1.
    """
    for module in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        parametrize.register_parametrization(spectral_norm(module), "weight", Gain())


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    model = context.transformer(**MODELS[arm.choices["model"]])
    if arm.choices["model"].endswith("sigma"):
        reparametrize(model)
    recipe = context.recipe(learning_rate=arm.choices["rate"])
    run = context.train_on_text(model, recipe)
    entropy, slack = lowest_entropy(model.eval(), context.text_ids()[:, :-1])
    return run.measurement(recipe.steps, loss=run.mean_of_last(), entropy=entropy, slack=slack)


@torch.no_grad()
def lowest_entropy(model: Transformer, ids: Tensor) -> tuple[float | None, float | None]:
    """The least mean entropy of a head as a share of uniform attention's, and the least slack of the lower bound.

    Both are None where a score is not finite, as after a run that diverged.

    With T tokens and scores of spectral norm s, the entropy of a row that sees all tokens is at least
    log(1 + (T - 1) b) + s sqrt(T (T - 1)) b / (1 + (T - 1) b), with b = exp(-s sqrt(T / (T - 1))).

    Source:
        Zhai et al. 2023, arXiv:2303.06296, theorem 3.1, with the norm of the scores in place of a product above it.
    """
    tokens = ids.shape[-1]
    uniform = sum(math.log(position) for position in range(1, tokens + 1)) / tokens
    shares, slacks = [], []
    x = model.embed(ids)
    for place, block in enumerate(model.blocks):
        scores, seen = attention_scores(model, place, x)
        if not scores.isfinite().all():
            return None, None
        shares.append((attention_entropy(scores, seen).mean((0, -1)) / uniform).amin().item())
        s = torch.linalg.matrix_norm(scores, 2)
        b = torch.exp(-s * math.sqrt(tokens / (tokens - 1)))
        least = torch.log1p((tokens - 1) * b) + s * math.sqrt(tokens * (tokens - 1)) * b / (1 + (tokens - 1) * b)
        slacks.append((attention_entropy(scores).amin(-1) - least).amin().item())
        x = block(x)
    return min(shares), min(slacks)


def _arms(settings: Settings) -> tuple[Arm, ...]:
    rates = {"low": settings["learning_rate"], "high": settings["learning_rate"] * settings["faster"]}
    return tuple(
        Arm(name=f"{model}, {words} rate", choices={"model": model, "rate": rate})
        for words, rate in rates.items()
        for model in MODELS
        # At the high rate the models without a norm answer no question.
        if words == "low" or model.startswith("Pre-LN")
    )


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    return (
        Bars(
            name="entropy",
            title="Least entropy of a head after training",
            caption="As a share of the entropy of attention to all tokens alike; 0 is attention to one token.",
            description="Each arm with its seeds.",
            label="share of the uniform entropy",
            values=arm_values(seeds, [arm.name for arm in _arms(settings)], "entropy"),
        ),
    )


_SIGMA = "no norm, sigma, low rate"
_ZHAI = "Zhai et al. 2023, arXiv:2303.06296"

STUDY = Study(
    name="entropy",
    title="Attention entropy",
    question="Does attention collapse at high learning rates, and does sigma-reparametrization stop it?",
    claims=(
        Claim(
            says="The entropy of attention is bounded below by the spectral norm of the scores",
            source=f"{_ZHAI}, theorem 3.1",
            conditions=tuple(
                Condition(
                    says=f"{arm}: no row has less entropy than the bound",
                    statistic=value_of(arm, "slack"),
                    low=-1e-9,
                    source="theory; the tolerance is rounding in float64",
                    bound="theory",
                )
                for arm in ("Pre-LN, high rate", "Pre-LN, sigma, high rate")
            ),
        ),
        Claim(
            says="Sigma-reparametrization prevents the collapse of attention entropy",
            source=f"{_ZHAI}, abstract",
            control=Condition(
                says="at the high rate a head of Pre-LN has at most a tenth of the entropy of uniform attention",
                statistic=value_of("Pre-LN, high rate", "entropy"),
                high=0.1,
                source="a collapse must be there to be prevented; a tenth is ours",
            ),
            conditions=(
                Condition(
                    says="at the high rate no head of the reparametrized model has less than half of it",
                    statistic=value_of("Pre-LN, sigma, high rate", "entropy"),
                    low=0.5,
                    published="no collapse",
                ),
                Condition(
                    says="at the high rate its loss is below that of Pre-LN",
                    statistic=difference("Pre-LN, sigma, high rate", "Pre-LN, high rate", "loss"),
                    high=0.0,
                    published="more stable training",
                    bound="paper",
                ),
            ),
        ),
        Claim(
            says="With sigma-reparametrization a transformer trains without a norm as with one",
            source=f"{_ZHAI}, abstract, of vision transformers",
            control=Condition(
                says="at the low rate a model without a norm ends at least 0.1 nats a byte above Pre-LN",
                statistic=difference("no norm, low rate", "Pre-LN, low rate", "loss"),
                low=0.1,
                source="a task that needs no norm cannot tell what replaces it",
            ),
            conditions=(
                Condition(
                    says="reparametrized and without a norm it ends at most a quarter of that above Pre-LN",
                    statistic=share_of_effect(_SIGMA, "Pre-LN, low rate", "no norm, low rate", "loss"),
                    high=0.25,
                    published="competitive performance",
                ),
            ),
        ),
    ),
    quick=budget(seeds=3, layers=12, width=32, batch=8, window=32, steps=60, learning_rate=1e-2, faster=10.0),
    full=budget(seeds=10, layers=12, width=256, batch=32, window=256, steps=3000, learning_rate=1e-3),
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="bytes of Python's standard library",
    regime="12 blocks of width 32, 60 steps of AdamW without warm-up at 0.01 and 0.1; the paper trains vision "
    "transformers, translation and speech models",
)
