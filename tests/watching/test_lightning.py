"""The watch as a callback of a real Lightning Trainer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from normkit.errors import InputError
from normkit.measurement.training import Quantity, Training
from normkit.watching.lightning import LightningWatch
from normkit.watching.reporting import ReportFiles
from small_training import VOCABULARY, Transformer, fingerprint

pytestmark = [
    # Lightning's own use of torch's trees, and its advice.
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '(train|val)_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


class Task(pl.LightningModule):
    """One network and one optimizer; notes each loss that is differentiated and each norm of the gradients."""

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__()
        self.network = network or Transformer()
        self.losses: list[float] = []
        self.norms: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.network(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, _index: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, _index: int) -> None:
        self.loss(batch)

    def on_before_backward(self, loss: Tensor) -> None:
        self.losses.append(float(loss.detach()))

    def on_before_optimizer_step(self, _optimizer: Any) -> None:
        gradients = [each.grad for each in self.parameters() if each.grad is not None]
        self.norms.append(float(torch.cat([each.flatten().double() for each in gradients]).norm()))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ByHand(Task):
    """Two optimizers, stepped one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, _index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.SGD(parameters[:10], lr=0.1), torch.optim.AdamW(parameters[10:], lr=1e-3)]


class Several(Task):
    """Several submodules, called through the LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.network(tokens))

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


WAYS: dict[str, tuple[Callable[[], Task], dict[str, Any]]] = {
    "plain": (Task, {}),
    "accumulated and clipped": (Task, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "in bfloat16": (Task, {"precision": "bf16-mixed"}),
    "validated": (Task, {"val_check_interval": 2}),
    "by hand": (ByHand, {}),
    "through itself": (Several, {}),
}


def rows() -> DataLoader[Tensor]:
    tokens = torch.randint(0, VOCABULARY, (24, 9), generator=torch.Generator().manual_seed(1))
    return DataLoader(tokens, batch_size=2)


def fitted(build: Callable[[], Task], callback: LightningWatch | None, **options: Any) -> Task:
    torch.default_generator.manual_seed(0)
    task = build()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = [] if callback is None else [callback]
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=6, callbacks=callbacks, **quiet, **options)
    trainer.fit(task, rows(), rows() if "val_check_interval" in options else None)
    return task


def values(training: Training, quantity: Quantity) -> tuple[float, ...]:
    return next((series.values for series in training.of(quantity)), ())


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WAYS)
def test_a_task_is_trained_the_same_with_a_watch(name: str) -> None:
    build, options = WAYS[name]
    callback = LightningWatch(every=2)
    plain, task = fitted(build, None, **options), fitted(build, callback, **options)
    for one, other in zip(plain.state_dict().values(), task.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert fingerprint(task.network) == fingerprint(plain.network)
    inspection = callback.inspection()
    training = inspection.training
    assert (training.steps, training.remarks) == (6, ())
    parts = options.get("accumulate_grad_batches", 1)
    # What is differentiated is divided by the number of micro-batches already.
    losses = [sum(task.losses[start : start + parts]) for start in range(0, 6 * parts, parts)]
    assert values(training, "loss") == pytest.approx(losses, rel=1e-5)
    assert values(training, "gradient norm") == pytest.approx(task.norms, rel=1e-5)
    prefix = "network." if name == "through itself" else ""
    assert inspection.sites[0].path == f"{prefix}blocks.0.norm_1"


@pytest.mark.slow
def test_a_loss_scaler_is_taken_out() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    callback = LightningWatch(every=2)
    task = fitted(Task, callback, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    training = callback.inspection().training
    assert values(training, "loss") == pytest.approx([loss / 1024 for loss in task.losses], rel=1e-6)
    assert values(training, "gradient norm") == pytest.approx(task.norms, rel=1e-5)


@pytest.mark.slow
def test_all_optimizers_are_measured_in_turn() -> None:
    callback = LightningWatch(every=2)
    fitted(ByHand, callback)
    training = callback.inspection().training
    assert (training.every, training.reports) == (3, 2)
    assert len(training.optimizers) == 2
    moved = {series.path: series.values for series in training.of("update ratio")}
    # Step 0 is the first optimizer's, step 3 the second's.
    assert [value > 0 for value in moved["blocks.0.norm_1.weight"]] == [True, False]
    assert [value > 0 for value in moved["norm.weight"]] == [False, True]


class Failing(Transformer):
    """Raises, or gives NaN, in the fourth step."""

    calls = 0
    gives = "an error"

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        # What looks for norms calls the network in evaluation mode.
        self.calls += self.training
        if self.calls == 4 and self.training:
            if self.gives == "an error":
                raise RuntimeError("out of luck")
            with torch.no_grad():
                self.blocks[1].norm_2.weight[0] = torch.nan
        return super().forward(tokens, attention_mask)


@pytest.mark.slow
def test_a_training_that_raises_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []
    monkeypatch.setattr(ReportFiles, "write", lambda _, inspection: reasons.append(inspection.training.reason))
    network = Failing()
    before = fingerprint(network)
    callback = LightningWatch(every=2, out=tmp_path)
    with pytest.raises(RuntimeError, match="out of luck"):
        fitted(lambda: Task(network), callback)
    assert [line[2:4] for line in fingerprint(network)] == [line[2:4] for line in before]
    assert callback.inspection().training.steps == 3
    assert reasons == ["the run was left by RuntimeError"]


@pytest.mark.slow
def test_the_first_place_with_nan_is_told_in_its_step() -> None:
    network, said = Failing(), []
    network.gives = "NaN"
    callback = LightningWatch(every=2, say=said.append)
    fitted(lambda: Task(network), callback)
    training = callback.inspection().training
    assert (training.reason, training.reason_step) == ("non-finite values in the forward pass", 3)
    assert any("first at blocks.1.norm_2" in line for line in said)
    assert callback.findings[0].severity == "error"


class WithoutForward(Task):
    def __init__(self) -> None:
        super().__init__()
        self.other = Transformer()


@pytest.mark.slow
def test_several_submodules_ask_for_the_one_to_watch() -> None:
    with pytest.raises(InputError, match=r"has no forward: name the submodule .* one of 'network', 'other'"):
        fitted(WithoutForward, LightningWatch())
    with pytest.raises(InputError, match="such as 'network', 'other'; got 'netwrk'"):
        fitted(WithoutForward, LightningWatch(module="netwrk"))
    callback = LightningWatch(module="network.blocks")
    fitted(WithoutForward, callback)
    assert "was not called" in callback.inspection().training.remarks[-1]
    callback = LightningWatch(module="network")
    fitted(WithoutForward, callback)
    assert callback.inspection().sites[0].path == "blocks.0.norm_1"


def test_without_lightning_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "normkit.watching.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(InputError, match=r'not installed: pip install "normkit\[lightning\]"'):
        importlib.import_module("normkit.watching.lightning")
