import json
import math

import pytest
import torch
from torch import nn

from normkit import specs
from normkit.errors import InputError
from normkit.inspection.inspecting import inspect
from normkit.study.arm_context import ArmContext, findings
from normkit.study.corpus import next_token_loss, text_of_the_library, windows
from normkit.study.model_parts import BatchNorm
from normkit.study.training_run import Recipe, train
from normkit.study.transformer import Transformer, TransformerConfig
from study_runs import Model, batches, new_context, state, transformer

RECIPE = Recipe(steps=6, learning_rate=1e-2)


def test_what_is_not_chosen_follows_from_the_settings():
    lab = ArmContext(settings={"steps": 3, "learning_rate": 0.5, "window": 6, "width": 8, "layers": 1}, seed=1)
    assert lab["steps"] == 3
    assert lab.recipe() == Recipe(steps=3, learning_rate=0.5)
    assert lab.recipe(steps=4, warmup=2, clip=None) == Recipe(steps=4, learning_rate=0.5, warmup=2, clip=None)
    assert ArmContext(settings={"warmup": 7}, seed=1).recipe(steps=9, learning_rate=0.1).warmup == 7
    config = lab.transformer(layers=2, placement="post").config
    assert (config.context, config.width, config.layers, config.placement) == (6, 8, 2, "post")


def test_ids_of_a_text_come_from_the_places_of_its_windows():
    context = ArmContext(settings={"batch": 2, "window": 6}, seed=1)
    text = bytes(range(200))
    ids = context.text_ids(text, seed=3)
    assert ids.equal(next(windows(text, batch=2, window=6, seed=3))[0])
    assert context.text_ids(text, batch=3, window=4).shape == (3, 5)
    assert context.text_ids().equal(context.text_ids(text_of_the_library()[1]))


@pytest.mark.slow
def test_it_trains_as_the_loop_does_bit_for_bit():
    plain, model, told = transformer(), transformer(), []
    points = train(plain, RECIPE, batches(), next_token_loss)
    run = new_context(report=told.append).train(model, RECIPE, batches(), next_token_loss)
    assert run.points == points
    assert state(model) == state(plain)
    assert run.findings == ()
    assert told == pytest.approx([step / 6 for step in range(1, 7)])


@pytest.mark.slow
def test_findings_are_on_the_batch_after_the_last_or_the_last(monkeypatch):
    looked_at = []
    monkeypatch.setattr(
        "normkit.study.arm_context.findings",
        lambda _model, batch, _loss: looked_at.append(batch[0]) or ({"rule": "Z1"},),
    )
    supply = batches()
    all_batches = [next(supply) for _ in range(7)]
    run = new_context().train(transformer(), RECIPE, iter(all_batches), next_token_loss)
    new_context().train(transformer(), RECIPE, iter(all_batches[:6]), next_token_loss)
    assert run.findings == ({"rule": "Z1"},)
    assert all(torch.equal(seen, all_batches[index][0]) for seen, index in zip(looked_at, (6, 5), strict=True))


@pytest.mark.slow
def test_a_fault_in_training_is_in_its_findings_and_ids_stay_integers():
    model = transformer()
    with torch.no_grad():
        model.blocks[1].attention.norm.weight.fill_(60.0)
    run = new_context().train(model, Recipe(steps=1, learning_rate=1e-6), batches(), next_token_loss)
    assert any("blocks.1.attention.branch" in each["sites"] for each in run.findings)
    model = new_context(dtype=torch.float64).move(transformer())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    run = new_context(dtype=torch.float64).train(transformer(), RECIPE, batches(), next_token_loss)
    assert not run.diverged


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

    whole = both(new_context())
    with pytest.raises(EnoughError):
        both(new_context(checkpoints=tmp_path, checkpoint_seconds=0.0, report=fail))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.safetensors", "second.safetensors"]
    left = []
    assert both(new_context(checkpoints=tmp_path, report=left.append)) == whole
    assert left == pytest.approx([3 / 6, 4 / 6, 5 / 6, 1.0])


