"""`invariances`: the changes of weights and data that each norm ignores, in matrices and within a trained model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import parametrizations

from normkit import geometry, specs
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart, Marks
from normkit.study.model_parts import BatchNorm, NormLayer
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, filled, padded
from normkit.study.transformer import Transformer, branch_ends

_MATRIX_SCALE = "weight matrix re-scaling"
_MATRIX_CENTRE = "weight matrix re-centring"
_VECTOR_SCALE = "single weight vector re-scaling"
_DATA_SCALE = "dataset re-scaling"
_DATA_CENTRE = "dataset re-centring"
_CASE_SCALE = "single case re-scaling"
_ROWS = (_MATRIX_SCALE, _MATRIX_CENTRE, _VECTOR_SCALE, _DATA_SCALE, _DATA_CENTRE, _CASE_SCALE)

PUBLISHED: Mapping[str, tuple[str, ...]] = {
    "batch": (_MATRIX_SCALE, _VECTOR_SCALE, _DATA_SCALE, _DATA_CENTRE),
    "weight": (_MATRIX_SCALE, _VECTOR_SCALE),
    "layer": (_MATRIX_SCALE, _MATRIX_CENTRE, _DATA_SCALE, _CASE_SCALE),
    "rms": (_MATRIX_SCALE, _DATA_SCALE, _CASE_SCALE),
    "none": (),
}
"""Norm -> the changes that it ignores according to Ba et al. 2016, table 1; for rms Zhang & Sennrich 2019, table 1."""

_WORDS = {"batch": "BatchNorm", "weight": "weight norm", "layer": "LayerNorm", "rms": "RMSNorm", "none": "no norm"}

NO_EPS = 1e-30
"""Instead of 0, which torch's BatchNorm refuses; it has no effect on variances near 1."""

Change = tuple[Tensor, Callable[[Tensor], Tensor]]
"""Other weights of a linear layer, and a function on its input rows."""


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    norm = arm.choices["norm"]
    model = build(norm, context, eps=NO_EPS)
    recipe = context.recipe()
    run = context.train_on_text(model, recipe)
    ids = context.text_ids(seed=context.seed)
    with_eps = build(norm, context, eps=context["eps"])
    with_eps.load_state_dict(model.state_dict())
    table = geometry.invariances(seed=context.seed)
    return {
        "losses": padded(run.losses, recipe.steps),
        "matrices": {row: table.cell(row, norm).error for row in _ROWS} if norm in table.norms else {},
        "model": errors(model, ids, seed=context.seed),
        "model_eps": errors(with_eps, ids, seed=context.seed),
        "findings": list(run.findings),
    }


def build(norm: str, context: ArmContext, *, eps: float) -> Transformer:
    """A model in which each norm, a key of `PUBLISHED`, follows a linear layer without a bias: x + norm(f(x))."""
    norms: Mapping[str, NormLayer] = {
        "batch": partial(BatchNorm, eps=eps),
        "layer": specs.TORCH_LAYER_NORM.replace(eps=eps),
        "rms": specs.TORCH_RMS_NORM.replace(eps=eps),
    }
    model = context.transformer(norm=norms.get(norm), placement="output", final_norm=False)
    for _, linear in branch_ends(model):
        linear.register_parameter("bias", None)
        if norm == "weight":
            parametrizations.weight_norm(linear)
    return model


def errors(model: Transformer, ids: Tensor, *, seed: int) -> dict[str, float]:
    """Largest relative change of a model's logits for each transformation of the last MLP's second linear layer.

    In float64 and training mode. The rows x are the inputs of that layer; W are its weights as they are stored.

    Args:
        model: From `build`; in float64 afterwards.
        ids: Tokens of one batch.
        seed: Of the factor and the shifts.
    """
    model.to(torch.float64).train()
    *_, (_, linear) = branch_ends(model)
    # Its only parameter, or the last of two: weight norm stores the length first and then the direction.
    *_, stored = linear.parameters()
    changes = _changes(stored.detach(), torch.Generator().manual_seed(seed))
    ids = ids[:, :-1].to(next(model.parameters()).device)

    @torch.no_grad()
    def logits(weight: Tensor, of_rows: Callable[[Tensor], Tensor]) -> Tensor:
        """With other weights and rows for the layer; the weights are restored."""
        kept = stored.detach().clone()
        with linear.register_forward_pre_hook(lambda _module, inputs: (of_rows(inputs[0]),)):
            try:
                stored.copy_(weight)
                output: Tensor = model(ids)
            finally:
                stored.copy_(kept)
        return output

    before = logits(stored.detach(), lambda rows: rows)
    largest = before.abs().max()
    return {name: ((logits(*change) - before).abs().max() / largest).item() for name, change in changes.items()}


