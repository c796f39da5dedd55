"""`inspect` as a whole: on the models that ship, on padded batches, on odd models, and when the model raises."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import normkit as nk
import planted_faults as faults
from normkit import demo
from normkit.errors import InputError
from normkit.inspection.inspecting import NextTokenLoss, inspect

pytestmark = pytest.mark.slow


def demo_model(name: str, layers: int = 6) -> nn.Module:
    """A model that ships, or its first layers."""
    return AutoModelForCausalLM.from_pretrained(demo.directory(name), num_hidden_layers=layers).eval()


def text_batch(rows: int = 4, length: int = 128) -> dict[str, Tensor]:
    """The shipped text as its bytes, which are the demo models' token ids."""
    ids = torch.tensor(list(demo.text().encode()[: rows * length]))
    return {"input_ids": ids.reshape(rows, length), "attention_mask": torch.ones(rows, length, dtype=torch.long)}


@functools.cache
def of_twin(name: str) -> nk.Inspection:
    """What several tests look at."""
    return nk.inspect(demo_model(name), text_batch(), name=name)


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=True,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(("name", "centred"), [("layernorm", True), ("rmsnorm", False)])
def test_a_healthy_twin_has_thirteen_sites_and_no_finding(name: str, centred: bool) -> None:
    inspection = of_twin(name)

    assert len(inspection.sites) == 13
    assert {site.spec.centre_numerator for site in inspection.sites} == {centred}
    assert {site.spec.eps for site in inspection.sites} == {1e-5}
    assert [site.role for site in inspection.sites] == ["pre"] * 12 + ["final"]
    assert [block.placement for block in inspection.blocks] == ["pre"] * 6
    assert len(inspection.attentions) == 6
    assert inspection.final_norm == inspection.sites[-1].path
    assert inspection.findings == ()
    # What shows in training only, or against what is declared, cannot be checked here.
    assert {check.status for check in inspection.checks} == {"clean", "not checked", "not applicable"}
    assert {"A1", "B6", "D1", "E5", "F1"} <= {check.rule for check in inspection.checks if check.status == "clean"}
    assert inspection.model.tokens == 512
    assert {site.input.rows for site in inspection.sites} == {512}


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_a_planted_eps_is_found_at_every_site(name: str) -> None:
    inspection = nk.inspect(faults.wrong_eps(demo_model(name, layers=2)), text_batch())

    assert [finding.rule for finding in inspection.findings] == ["A1"]
    assert len(inspection.findings[0].sites) == 5
    assert inspection.findings[0].severity == "error"


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_a_removed_final_norm_is_found(name: str) -> None:
    inspection = nk.inspect(faults.without_final_norm(demo_model(name, layers=2)), text_batch())

    assert [finding.rule for finding in inspection.findings] == ["D3"]
    assert inspection.final_norm is None
    assert len(inspection.sites) == 4


@pytest.mark.parametrize(("name", "dimension"), [("layernorm", 62), ("rmsnorm", 63)])
def test_a_twin_has_a_geometry(name: str, dimension: int) -> None:
    model, inspection = demo_model(name), of_twin(name)

    for site in inspection.sites:
        shape, gain = site.geometry, model.get_submodule(site.path).weight.detach().double().abs()
        assert shape is not None
        assert shape.semi_axes is not None
        assert (shape.rows, shape.dimension, shape.vanishing_gains) == (64, dimension, 0)
        assert 0 < shape.rotation[0] < shape.rotation[1] < shape.rotation[2] < 45
        # Rows of one length come out; what enters differs more at the end of the model.
        assert 1 < shape.spread_out < 1.5
        low, high = gain.sort().values[:2].tolist(), gain.sort().values[-2:].tolist()
        if name == "rmsnorm":
            assert (shape.semi_axes[0], shape.semi_axes[2]) == pytest.approx((low[0], high[1]))
            assert shape.rotation_without_affine == (0.0, 0.0, 0.0)
        else:
            # The axes lie between the gains.
            assert low[0] <= shape.semi_axes[0] <= low[1]
            assert high[0] <= shape.semi_axes[2] <= high[1]
            # cos**2 of the angle to 1 is the energy along it, which centring takes away.
            turned = torch.tensor(shape.rotation_without_affine[1]).deg2rad().sin() ** 2
            assert turned == pytest.approx(site.input.mean_energy, rel=0.7)
    last = inspection.sites[-1].geometry
    assert last is not None
    assert last.spread_in > 1.7 * last.spread_out


