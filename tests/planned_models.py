"""Requests on tiny models: what planning is asked, and what it answers."""

from __future__ import annotations

from typing import Any

from torch import nn

from normkit.checkpoint.opening import open_model
from normkit.checkpoint.plan import FoldPlan, Operation, TensorEdit, VectorEdit
from normkit.checkpoint.plan_builder import FoldContext, PlanBuilder
from normkit.checkpoint.planning import make_plan
from normkit.models.settings import Settings
from tiny_models import tiny

ALL: tuple[Operation, ...] = ("gain", "bias", "final", "centre", "rms", "value")


def model_of(family: str, **options: Any) -> nn.Module:
    return tiny(family, **options)[0]


def plan_of(model: nn.Module, *operations: Operation, **options: Any) -> FoldPlan:
    return make_plan(open_model(model), operations=operations or None, **options)


def context_on(model: nn.Module, *operations: Operation, untie: bool = False) -> tuple[FoldContext, PlanBuilder]:
    opened = open_model(model)
    settings = Settings(opened.graph.family, opened.config)
    context = FoldContext(
        graph=opened.graph, settings=settings, source=opened.source, operations=operations, untie=untie
    )
    return context, PlanBuilder(opened.source.tensors, "same")


def edits_of(plan: FoldPlan | PlanBuilder) -> dict[str, TensorEdit | VectorEdit]:
    edits = plan.edits if isinstance(plan, FoldPlan) else plan.edits()
    return {edit.name: edit for edit in edits}