def _changes(weight: Tensor, generator: torch.Generator) -> dict[str, Change]:
    """The six transformations of the table; c is drawn from (2, 4), shifts have the size of the rows."""

    def drawn() -> Tensor:
        return torch.randn(weight.shape[1], generator=generator, dtype=torch.float64).to(weight)

    factor = 2 + 2 * torch.rand((), generator=generator, dtype=torch.float64).item()
    first = torch.ones(len(weight), 1).to(weight)
    first[0] = factor
    weight_shift, shift = drawn() * weight.square().mean().sqrt(), drawn()

    def first_case(rows: Tensor) -> Tensor:
        scale = torch.ones(*rows.shape[:-1], 1).to(rows)
        scale[0, 0] = factor
        return rows * scale

    return {
        _MATRIX_SCALE: (factor * weight, lambda rows: rows),
        _MATRIX_CENTRE: (weight + weight_shift, lambda rows: rows),
        _VECTOR_SCALE: (first * weight, lambda rows: rows),
        _DATA_SCALE: (weight, lambda rows: factor * rows),
        _DATA_CENTRE: (weight, lambda rows: rows + rows.square().mean().sqrt() * shift),
        _CASE_SCALE: (weight, first_case),
    }


def _cells(paired: Paired, norm: str, *, ignored: bool) -> list[float]:
    """The changes of the output by the transformations that a norm is said to ignore, or by the others."""
    cells = [cell for place in ("matrices", "model") for cell in paired[norm][place].items()]
    return [error for row, error in cells if (row in PUBLISHED[norm]) is ignored]


def _with_eps(norm: str, paired: Paired) -> float:
    return max(float(paired[norm]["model_eps"][row]) for row in PUBLISHED[norm])


def _ignores(norm: str) -> Condition:
    return Condition(
        says=f"{_WORDS[norm]}: the {len(PUBLISHED[norm])} that it ignores change the output by at most 1e-10",
        statistic=lambda paired: max(_cells(paired, norm, ignored=True)),
        high=1e-10,
        published=f"{len(PUBLISHED[norm])} cells invariant",
        source="theory: 0; float64 rounds to about 1e-16, a model's sums to some hundred times that",
    )


def _notices(norm: str) -> Condition:
    return Condition(
        says=f"{_WORDS[norm]}: the other {len(_ROWS) - len(PUBLISHED[norm])} change it by at least 1e-4",
        statistic=lambda paired: min(_cells(paired, norm, ignored=False)),
        low=1e-4,
        published=f"{len(_ROWS) - len(PUBLISHED[norm])} cells not invariant",
        source="a factor of 2 or more in one layer of a model; a million times what is called invariant",
    )


def _charts(_settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    def cell(place: str, row: str, norm: str) -> tuple[bool | None, float]:
        found = filled([paired[norm][place][row] for paired in seeds])
        return max(found) <= 1e-10, statistics.median(found)

    # A matrix without a norm is not measured.
    matrices, model = tuple(norm for norm in PUBLISHED if norm != "none"), tuple(PUBLISHED)
    return tuple(
        Marks(
            name=f"invariances-{place}",
            title=f"What each norm ignores: {where}",
            caption="Yes: the output stays to 1e-10 for every seed. The number is the median relative change.",
            description="LayerNorm alone ignores a re-centred weight matrix; BatchNorm alone re-centred data.",
            rows=_ROWS,
            columns=tuple(_WORDS[norm] for norm in norms),
            cells=tuple(tuple(cell(place, row, norm) for norm in norms) for row in _ROWS),
        )
        for place, norms, where in (
            ("matrices", matrices, "a random matrix and its norm"),
            ("model", model, "a trained model, at one layer"),
        )
    )


STUDY = Study(
    name="invariances",
    title="Invariances",
    question="Which changes of weights and data does a linear layer followed by a norm not notice?",
    claims=(
        Claim(
            says="Batch, weight and layer normalization ignore 4, 2 and 4 of 6 transformations",
            source="Ba, Kiros & Hinton 2016, arXiv:1607.06450, table 1",
            conditions=tuple(check(norm) for norm in ("batch", "weight", "layer") for check in (_ignores, _notices)),
        ),
        Claim(
            says="RMSNorm ignores all re-scalings but that of one weight vector, and no re-centring",
            source="Zhang & Sennrich 2019, arXiv:1910.07467, table 1",
            conditions=(_ignores("rms"), _notices("rms")),
        ),
        Claim(
            says="Without a norm every transformation is noticed",
            source="theory; the control of the two tables",
            conditions=(
                _notices("none"),
                *(
                    Condition(
                        says=f"{_WORDS[norm]} with eps: the largest change by a transformation that it ignores without "
                        "eps",
                        statistic=partial(_with_eps, norm),
                        source="eps (1 - 1 / c^2) / (2 variance) to first order",
                    )
                    for norm in ("batch", "layer", "rms")
                ),
            ),
        ),
    ),
    quick=budget(seeds=3, layers=2, width=32, batch=4, window=32, steps=20, learning_rate=1e-3, eps=1e-5),
    full=budget(seeds=10, layers=4, width=64, batch=8, window=64, steps=200),
    arms=lambda _settings: tuple(Arm(name=norm, choices={"norm": norm}) for norm in PUBLISHED),
    measure=_measure,
    charts=_charts,
    data="random matrices, and bytes of Python's standard library",
    regime="eps of 1e-30, float64; linear layers without a bias, positive factors",
)
