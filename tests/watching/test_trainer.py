"""The watch as a callback of a real `transformers.Trainer`."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from normkit.errors import InputError
from normkit.measurement.training import Quantity, Training
from normkit.watching.reporting import ReportFiles
from normkit.watching.trainer import WatchCallback
from small_training import fingerprint

pytestmark = pytest.mark.slow

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 3},
    "in bfloat16": {"bf16": True},
    "checkpointed": {"activation_checkpointing": True},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    "not clipped": {"max_grad_norm": 0.0},
}


@pytest.fixture(autouse=True)
def _no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training begins with a look through all objects that there are, which takes as long as the training."""
    monkeypatch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=int))


def build() -> GPT2LMHeadModel:
    torch.default_generator.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))


def texts(count: int) -> list[dict[str, Tensor]]:
    rows = torch.randint(0, 32, (count, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def trained(folder: Path, *given: Any, **arguments: Any) -> Trainer:
    """Train six steps; the Trainer logs the loss and the norm of the gradients before it clips."""
    trainer = trainer_of(folder, *given, **arguments)
    trainer.train()
    return trainer


def trainer_of(
    folder: Path,
    callback: WatchCallback | None,
    model: nn.Module | None = None,
    kind: type[Trainer] = Trainer,
    **arguments: Any,
) -> Trainer:
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    recipe = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "max_grad_norm": 0.5}
    settings = TrainingArguments(str(folder), logging_steps=1, **{**quiet, **recipe, **arguments})
    return kind(
        model=model or build(),
        args=settings,
        train_dataset=texts(36),
        eval_dataset=texts(4),
        callbacks=[] if callback is None else [callback],
    )


def logged(trainer: Trainer, name: str) -> list[float]:
    return [float(line[name]) for line in trainer.state.log_history if "grad_norm" in line]


def values(training: Training, quantity: Quantity) -> tuple[float, ...]:
    return next((series.values for series in training.of(quantity)), ())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "accumulated" else pytest.mark.slow) for name in WAYS]
)
def test_a_trainer_trains_the_same_with_a_watch(name: str, tmp_path: Path) -> None:
    plain, callback, model = trained(tmp_path, None, **WAYS[name]), WatchCallback(every=2), build()
    hooks = fingerprint(model)
    with_watch = trained(tmp_path, callback, model, **WAYS[name])
    for one, other in zip(plain.model.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert plain.state.log_history[0].get("loss") == with_watch.state.log_history[0].get("loss")
    training = callback.inspection().training
    assert (training.steps, training.reports, training.remarks) == (6, 3, ())
    # The Trainer logs four decimals of its loss.
    assert values(training, "loss") == pytest.approx(logged(with_watch, "loss"), abs=1e-4)
    assert values(training, "gradient norm") == pytest.approx(logged(with_watch, "grad_norm"), rel=1e-5)
    assert min(values(training, "gradient norm")) > 0.5
    if name in ("plain", "not clipped"):
        assert [path for path, *_ in fingerprint(model)] == [path for path, *_ in hooks]
        assert [line[2:4] for line in fingerprint(model)] == [line[2:4] for line in hooks]


def test_a_loss_that_the_trainer_computes_is_not_seen_and_gradients_are(tmp_path: Path) -> None:
    callback = WatchCallback(every=2)
    trainer = trained(tmp_path, callback, label_smoothing_factor=0.1)
    training = callback.inspection().training
    assert values(training, "loss") == ()
    assert values(training, "gradient norm") == pytest.approx(logged(trainer, "grad_norm"), rel=1e-5)


class Bypassing(Trainer):
    """Computes the loss past the model's hooks, as a compiled call does."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model.forward(**inputs)
        return (output.loss, output) if return_outputs else output.loss


def test_gradients_seen_after_clipping_are_remarked(tmp_path: Path) -> None:
    said: list[str] = []
    batch = {"input_ids": texts(2)[0]["input_ids"][None]}
    callback = WatchCallback(every=2, batch=batch, say=said.append)
    trained(tmp_path, callback, kind=Bypassing)
    training = callback.inspection().training
    assert training.steps == 6
    assert any("only after the Trainer clipped" in line for line in training.remarks)
    # Clipping divides by the norm plus 1e-6.
    assert values(training, "gradient norm") == pytest.approx([0.5] * 6, rel=1e-5)
    assert values(training, "loss") == ()


def test_a_loss_scaler_is_taken_out() -> None:
    """The events of a Trainer, without one: accelerate has no scaler on the CPU."""
    model, callback, norms, losses = build().train(), WatchCallback(every=2), [], []
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    held = SimpleNamespace(optimizer=optimizer, scaler=scaler, gradient_state=SimpleNamespace(sync_gradients=True))
    callback.on_train_begin(None, None, None, model=model, optimizer=held)
    for text in texts(3):
        loss = model(**{name: value[None] for name, value in text.items()}).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        losses.append(loss.item())
        callback.on_pre_optimizer_step(None, None, None)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    callback.on_train_end(None, None, None)
    training = callback.inspection().training
    assert values(training, "loss") == pytest.approx(losses, rel=1e-6)
    assert values(training, "gradient norm") == pytest.approx(norms, rel=1e-5)


class Failing(GPT2LMHeadModel):
    """Raises, or gives NaN, in the fourth step."""

    calls = 0
    gives: str = "an error"

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **others: Any) -> Any:
        # What looks for norms calls the model in evaluation mode.
        self.calls += self.training
        if self.calls == 4 and self.training:
            if self.gives == "an error":
                raise RuntimeError("out of luck")
            with torch.no_grad():
                self.transformer.h[1].ln_2.weight[0] = torch.nan
        return super().forward(input_ids, labels=labels, **others)


def failing(gives: str) -> Failing:
    model = Failing(build().config)
    model.gives = gives
    return model


def hook_count(model: nn.Module) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


@pytest.mark.exhaustive
def test_a_training_that_raises_is_closed_by_hand_or_by_the_next(tmp_path: Path) -> None:
    model, callback = failing("an error"), WatchCallback(every=2)
    trainer = trainer_of(tmp_path, callback, model)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.train()
    assert hook_count(model) > 0
    callback.close()
    callback.close()
    assert hook_count(model) == 0
    training = callback.inspection().training
    assert (training.steps, training.reports) == (3, 2)
    model.calls = 0
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.train()
    trainer.train()
    assert callback.inspection().training.steps == 6
    assert hook_count(model) == 0


@pytest.mark.usefixtures("blank_pages")
def test_a_training_that_raises_is_closed_at_the_end_of_a_block(tmp_path: Path) -> None:
    model = failing("an error")
    with pytest.raises(RuntimeError, match="out of luck"), WatchCallback(every=2, out=tmp_path / "report") as callback:
        trained(tmp_path, callback, model)
    assert hook_count(model) == 0
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (report["training"]["steps"], report["training"]["reason"]) == (3, "the run was left by RuntimeError")
    # What raises behind a training that came to its end is none of its affairs.
    callback = WatchCallback(every=2, out=tmp_path / "other")
    trained(tmp_path, callback)
    with pytest.raises(ValueError, match="later"), callback:
        raise ValueError("later")
    report = json.loads((tmp_path / "other" / "report.json").read_text())
    assert (report["training"]["steps"], report["training"]["reason"]) == (6, "end of the run")
    with WatchCallback() as unused:
        pass
    with pytest.raises(InputError, match="nothing was trained yet"):
        unused.inspection()


@pytest.mark.exhaustive
def test_a_training_that_raises_is_closed_when_the_callback_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    monkeypatch.setattr(ReportFiles, "write", lambda _, inspection: reasons.append(inspection.training.reason))
    model = failing("an error")
    with pytest.raises(RuntimeError, match="out of luck"):
        trained(tmp_path, WatchCallback(every=2, out=tmp_path / "report"), model)
    gc.collect()
    assert hook_count(model) == 0
    assert reasons == ["the training did not come to its end"]


def test_the_first_place_with_nan_is_told_in_its_step(tmp_path: Path) -> None:
    said: list[str] = []
    callback = WatchCallback(every=2, say=said.append)
    trained(tmp_path, callback, failing("NaN"))
    inspection = callback.inspection()
    training = inspection.training
    assert (training.reason, training.reason_step) == ("non-finite values in the forward pass", 3)
    assert any("first at transformer.h.1.ln_2" in line for line in said)
    assert inspection.findings[0].severity == "error"
    assert callback.findings == inspection.findings