def test_the_keys_of_a_twin_can_all_be_selected() -> None:
    inspection = of_twin("layernorm")

    assert [one.path for one in inspection.selections] == [one.path for one in inspection.attentions]
    for one in inspection.selections:
        assert (one.keys, one.sampled, one.key_heads) == (128, 16, 4)
        assert (one.before, one.heads) == (1.0, tuple((head, 1.0) for head in range(4)))


def test_the_first_text_that_has_a_token_tells_which_keys_can_be_selected() -> None:
    model, batch = demo_model("rmsnorm", layers=2), text_batch(rows=2, length=48)
    batch["attention_mask"][0] = 0
    batch["attention_mask"][1, :8] = 0
    alone = {key: value[1:, 8:] for key, value in batch.items()}

    found, expected = nk.inspect(model, batch).selections, nk.inspect(model, alone).selections

    assert [one.keys for one in found] == [40] * 2
    assert found == expected


def test_the_stages_are_told() -> None:
    told: list[tuple[str, int, int]] = []
    nk.inspect(demo_model("rmsnorm", layers=2), text_batch(rows=1), progress=lambda *stage: told.append(stage))

    assert [stage for stage, _, _ in told] == ["structure", "norms", "placement", "text", *["selectable keys"] * 2]
    assert told[-1] == ("selectable keys", 1, 2)


def test_padding_changes_no_statistic() -> None:
    model = demo_model("layernorm", layers=2)
    plain = text_batch(rows=2, length=96)
    padded = {key: torch.cat([value, torch.zeros(2, 32, dtype=torch.long)], 1) for key, value in plain.items()}

    without, with_padding = nk.inspect(model, plain), nk.inspect(model, padded)

    assert with_padding.model.padding == 64
    assert with_padding.model.tokens == without.model.tokens == 192
    for a, b in zip(without.sites, with_padding.sites, strict=True):
        assert a.input.rows == b.input.rows == 192
        # The same rows through the same float32 matrix products, batched differently.
        assert a.input.rms_max == pytest.approx(b.input.rms_max, rel=1e-4)
        assert a.input.mean_energy == pytest.approx(b.input.mean_energy, rel=1e-3, abs=1e-7)
    for a, b in zip(without.attentions, with_padding.attentions, strict=True):
        assert a.bound == pytest.approx(b.bound, rel=1e-4)
        assert a.sampled_max == pytest.approx(b.sampled_max, rel=1e-4)


def test_batches_may_come_one_at_a_time() -> None:
    model, whole = demo_model("rmsnorm", layers=2), text_batch(rows=4)

    def halves() -> Iterator[dict[str, Tensor]]:
        for half in (slice(0, 2), slice(2, 4)):
            yield {key: value[half] for key, value in whole.items()}

    at_once, streamed = nk.inspect(model, whole), nk.inspect(model, halves())

    assert streamed.model.tokens == at_once.model.tokens
    for a, b in zip(at_once.sites, streamed.sites, strict=True):
        assert a.input.rows == b.input.rows
        assert a.input.rms_max == pytest.approx(b.input.rms_max, rel=1e-5)
        assert a.input.mean_energy == pytest.approx(b.input.mean_energy, rel=1e-4)