@pytest.mark.slow
def test_two_runs_of_one_name_are_one_line(tmp_path):
    context = new_context(checkpoints=tmp_path)
    context.train(transformer(), RECIPE, batches(), next_token_loss)
    with pytest.raises(
        InputError, match=r"^two training runs of an arm are kept as 'run'; give each a name of its own$"
    ):
        context.train(transformer(), RECIPE, batches(), next_token_loss)


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
    assert dtypes(new_context(dtype=dtype), model, torch.randn(4, 3)) == (kept, kept, kept, computed)


def test_a_dtype_in_which_nothing_can_be_trained_is_one_line():
    with pytest.raises(InputError, match=r"^expected a dtype of float32, float64, bfloat16, got float16$"):
        new_context(dtype=torch.float16)


@pytest.mark.slow
def test_curves_have_a_json_line_a_step(tmp_path):
    run = new_context(curves=tmp_path / "curves").train(transformer(), RECIPE, batches(), next_token_loss, name="first")
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
    model = transformer()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    new_context(curves=tmp_path).train(model, RECIPE, batches(), next_token_loss)
    assert json.loads((tmp_path / "run.jsonl").read_text())["loss"] is None


def build(**choices):
    return Transformer(TransformerConfig(vocabulary=128, context=8, width=16, heads=2, **choices), seed=0)


def test_they_are_those_of_inspect_as_a_user_calls_it():
    model = build(layers=4)
    with torch.no_grad():
        model.blocks[2].attention.branch.query.weight.mul_(200)
        model.blocks[2].attention.branch.key.weight.mul_(200)
    (ids,) = next(batches())
    found = findings(model, (ids,), next_token_loss)
    expected = inspect(model, {"ids": ids[:, :-1]}).findings
    assert [(each["rule"], each["severity"], each["title"], tuple(each["sites"])) for each in found] == [
        (each.rule, each.severity, each.title, each.sites) for each in expected
    ]
    assert any("blocks.2.attention.branch" in each["sites"] for each in found)
    assert json.loads(json.dumps(found)) == list(found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", ["pre", "post", "peri", "output"])
def test_a_healthy_model_has_no_finding_before_and_after_training(placement):
    model = build(layers=3, placement=placement)
    supply = batches()
    held_out = next(supply)
    assert findings(model, held_out, next_token_loss) == ()
    train(model, Recipe(steps=20, learning_rate=3e-3, warmup=5), supply, next_token_loss)
    assert findings(model, held_out, next_token_loss) == ()


def test_a_model_is_left_as_it_was():
    # Its batch norm would move its statistics in training mode.
    model = Model().train()
    model.final_norm.eval()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    findings(model, next(batches()), next_token_loss)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model._forward_pre_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_faulty_norms_are_named_at_their_places():
    found = findings(build(layers=2, norm=BatchNorm), next(batches()), next_token_loss)
    assert {each["severity"] for each in found} & {"error", "warning"}
    assert any("blocks.0.attention.norm" in each["sites"] for each in found)
    found = findings(build(layers=2, norm=specs.TORCH_LAYER_NORM.replace(eps=10.0)), next(batches()), next_token_loss)
    assert any("blocks.0.attention.norm" in each["sites"] for each in found)


class Named(nn.Module):
    """Called by keyword, with an argument that has a default, on rows without time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.layers(x)
        return y if scale is None else y * scale


def test_a_model_of_vectors_called_by_keyword():
    seen = []

    def loss(model, batch):
        seen.append(len(batch[0]))
        return model(x=batch[0], scale=batch[1]).sum()

    assert findings(Named(), (torch.randn(600, 5), torch.ones(600, 1)), loss) == ()
    # Not all rows of a large batch.
    assert seen == [512]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_diverged_model_is_inspected(value):
    model = build(layers=2)
    with torch.no_grad():
        model.blocks[1].mlp.branch.down.weight.fill_(value)
    found = findings(model, next(batches()), next_token_loss)
    assert json.dumps(found, allow_nan=False)
    assert found
