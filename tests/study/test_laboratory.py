import json
import math

import pytest
import torch
from torch import nn

from normkit.errors import InputError
from normkit.study.laboratory import Laboratory, Run
from normkit.study.loop import Point, Recipe, train
from normkit.study.windows import next_token_loss
from study_runs import Model, batches, laboratory, state, transformer

RECIPE = Recipe(steps=6, learning_rate=1e-2)


def run_of(*losses):
    points = tuple(
        Point(step=step, loss=loss, learning_rate=0.1, gradient_norm=1.0, observed={"odd": step} if step % 2 else {})
        for step, loss in enumerate(losses, start=1)
    )
    return Run(points=points)


def test_a_run_in_short():
    run = run_of(3.0, 2.0, 1.5)
    assert (run.losses, run.last, run.diverged, run.observed("odd")) == ([3.0, 2.0, 1.5], 1.5, False, [1, 3])


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_that_diverged_counts_as_one_that_did_not_move(loss):
    run = run_of(3.0, 2.0, loss)
    assert (run.losses, run.last, run.diverged) == ([3.0, 2.0, None], 3.0, True)
    assert [run.capped(value) for value in (1.0, 5.0, loss)] == [1.0, 3.0, 3.0]


def test_settings_by_their_kind():
    lab = Laboratory(settings={"layers": 3, "rate": 0.5}, seed=1)
    assert (lab.integer("layers"), lab.number("rate"), lab.number("layers")) == (3, 0.5, 3.0)
    assert isinstance(lab.number("layers"), float)


@pytest.mark.slow
def test_it_trains_as_the_loop_does_bit_for_bit():
    plain, model, told = transformer(), transformer(), []
    points = train(plain, RECIPE, batches(), next_token_loss)
    run = laboratory(tell=told.append).train(model, RECIPE, batches(), next_token_loss)
    assert run.points == points
    assert state(model) == state(plain)
    assert run.findings == ()
    assert told == pytest.approx([step / 6 for step in range(1, 7)])


@pytest.mark.slow
def test_findings_are_on_the_batch_after_the_last_the_last_or_the_given_one(monkeypatch):
    looked_at = []
    monkeypatch.setattr(
        "normkit.study.probing.findings", lambda _model, batch, _loss: looked_at.append(batch[0]) or ({"rule": "Z1"},)
    )
    supply = batches()
    all_batches = [next(supply) for _ in range(8)]
    run = laboratory().train(transformer(), RECIPE, iter(all_batches), next_token_loss)
    laboratory().train(transformer(), RECIPE, iter(all_batches[:6]), next_token_loss)
    laboratory().train(transformer(), RECIPE, iter(all_batches), next_token_loss, held_out=all_batches[7])
    assert run.findings == ({"rule": "Z1"},)
    assert all(torch.equal(seen, all_batches[index][0]) for seen, index in zip(looked_at, (6, 5, 7), strict=True))


@pytest.mark.slow
def test_a_fault_in_training_is_in_its_findings():
    model = transformer()
    with torch.no_grad():
        model.blocks[1].attention.norm.weight.fill_(60.0)
    run = laboratory().train(model, Recipe(steps=1, learning_rate=1e-6), batches(), next_token_loss)
    assert any("blocks.1.attention.branch" in each["sites"] for each in run.findings)


@pytest.mark.slow
def test_runs_of_an_arm_are_kept_apart_and_continued(tmp_path):
    def both(lab):
        models = [Model(), Model()]
        torch.manual_seed(0)
        runs = [
            lab.train(model, RECIPE, batches(seed), next_token_loss, name=name)
            for seed, (model, name) in enumerate(zip(models, ("first", "second"), strict=True))
        ]
        return [state(model) for model in models], [run.points for run in runs]

    class EnoughError(Exception):
        pass

    shares = []

    def fail(share):
        shares.append(share)
        if len(shares) == 9:
            raise EnoughError

    whole = both(laboratory())
    with pytest.raises(EnoughError):
        both(laboratory(keep=tmp_path, keep_seconds=0.0, tell=fail))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.safetensors", "second.safetensors"]
    left = []
    assert both(laboratory(keep=tmp_path, tell=left.append)) == whole
    assert left == pytest.approx([3 / 6, 4 / 6, 5 / 6, 1.0])


@pytest.mark.slow
def test_two_runs_of_one_name_are_one_line(tmp_path):
    lab = laboratory(keep=tmp_path)
    lab.train(transformer(), RECIPE, batches(), next_token_loss)
    with pytest.raises(
        InputError, match=r"^two training runs of an arm are kept as 'run'; give each a name of its own$"
    ):
        lab.train(transformer(), RECIPE, batches(), next_token_loss)


def dtypes(lab, model, x):
    """Of the parameters, of what enters the model and leaves it, and of the loss."""
    seen = {}

    def loss(model, batch):
        seen["in"], seen["out"] = batch[0].dtype, model(batch[0]).dtype
        seen["loss"] = model(batch[0]).float().square().mean()
        return seen["loss"]

    lab.train(model, Recipe(steps=1, learning_rate=0.1), iter([(x,)]), loss)
    return model[0].weight.dtype, model[0].weight.grad.dtype, seen["in"], seen["out"]


@pytest.mark.parametrize(
    ("dtype", "kept", "computed"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),
        (torch.bfloat16, torch.float32, torch.bfloat16),
    ],
)
def test_dtypes(dtype, kept, computed):
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    assert dtypes(laboratory(dtype=dtype), model, torch.randn(4, 3)) == (kept, kept, kept, computed)


@pytest.mark.slow
def test_ids_stay_integers_and_models_are_placed():
    model = laboratory(dtype=torch.float64).place(transformer())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    run = laboratory(dtype=torch.float64).train(transformer(), RECIPE, batches(), next_token_loss)
    assert not run.diverged


def test_a_dtype_in_which_nothing_can_be_trained_is_one_line():
    with pytest.raises(InputError, match=r"^expected a dtype of float32, float64, bfloat16, got float16$"):
        laboratory(dtype=torch.float16)


@pytest.mark.slow
def test_a_finished_run_leaves_a_json_line_a_step(tmp_path):
    run = laboratory(curves=tmp_path / "curves").train(transformer(), RECIPE, batches(), next_token_loss, name="first")
    (file,) = (tmp_path / "curves").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert file.name == "first.jsonl"
    assert lines == [
        {
            "step": point.step,
            "loss": point.loss,
            "learning_rate": point.learning_rate,
            "gradient_norm": point.gradient_norm,
        }
        for point in run.points
    ]


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_null_in_its_line(tmp_path):
    model = transformer()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    laboratory(curves=tmp_path).train(model, RECIPE, batches(), next_token_loss)
    assert json.loads((tmp_path / "run.jsonl").read_text())["loss"] is None