def test_the_walk_goes_through_the_chosen_site_and_ends_where_the_module_does() -> None:
    inspection = nk.inspect(demo_model("layernorm", layers=2), text_batch(), site="transformer.h.1.ln_2", decode=chr)

    walk = inspection.walk
    assert walk is not None
    assert walk.path == "transformer.h.1.ln_2"
    assert [step.name for step in walk.steps] == ["raw", "centred", "scaled", "gain and bias"]
    assert walk.token == demo.text()[127]
    assert walk.position == 127
    # The module works in float32: a few roundings of entries below 8 or so.
    assert walk.module_error < 64 * torch.finfo(torch.float32).eps


def test_an_unknown_site_is_an_error_that_offers_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no norm at 'layernorm'; did you mean model\.layers\.0\.input_layernorm"):
        nk.inspect(tiny_llama(), {"input_ids": torch.arange(8)[None]}, site="layernorm")


def test_an_unknown_site_is_told_before_the_text_is_run() -> None:
    def batches() -> Iterator[dict[str, Tensor]]:
        yield {"input_ids": torch.arange(8)[None]}
        raise AssertionError("a second batch was asked for")

    with pytest.raises(InputError, match="no norm at 'ln_9'"):
        nk.inspect(tiny_llama(), batches(), site="ln_9")


def test_no_batch_is_an_error() -> None:
    with pytest.raises(InputError, match="at least one batch"):
        nk.inspect(tiny_llama(), [])


def test_a_model_without_a_norm_gives_an_empty_report() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))

    inspection = nk.inspect(model, {"input": torch.arange(6).reshape(1, 6)})

    assert inspection.sites == ()
    assert inspection.walk is None
    assert inspection.worst is None
    assert {check.status for check in inspection.checks} <= {"not applicable", "not checked"}


def fingerprint(model: nn.Module) -> tuple[object, ...]:
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m), m.training) for m in model.modules()
    ]
    return (hooks, [value.clone() for value in model.state_dict().values()], torch.get_rng_state())


def same(a: tuple[object, ...], b: tuple[object, ...]) -> bool:
    weights = zip(a[1], b[1], strict=True)
    return a[0] == b[0] and all(map(torch.equal, *zip(*weights, strict=True))) and torch.equal(a[2], b[2])


def test_a_decoder_that_would_keep_its_keys_is_run_without_a_cache() -> None:
    from transformers import AutoModelForSeq2SeqLM, SwitchTransformersConfig

    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "num_experts": 2}
    model = AutoModelForSeq2SeqLM.from_config(SwitchTransformersConfig(**sizes, num_decoder_layers=2))
    ids = torch.arange(24).reshape(2, 12)
    assert len(nk.inspect(model, {"input_ids": ids, "decoder_input_ids": ids}).sites) == 12
    assert model.config.use_cache


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_llama().train()
    model.model.norm.eval()
    before = fingerprint(model)
    nk.inspect(model, {"input_ids": torch.arange(16)[None]})
    assert same(before, fingerprint(model))


