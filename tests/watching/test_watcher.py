"""A watched training is the training without a watch, bit by bit, whatever the loop does."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.errors import InputError
from normkit.watching.watcher import Watch, watch
from small_training import VOCABULARY, Run, Transformer, assert_same, fingerprint

pytestmark = pytest.mark.slow


def accumulated(run: Run) -> None:
    run.optimizer.zero_grad()
    total = 0.0
    for _ in range(3):
        loss = run.loss(run.model, run.batch()) / 3
        loss.backward()
        total += loss.item()
    run.tell(total)
    run.optimizer.step()


def with_shapes_that_change(run: Run) -> None:
    step = len(run.losses)
    run.step(batch=run.batch(rows=1 + step % 3, tokens=4 + 5 * step))


def under_autocast(run: Run) -> None:
    def call(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run.model(tokens)

    run.step(call)


def evaluated_between(run: Run) -> None:
    run.step()
    run.model.eval()
    with torch.inference_mode():
        run.model(run.batch(rows=5))
    run.model.train()


def generated_between(run: Run) -> None:
    run.step()
    tokens = run.batch(rows=1, tokens=3)
    with torch.no_grad():
        for _ in range(3):
            tokens = torch.cat([tokens, run.model(tokens)[:, -1:].argmax(-1)], 1)


def called_twice(run: Run) -> None:
    loss = run.loss(run.model, run.batch()) + run.loss(run.model, run.batch())
    run.optimizer.zero_grad()
    loss.backward()
    run.tell(loss)
    run.optimizer.step()


def with_a_mask(run: Run) -> None:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    run.step(attention_mask=mask)


class Cells(nn.Module):
    """An LSTM behind a shared norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8)
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.norm(self.embedding(tokens)))
        return self.head(self.norm(hidden))


