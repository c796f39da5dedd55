"""Parameters that no optimizer changed; norms, blocks and gradients that stop: planted in short runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from normkit.inspection.result import Inspection
from small_training import Run, Transformer

pytestmark = pytest.mark.slow

STRUCK = 13


def struck(change: Callable[[nn.Module], None], steps: int = 24, every: int = 25, build=Transformer) -> Inspection:
    """A run with a change of the model before one of its steps."""

    def body(run: Run) -> None:
        if len(run.losses) == STRUCK:
            with torch.no_grad():
                change(run.model)
        run.step()

    # It ends before its second report.
    return Run(build, rate=1e-3).go(body=body, steps=steps, every=every).watch.inspection()


def first(inspection: Inspection) -> tuple[str, str, tuple[str, ...]]:
    finding = inspection.findings[0]
    return finding.rule, finding.severity, finding.sites


def test_a_run_that_is_let_alone():
    inspection = struck(lambda _: None)
    training = inspection.training
    assert (training.changes, training.stopped, training.origin) == ((), (), None)
    # The updates of all steps are seen, whatever the reports.
    (typical,) = [series for series in training.of("update ratio") if not series.path]
    assert typical.steps == tuple(range(24))


@pytest.mark.parametrize(("factor", "told"), [(30.0, "became 30 times as large"), (0.0, "was set to 0")])
def test_a_gain_that_is_multiplied(factor: float, told: str):
    inspection = struck(lambda model: model.blocks[1].norm_1.weight.mul_(factor))
    assert first(inspection) == ("F20", "error", ("blocks.1.norm_1",))
    assert f"step {STRUCK}: blocks.1.norm_1.weight {told}" in inspection.findings[0].measured
    training = inspection.training
    assert (training.origin.kind, training.origin.step, training.origin.path) == (
        "parameter",
        STRUCK,
        "blocks.1.norm_1",
    )
    verdicts = {answer.question: answer.verdict for answer in training.answers}
    assert verdicts["Is a norm wrong?"] == "yes"
    assert verdicts["Is the learning rate too high, and where?"] == "no"


def test_a_matrix_that_is_replaced():
    inspection = struck(lambda model: model.blocks[0].mlp[0].weight.copy_(0.15 * torch.randn(32, 16)))
    assert first(inspection) == ("F20", "warning", ("blocks.0.mlp.0.weight",))
    assert inspection.training.changes[0].step == STRUCK


def test_changes_that_add_up():
    def body(run: Run) -> None:
        if len(run.losses) >= STRUCK:
            with torch.no_grad():
                run.model.blocks[0].attention.qkv.weight.mul_(1.2)
        run.step()

    inspection = Run(rate=1e-3).go(body=body, steps=STRUCK + 6).watch.inspection()
    assert [(each.path, each.step) for each in inspection.training.changes] == [
        ("blocks.0.attention.qkv.weight", STRUCK)
    ]
    assert inspection.training.changes[0].factor == pytest.approx(1.2**4, rel=1e-2)


def test_norms_that_are_bypassed():
    def bypass(model: nn.Module) -> None:
        model.blocks[0].norm_1.forward = lambda x: x
        model.blocks[0].norm_2 = nn.Identity()

    inspection = struck(bypass)
    assert first(inspection) == ("F21", "error", ("blocks.0.norm_1", "blocks.0.norm_2"))
    assert {stop.step for stop in inspection.training.stopped} == {STRUCK}
    assert inspection.training.answers[1].verdict == "yes"


def test_a_bypass_that_copies_is_seen_in_a_report():
    def bypass(model: nn.Module) -> None:
        model.blocks[0].norm_1.forward = lambda x: x.clone()

    inspection = struck(bypass, every=5)
    assert first(inspection) == ("F21", "error", ("blocks.0.norm_1",))
    assert [stop.step for stop in inspection.training.stopped] == [15]


def test_a_block_that_hands_on_what_it_is_given():
    def bypass(model: nn.Module) -> None:
        model.blocks[1].forward = lambda x, _mask=None: x

    inspection = struck(bypass)
    # The norms of a block that does not run are no cause; its weights get no gradient.
    assert first(inspection) == ("F22", "error", ("blocks.1",))
    assert inspection.training.origin.step == STRUCK


def test_a_weight_that_gets_no_gradient_any_more():
    def detach(model: nn.Module) -> None:
        inner = model.blocks[1].mlp.forward
        model.blocks[1].mlp.forward = lambda x: inner(x).detach()

    inspection = struck(detach)
    assert first(inspection) == ("F22", "warning", ("blocks.1.mlp.0.weight", "blocks.1.mlp.2.weight"))


def test_layers_that_are_dropped_at_random_have_not_stopped():
    def body(run: Run) -> None:
        block = run.model.blocks[1]
        if len(run.losses) % 3:
            block.__dict__.pop("forward", None)
        else:
            block.forward = lambda x, _mask=None: x
        run.step()

    inspection = Run(rate=1e-3).go(body=body, steps=24).watch.inspection()
    assert inspection.training.stopped == ()


def test_an_eps_that_is_set_in_the_run():
    inspection = struck(lambda model: setattr(model.blocks[1].norm_1, "eps", 1.0), every=5)
    assert first(inspection) == ("F26", "error", ("blocks.1.norm_1",))