@pytest.mark.parametrize("calls_before", [0, 3])
def test_the_model_is_left_as_it_was_after_an_exception(calls_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama().train()
    calls = 0
    stock = type(model.model.layers[1].mlp).forward

    def failing(self: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        # Each layer calls it once a forward: the failure falls into tracing, placing or measuring.
        if calls > 2 * calls_before + 1:
            raise RuntimeError("the model broke")
        return stock(self, x)

    before = fingerprint(model)
    monkeypatch.setattr(type(model.model.layers[1].mlp), "forward", failing)
    with pytest.raises(RuntimeError, match="the model broke"):
        nk.inspect(model, [{"input_ids": torch.arange(16)[None]}] * 4)
    monkeypatch.undo()
    assert same(before, fingerprint(model))


@pytest.mark.exhaustive
def test_json_and_html_are_the_same_bytes_on_a_second_run(tmp_path: Path) -> None:
    pages, documents = set(), set()
    for name in ("first", "second"):
        inspection = nk.inspect(demo_model("layernorm"), text_batch(rows=1), name="twin")
        pages.add(inspection.write_html(tmp_path / f"{name}.html").read_bytes())
        documents.add(json.dumps(inspection.to_json(), allow_nan=False))
    assert len(pages) == len(documents) == 1
    document = json.loads(documents.pop())
    assert document["schema_version"] == 1
    assert set(document["sites"][0]["geometry"]) == {
        "rows", "rotation", "rotation_without_affine", "spread_in", "spread_out", "dimension", "semi_axes",
        "vanishing_gains",
    }  # fmt: skip
    assert document["selections"][0]["heads"] == [[0, 1.0], [1, 1.0], [2, 1.0], [3, 1.0]]


@pytest.fixture
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.slow
@pytest.mark.usefixtures("_without_gradients")
def test_it_is_the_models_own_loss_over_all_batches(gpt2: GPT2LMHeadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    # 7 tokens of 64 logits at a time: the parts do not end with the rows.
    monkeypatch.setattr("normkit.inspection.inspecting._MOST_LOGITS", 7 * 64 + 3)
    batches = [{"input_ids": torch.randint(64, size)} for size in ((3, 20), (1, 11))]
    losses = [float(gpt2(**batch, labels=batch["input_ids"]).loss) for batch in batches]
    expected = (losses[0] * 57 + losses[1] * 10) / 67
    # Both add 67 float32 numbers near 4.
    assert inspect(gpt2, batches).model.loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("_without_gradients")
def test_padding_on_either_side_does_not_count(gpt2: GPT2LMHeadModel) -> None:
    ids = torch.randint(64, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, 8:], mask[1, :3] = 0, 0
    batch = {"input_ids": ids, "attention_mask": mask}
    labels = ids.where(mask.bool() & mask.roll(1, 1).bool(), torch.tensor(-100))
    loss = NextTokenLoss(gpt2)
    loss.try_causality(gpt2, batch, gpt2(**batch))
    loss.add(batch, gpt2(**batch))
    assert loss.value == pytest.approx(float(gpt2(**batch, labels=labels).loss), rel=1e-6)


@pytest.mark.usefixtures("_without_gradients")
def test_a_module_of_ones_own_that_returns_a_tuple() -> None:
    batch = {"idx": torch.arange(24).view(2, 12)}

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Embedding(64, 16)
            self.head = torch.nn.Linear(16, 64)

        def forward(self, idx: torch.Tensor) -> tuple[torch.Tensor, None]:
            return self.head(self.inner(idx)), None

    model = Own()
    loss = NextTokenLoss(model)
    loss.try_causality(model, batch, model(**batch))
    loss.add(batch, model(**batch))
    logits = model(**batch)[0][:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch["idx"][:, 1:].flatten())
    assert loss.value == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("kind", ["masked", "encoder-decoder", "hidden states"])
@pytest.mark.usefixtures("_without_gradients")
def test_a_model_that_sees_later_tokens_has_none(gpt2: GPT2LMHeadModel, kind: str) -> None:
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids}
    small = {"vocab_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 16}
    if kind == "masked":
        model = BertForMaskedLM(BertConfig(**small, intermediate_size=16)).eval()
    elif kind == "hidden states":
        model = gpt2.transformer
    else:
        batch["decoder_input_ids"] = ids
        model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1)).eval()
    loss = NextTokenLoss(model)
    loss.try_causality(model, batch, model(**batch))
    loss.add(batch, model(**batch))
    assert math.isnan(loss.value)


@pytest.mark.slow
def test_a_printed_inspection_has_the_verdict_and_every_finding() -> None:
    broken = inspect(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8, eps=1.0)), torch.randn(32, 4))
    assert repr(broken) == f"<Inspection of Sequential: 1 norm, {len(broken.findings)} finding>"
    assert broken.findings[0].rule in str(broken)
    assert broken.findings[0].title in str(broken)