class Images(nn.Module):
    """Convolutions with a batch norm and a group norm, fed with token ids drawn as images."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.batch_norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.group_norm, self.head = nn.GroupNorm(2, 8), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.convolution(tokens[:, None, :, None].float())
        x = self.group_norm(self.batch_norm(x).relu())
        return self.head(x.squeeze(-1).transpose(1, 2))


def without_norms() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))


def tied() -> nn.Module:
    model = Transformer()
    model.head.weight = model.embedding.weight
    return model


def partly_frozen() -> nn.Module:
    model = Transformer()
    for parameter in (*model.embedding.parameters(), *model.blocks[0].parameters(), *model.norm.parameters()):
        parameter.requires_grad_(False)
    return model


def with_norms_as_modules() -> nn.Module:
    return Transformer(in_modules=True)


BODIES = {
    body.__name__: body
    for body in (
        *(accumulated, with_shapes_that_change, under_autocast, evaluated_between, generated_between, called_twice),
        with_a_mask,
    )
}
MODELS = {build.__name__: build for build in (Cells, Images, without_norms, tied, partly_frozen, with_norms_as_modules)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BODIES)
def test_a_loop_is_the_same_with_a_watch(name: str):
    plain = Run().go(watched=False, body=BODIES[name])
    watched = Run().go(body=BODIES[name])
    assert_same(plain, watched)
    assert watched.said == []


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_trained_the_same_with_a_watch(name: str):
    plain, watched = Run(MODELS[name]).go(watched=False), Run(MODELS[name])
    before = fingerprint(watched.model)
    watched.go()
    assert_same(plain, watched)
    assert fingerprint(watched.model) == before
    assert not any("could not" in line for line in watched.said)
    assert watched.watch.inspection().training.reports == 2


@pytest.mark.parametrize("kind", ["re-entrant", "not re-entrant"])
def test_repetitions_by_a_checkpoint_are_not_counted(kind: str):
    def build() -> nn.Module:
        model = Transformer()
        model.checkpointing = kind
        return model

    plain, checkpointed = Run(build).go(watched=False), Run(build).go()
    assert_same(plain, checkpointed)
    whole = Run().go()
    reports = [run.watch.inspection() for run in (whole, checkpointed)]
    assert [site.calls for site in reports[1].sites] == [1] * 9
    for site, other in zip(*(report.sites for report in reports), strict=True):
        assert site.input == other.input
    series = [report.training.of("activation gradient") for report in reports]
    assert [each.path for each in series[1]] == ["blocks.0", "blocks.1"]
    for one, other in zip(*series, strict=True):
        # An embedding that needs no gradient of its own leaves the first block of a re-entrant checkpoint without one.
        assert one.values == pytest.approx(other.values, rel=1e-6)


def test_only_training_is_counted():
    between = Run().go(body=evaluated_between, steps=1).watch.inspection()
    assert [site.input.rows for site in between.sites] == [16, 32, 32, 16, 16, 32, 32, 16, 16]
    twice = Run().go(body=called_twice, steps=1).watch.inspection()
    assert [site.calls for site in twice.sites] == [2] * 9
    masked = Run().go(body=with_a_mask, steps=1).watch.inspection()
    assert [site.input.rows for site in masked.sites] == [13, 26, 26, 13, 13, 26, 26, 13, 13]


@pytest.mark.parametrize("given", [None, 0, 1])
def test_gradients_under_a_scaler_are_those_of_the_loss(given: int | None):
    """`step` before `unscale_` (None), after it (0), and with no unscaling by hand and clipping left out (1)."""
    scale = 2.0**10

    def go(*, watched: bool) -> tuple[Run, list[float]]:
        scaler, norms = torch.amp.GradScaler("cpu", init_scale=scale), []

        def before(run: Run) -> None:
            if given == 0:
                scaler.unscale_(run.optimizer)

        def after(run: Run) -> None:
            if given is None:
                scaler.unscale_(run.optimizer)
            norms.append(_gradient_norm(run.model) / (scale if given == 1 else 1))

        def body(run: Run) -> None:
            run.step(scaler=scaler, after_backward=before, after_tell=after)

        return Run().go(watched=watched, body=body, scaler=scaler), norms

    run, expected = go(watched=True)
    assert_same(go(watched=False)[0], run)
    training = run.watch.inspection().training
    (norms,) = training.of("gradient norm")
    assert norms.values == pytest.approx(expected, rel=1e-5)
    plain = Run().go().watch.inspection().training
    pairs = zip(training.of("activation gradient"), plain.of("activation gradient"), strict=True)
    for scaled, unscaled in pairs:
        assert scaled.values == pytest.approx(unscaled.values, rel=1e-4)


def test_a_scaler_that_skips_a_step_is_no_alarm():
    def spoil(run: Run) -> None:
        if len(run.losses) in (0, 2):
            run.model.head.weight.grad[0, 0] = torch.inf

    scaler = torch.amp.GradScaler("cpu")
    run = Run().go(body=lambda run: run.step(scaler=scaler, after_backward=spoil), scaler=scaler)
    assert run.said == []
    assert run.watch.inspection().training.reason == "asked"


def _gradient_norm(model: nn.Module) -> float:
    squares = [each.grad.double().square().sum() for each in model.parameters() if each.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def test_several_optimizers_are_watched():
    def body(run: Run) -> None:
        loss = run.loss(run.model, run.batch())
        run.model.zero_grad()
        loss.backward()
        run.tell(loss)
        for each in run.both:
            each.step()

    run = Run()
    gains = [each for each in run.model.parameters() if each.dim() == 1]
    others = [each for each in run.model.parameters() if each.dim() > 1]
    run.both = [torch.optim.SGD(gains, lr=0.5), torch.optim.AdamW(others, lr=1e-3)]
    parameters = run.go(body=body, optimizer=run.both).watch.inspection().training.parameters
    assert {(each.learning_rate, each.size > 48) for each in parameters} == {(0.5, False), (1e-3, True)}
    assert all(each.trained and each.update_ratio > 0 for each in parameters if each.rms)


def test_without_an_optimizer_nothing_is_trained_and_all_is_measured():
    training = Run().go(optimizer=None).watch.inspection().training
    assert training.optimizers == ()
    assert not any(each.trained for each in training.parameters)
    assert all(each.gradient_rms > 0 for each in training.parameters if each.path.startswith("blocks"))


def test_parameters_of_another_model_are_remarked():
    run = Run()
    other = nn.Linear(3, 3)
    run.optimizer.add_param_group({"params": list(other.parameters())})
    run.go()
    assert len(run.said) == 1
    assert "2 of" in run.said[0]
    assert "not the model's" in run.said[0]


def test_a_forward_that_others_replaced_stays_theirs():
    run = Run()
    attention = run.model.blocks[0].attention
    own = attention.forward

    def theirs(*args: Tensor) -> Tensor:
        return own(*args)

    attention.forward = theirs
    last = run.model.blocks[1].attention

    def body(each: Run) -> None:
        each.step()
        if len(each.losses) == 1:
            inner = last.forward
            last.forward = lambda *args: inner(*args)

    run.go(body=body)
    assert attention.forward is theirs
    assert run.watch.inspection().sites[1].calls == 1
    with_ours = last.forward
    run.step()
    assert last.forward is with_ours


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_watched_model_is_a_model_of_its_own(copied: Any):
    run = Run()
    copies = []

    def body(each: Run) -> None:
        each.step()
        copies.append(copied(each.model))
        if len(copies) == 2:
            with torch.no_grad():
                for parameter in copies[0].parameters():
                    parameter.zero_()
            copies[0].eval()(each.batch()).sum().backward()

    run.go(body=body, steps=3)
    assert not copies[0](run.batch()).any()
    assert [site.calls for site in run.watch.inspection().sites] == [1] * 9
    plain = Run()
    for _ in range(3):
        plain.step()
        if len(plain.losses) == 2:
            plain.batch()
    for one, other in zip(plain.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_two_watches_on_one_model_are_refused():
    run = Run()
    with watch(run.model), pytest.raises(InputError, match="watched already"):
        Watch.start(watch(run.model))
    with watch(run.model):
        run.step()


def test_memory_is_flat_over_the_steps():
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    run, counts = Run(), []

    def body(each: Run) -> None:
        each.step()
        counts.append((tensors(), sum(table.numel() for table in each.watch._recorder.tables._tables.values())))

    # What other tests have left is not looked through at each step.
    gc.freeze()
    try:
        run.go(body=body, steps=12)
    finally:
        gc.unfreeze()
    # Four steps let moments, letters and the first report come to be.
    assert len(set(counts[4::2])) == 1
    assert len(set(counts[5::2])) == 1
