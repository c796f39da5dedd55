"""What no one foresaw: the training goes on or stops as it would without the watch, and what was reported is whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.errors import InputError
from normkit.measurement import instruments
from normkit.watching.watcher import watch
from small_training import Run, Transformer, assert_same, fingerprint


class StopError(Exception):
    """What a test raises."""


def raised_by_the_model(run: Run) -> None:
    if len(run.losses) == 2:
        run.model(torch.full((2, 4), 1000))
    run.step()


def raised_by_a_hook(run: Run) -> None:
    def hook(*_: object) -> None:
        raise StopError

    if len(run.losses) == 2:
        run.model.blocks[1].norm_1.register_forward_hook(hook)
    run.step()


def interrupted(run: Run) -> None:
    run.step()
    if len(run.losses) == 3:
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "kind"),
    [(raised_by_the_model, IndexError), (raised_by_a_hook, StopError), (interrupted, KeyboardInterrupt)],
)
@pytest.mark.usefixtures("blank_pages")
def test_an_exception_goes_through_and_all_is_detached(body: Callable[[Run], None], kind: type, tmp_path: Path):
    run = Run()
    before = fingerprint(run.model)
    with pytest.raises(kind):
        run.go(body=body, steps=9, every=1, out=tmp_path)
    after = fingerprint(run.model)
    if body is raised_by_a_hook:
        hooked = next(line for line in after if line[0] == "blocks.1.norm_1")
        before, after = ([each for each in lines if each[0] != hooked[0]] for lines in (before, after))
        assert hooked[2] == 1
    assert after == before
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["training"]["reason"] == f"the run was left by {kind.__name__}"
    assert report["training"]["reports"] == len(run.losses)
    assert "</html>" in (tmp_path / "report.html").read_text()
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(len(lines)))


@pytest.mark.slow
def test_nan_from_the_first_step_is_told_with_its_place():
    def broken() -> nn.Module:
        model = Transformer()
        with torch.no_grad():
            model.blocks[1].norm_1.weight[3] = math.nan
        return model

    plain, watched = Run(broken).go(watched=False), Run(broken).go()
    assert_same(plain, watched)
    training = watched.watch.inspection().training
    assert (training.reason, training.reason_step) == ("non-finite values in the forward pass", 0)
    assert training.of("non-finite")[0].path == "blocks.1.norm_1"
    assert sum("non-finite" in line for line in watched.said) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("place", [(0, 5, 3, 2), (1, 0, 0, 3)])
def test_nan_is_seen_in_rows_along_channels(place: tuple[int, ...]):
    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x.movedim(1, -1), (6,), self.weight).movedim(-1, 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv2d(6, 6, 1), Channels(), nn.Conv2d(6, 6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x)))

    model, x = Model(), torch.randn(2, 6, 4, 5)
    x[place] = math.nan
    with watch(model, batch=(torch.randn(2, 6, 4, 5),), say=lambda _: None) as run:
        model(x).sum().backward()
        run.step()
    assert [site.path for site in run.inspection().sites] == ["norm"]
    assert run.inspection().training.of("non-finite")[0].path == "norm"


def test_large_numbers_in_16_bits_are_no_infinity():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).half()
    with torch.no_grad():
        model[1].bias.fill_(3000.0)
    with watch(model, batch=(torch.randn(4, 8).half(),), say=lambda _: None) as run:
        model(torch.randn(64, 8).half()).mean().backward()
        run.step(1.0)
    assert run.inspection().training.of("non-finite") == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [2.5, 3, None, torch.tensor([2.5], requires_grad=True), torch.tensor(2.5).half(), torch.ones((), dtype=int)]
)
def test_a_loss_comes_as_it_comes(loss: Any):
    run = Run()
    run.go(body=lambda each: each.watch.step(loss) or each.model(each.batch()), steps=2)
    found = run.watch.inspection().training.of("loss")
    assert [series.values[0] for series in found] == (
        [] if loss is None else [pytest.approx(torch.as_tensor(loss).detach().item())]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"every": every}, "every must be a whole number") for every in (0, -1, 2.0, True)),
        ({"optimizer": nn.Linear(2, 2)}, "optimizer must be"),
        ({"batch": 3}, "a batch must be"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        watch(nn.Linear(2, 2), **options).start()


def test_a_loss_that_is_none_is_refused():
    with watch(nn.Linear(2, 2), batch=torch.ones(1, 2)) as seen, pytest.raises(InputError, match="number or None, got"):
        seen.step({"loss": 1.0})


def test_a_model_never_called_is_told_of():
    run = Run()
    run.go(body=lambda each: each.tell(1.0), steps=3)
    assert len(run.said) == 1
    assert "was not called before the end of the first step" in run.said[0]
    assert run.watch.inspection().sites == ()


@pytest.mark.slow
def test_a_step_without_a_call_is_a_step():
    def body(run: Run) -> None:
        run.tell(1.0) if len(run.losses) in (1, 2) else run.step()

    training = Run().go(body=body, steps=5).watch.inspection().training
    assert (training.steps, training.reports) == (5, 3)


@pytest.mark.slow
def test_a_failure_in_a_hook_is_a_remark(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel\nand more")

    def body(run: Run) -> None:
        run.step()
        monkeypatch.setattr(instruments.RowCounter, "add", fails)
        monkeypatch.setattr(instruments, "add_call", fails)

    plain, watched = Run().go(watched=False), Run().go(body=body)
    assert_same(plain, watched)
    assert len(watched.said) == 1
    assert "places could not be measured, the first is blocks.0: no such kernel" in watched.said[0]


@pytest.mark.slow
def test_a_failure_in_a_gradient_is_a_remark(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel")

    plain = Run().go(watched=False)
    monkeypatch.setattr("normkit.measurement.instruments.add_gradient", fails)
    watched = Run().go()
    assert_same(plain, watched)
    assert len(watched.said) == 1
    assert "gradients: no such kernel" in watched.said[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_per_sample_gradients_of_a_watched_model():
    run = Run()
    run.model.eval()

    def gradients() -> dict[str, Tensor]:
        parameters = {name: each.detach() for name, each in run.model.named_parameters()}

        def loss(values: dict[str, Tensor], tokens: Tensor) -> Tensor:
            return torch.func.functional_call(run.model, values, (tokens[None],)).square().mean()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, tokens)

    tokens = run.batch(rows=3)
    expected = gradients()
    with watch(run.model, batch=(tokens,), say=run.said.append) as seen:
        found = gradients()
        seen.step()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("blank_pages")
def test_a_folder_that_takes_no_file_is_told_of_in_one_line(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    plain, watched = Run().go(watched=False), Run().go(out=file / "inside", every=1)
    assert_same(plain, watched)
    said = [line for line in watched.said if "Not a directory" in line]
    assert len(said) == 2
    assert "history.jsonl" in said[0]
    assert "the report is not written" in said[1]


@pytest.mark.slow
@pytest.mark.usefixtures("blank_pages")
def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from normkit import files

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    run = Run()
    with watch(run.model, run.optimizer, every=1, out=tmp_path, say=run.said.append) as run.watch:
        run.step()
        run.step()
        monkeypatch.setattr(files.os, "fsync", full)
        run.step()
    assert "the report is not written" in run.said[-1]
    assert "No space left" in run.said[-1]
    assert not list(tmp_path.glob(".report*"))


@pytest.mark.slow
def test_a_watch_that_begins_in_inference_mode_can_measure():
    run = Run()
    with watch(run.model, run.optimizer, every=1, say=run.said.append) as run.watch:
        with torch.inference_mode():
            run.model(run.batch())
        run.step()
    assert run.said == []
    assert run.watch.inspection().sites[0].calls == 1


@pytest.mark.slow
def test_a_model_that_takes_no_smaller_batch_is_found_on_all_of_it():
    class Fixed(Transformer):
        def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            if tokens.shape != (3, 20):
                raise ValueError("3 rows of 20 tokens are expected")
            return super().forward(tokens, attention_mask)

    run = Run(Fixed)
    run.go(body=lambda each: each.step(batch=each.batch(rows=3, tokens=21)))
    assert run.said == []
    assert len(run.watch.inspection().sites) == 9


def test_a_model_that_cannot_be_surveyed_is_trained_on():
    class Once(Transformer):
        def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            if not self.training:
                raise ValueError("not in evaluation mode")
            return super().forward(tokens, attention_mask)

    plain, watched = Run(Once).go(watched=False), Run(Once).go()
    assert_same(plain, watched)
    assert len(watched.said) == 1
    assert "the norms could not be found" in watched.said[0]
    assert "not in evaluation mode" in watched.said[0]


@pytest.mark.slow
def test_buffers_and_random_numbers_are_left_by_the_survey():
    import random

    import numpy

    class Counting(Transformer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", torch.zeros(()))

        def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            self.calls += 1
            self.last = self.last + random.random() + numpy.random.rand()
            return super().forward(tokens, attention_mask)

    runs = []
    for watched in (False, True):
        random.seed(0)
        numpy.random.seed(0)
        runs.append(Run(Counting).go(watched=watched))
    assert_same(*runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse", "adafactor", "integers", "float64"])
def test_odd_parameters_and_optimizers(name: str):
    def build() -> nn.Module:
        model = Transformer()
        if name == "sparse":
            model.embedding.sparse = True
        if name == "integers":
            model.packed = nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
        if name == "float64":
            model.head = nn.Sequential(Widened(), nn.Linear(16, 20).double())
        return model

    def run() -> Run:
        made = Run(build)
        if name == "sparse":
            made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
        if name == "adafactor":
            from transformers import Adafactor

            made.optimizer = Adafactor(made.model.parameters())
        return made

    def measure(each: Run) -> None:
        gradients = [p.grad.to_dense().double() for p in each.model.parameters() if p.grad is not None]
        each.norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))

    watched = run().go(body=lambda each: each.step(after_backward=measure))
    plain = run().go(watched=False)
    assert watched.losses == plain.losses
    assert watched.said == []
    assert watched.watch.inspection().training.of("gradient norm")[0].last == pytest.approx(watched.norm, rel=1e-5)


class Widened(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_default_dtype_changes_nothing(dtype: torch.dtype):
    """16 of 1001 rows of an attention cannot be counted in bfloat16."""
    try:
        torch.set_default_dtype(dtype)
        run = Run()
        run.go(body=lambda each: each.step(batch=each.batch(rows=1, tokens=1002)), steps=1)
        assert run.said == []
        assert run.watch.inspection().attentions[0].sampled_rows == 32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_findings_asked_for_before_the_optimizer_moved_know_no_update():
    run = Run()
    with watch(run.model, run.optimizer, every=1, say=run.said.append) as run.watch:
        loss = run.loss(run.model, run.batch())
        loss.backward()
        run.watch.step(loss)
        parameters = run.watch.inspection().training.parameters
    assert all(math.isnan(each.update_ratio) and math.isnan(each.first_update_ratio) for each in parameters)
