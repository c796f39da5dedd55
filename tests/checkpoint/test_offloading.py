"""A checkpoint whose weights stay in its files gives what it gives in memory, and says why where it cannot."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MvpConfig, MvpModel, PreTrainedModel, Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

import normkit as nk
import tiny_models
from normkit import demo
from normkit.checkpoint import offloading
from normkit.checkpoint.loading import LoadedModel, load_model
from normkit.errors import InputError, ModelError
from normkit.identification.offloading import stored

_SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of tiny models are offloaded, too; their norms stay."""
    monkeypatch.setattr(offloading, "_RESIDENT", 500)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, Any]]]:
    def saved(
        family: str, *, dropped: str = "", dtype: torch.dtype = torch.float32, shards: str = "1GB", **options: Any
    ) -> tuple[Path, dict[str, Any]]:
        """The folder of a tiny model without the weights whose names begin so, and arguments for a call of it."""
        model, inputs = tiny_models.tiny(family, dtype=dtype, **options)
        model.save_pretrained(tmp_path, max_shard_size=shards)
        if dropped:
            kept = load_file(tmp_path / "model.safetensors")
            kept = {name: value for name, value in kept.items() if not name.startswith(dropped)}
            save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
        floats = {name: value.float() for name, value in inputs.items() if value.is_floating_point()}
        return tmp_path, inputs | floats

    return saved


def both(folder: Path, **options: Any) -> tuple[LoadedModel, LoadedModel]:
    in_memory, offloaded = (
        load_model(str(folder), offload=offload, text_only=False, **options) for offload in (False, True)
    )
    assert offloaded.notes == in_memory.notes
    assert any(each.is_meta for each in offloaded.model.parameters())
    return in_memory, offloaded


def laid_alike(in_memory: LoadedModel, offloaded: LoadedModel) -> None:
    """Let joined or split weights in memory start as far behind a multiple of 64 bytes as in the file written for them.

    Kernels add in another order where a tensor starts elsewhere: jamba's experts lie at 0 in memory, at 56 in a file.
    Biases are not added up: those of a tied head lie at 0, as transformers pads them, be it by nothing.
    """
    for name, held in stored(offloaded.model).items():
        parameter, value = in_memory.model.get_parameter(name), held.read()
        assert torch.equal(parameter, value)
        if parameter.data_ptr() % 64 != value.data_ptr() % 64:
            file, _ = held.place
            assert Path(file).parent.name == "weights" or parameter.dim() == 1
            parameter.data = offloading._copied(value)
            assert parameter.data_ptr() % 64 == value.data_ptr() % 64


def document(loaded: LoadedModel, inputs: dict[str, Any]) -> str:
    return json.dumps(nk.inspect(loaded.model, [inputs, inputs], name="it").to_json())


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", sorted(tiny_models.RECIPES))
def test_an_offloaded_model_is_inspected_as_one_in_memory(family: str, saved: Any) -> None:
    folder, inputs = saved(family)

    in_memory, offloaded = both(folder)
    for each in (in_memory.model, offloaded.model):
        # The grouped product takes no rows but of a multiple of 16 bytes.
        if hasattr(each, "set_experts_implementation"):
            each.set_experts_implementation("eager")
    laid_alike(in_memory, offloaded)

    assert document(offloaded, inputs) == document(in_memory, inputs)
    # Between calls nothing is held, and the norms are plain modules.
    assert any(each.is_meta for each in offloaded.model.parameters())


def test_a_module_that_reads_the_weights_of_a_part_without_a_call_of_it(saved: Any) -> None:
    # torch.nn.MultiheadAttention of SigLIP's pooling head reads those of its out_proj.
    folder, inputs = saved("siglip_vision")

    in_memory, offloaded = both(folder)

    with torch.no_grad():
        found, expected = (each.model(**inputs).pooler_output for each in (offloaded, in_memory))
    assert torch.equal(found, expected)


def mvp() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """It moves positions to `self.device` for the prompt of each block."""
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _SIZES.items()}
    prompt = {"use_prompt": True, "prompt_length": 4, "prompt_mid_dim": 8}
    return MvpModel(MvpConfig(vocab_size=64, d_model=32, **sizes, **prompt)), {"input_ids": torch.arange(1, 9)[None]}


def qwen2_audio() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """It moves features to the device of a part, `self.audio_tower.device`."""
    encoder = {f"encoder_{name}": size for name, size in _SIZES.items()}
    audio = {"model_type": "qwen2_audio_encoder", "num_mel_bins": 16, "d_model": 16, "max_source_positions": 16}
    text = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2AudioConfig(audio_config=audio | encoder, text_config=text | heads, audio_token_index=7)
    tokens = torch.tensor([[1, 2] + [7] * 8 + [3]])
    sound = {"input_features": torch.randn(1, 16, 32), "feature_attention_mask": torch.ones(1, 32, dtype=torch.long)}
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **sound}
    return Qwen2AudioForConditionalGeneration(config), inputs


@pytest.mark.parametrize("make", [mvp, qwen2_audio, partial(tiny_models.tiny, "idefics3")])
def test_a_model_that_reads_its_device_reads_that_of_values(make: Any, tmp_path: Path) -> None:
    # It is that of the first parameter, which is not in memory between the calls of its module.
    torch.manual_seed(0)
    model, inputs = make()
    model.save_pretrained(tmp_path)

    in_memory, offloaded = both(tmp_path)

    inputs = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    with torch.no_grad():
        found, expected = (each.model(**inputs)[0] for each in (offloaded, in_memory))
    assert torch.equal(found, expected)
    assert next(offloaded.model.parameters()).is_meta


def test_small_weights_start_in_memory_where_they_do_in_the_file(saved: Any) -> None:
    folder, _ = saved("jamba")

    in_memory, offloaded = both(folder)

    starts = {name: each.data_ptr() % 64 for name, each in in_memory.model.named_parameters()}
    small = {name: each.data_ptr() % 64 for name, each in offloaded.model.named_parameters() if not each.is_meta}
    assert any(small.values())
    assert small == {name: starts[name] for name in small}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("twin", ["layernorm", "rmsnorm"])
def test_the_demo_twins_are(twin: str) -> None:
    ids = torch.tensor(list(demo.text().encode()[:128])).reshape(2, 64)

    in_memory, offloaded = both(demo.directory(twin))

    assert document(offloaded, {"input_ids": ids}) == document(in_memory, {"input_ids": ids})


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        # A file for each few weights.
        ("llama", {"shards": "20KB"}, {}),
        # Another dtype than the file's, also where experts are joined to one tensor.
        ("llama", {"dtype": torch.bfloat16}, {"dtype": "float32"}),
        ("qwen3_moe", {"dtype": torch.bfloat16}, {"dtype": "float32"}),
        # Without the head of the class, and with weights drawn at random: a matrix, a norm.
        ("bert", {"dropped": "cls."}, {}),
        ("llama", {"dropped": "model.layers.1.mlp.up_proj", "tied": False}, {}),
        ("llama", {"dropped": "model.layers.1.input_layernorm", "tied": False}, {}),
    ],
)
def test_what_a_file_lacks_or_has_otherwise(
    family: str, changes: dict[str, Any], options: dict[str, Any], saved: Any
) -> None:
    folder, inputs = saved(family, **changes)

    in_memory, offloaded = both(folder, **options)

    assert document(offloaded, inputs) == document(in_memory, inputs)


@pytest.mark.slow
def test_shapes_that_do_not_fit_are_the_same_line(saved: Any) -> None:
    folder, _ = saved("llama")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"intermediate_size": 44}))

    with pytest.raises(ModelError, match=r"mlp.down_proj.weight in .* has shape \(32, 40\), config.json asks for"):
        load_model(str(folder), offload=True)


@pytest.mark.slow
def test_joined_weights_are_written_to_a_folder_that_goes_with_the_model(
    saved: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved("qwen3_moe")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    place = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(place))

    model = nk.load(folder, offload=True)

    written = [path.name for path in place.glob("*/weights/*")]
    assert len(written) == 4
    assert all("experts" in name for name in written)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    del model
    gc.collect()
    assert list(place.iterdir()) == []


@pytest.mark.slow
def test_weights_that_cannot_be_written_are_one_line(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = saved("qwen3_moe")
    made = tempfile.mkdtemp

    def taken(prefix: str) -> str:
        """A file has the name of the folder that they go to, as good as a full disk."""
        Path(scratch := made(prefix=prefix), "weights").touch()
        return scratch

    monkeypatch.setattr(tempfile, "mkdtemp", taken)
    with pytest.raises(InputError, match=r"cannot write weights .*: File exists; set TMPDIR") as caught:
        load_model(str(folder), offload=True)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written_to_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null/nowhere")
    with pytest.raises(InputError, match="cannot write weights that are offloaded below /dev/null/nowhere: Not a dir"):
        load_model(str(demo.directory("rmsnorm")), offload=True)


def test_transformers_4_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "installed_version", lambda _name: "4.57.6")
    with pytest.raises(InputError, match=r"offloading needs transformers 5, .*; 4.57.6 is installed"):
        load_model(str(demo.directory("rmsnorm")), offload=True)


def test_accelerate_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"needs accelerate, which is not installed; pip install 'normkit\[offload\]'"):
        load_model(str(demo.directory("rmsnorm")), offload=True)


@pytest.mark.slow
def test_a_file_larger_than_memory_and_swap_is_one_line(saved: Any) -> None:
    limits = Path("/proc/sys/vm/overcommit_memory"), Path("/proc/meminfo")
    if not limits[0].exists() or limits[0].read_text().strip() != "0":
        pytest.skip("not a Linux that refuses such a file")
    known = dict(line.split()[:2] for line in limits[1].read_text().splitlines())
    folder, _ = saved("llama")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, held = json.loads(content[8:start]), len(content) - start
    more = 1024 * (int(known["MemTotal:"]) + int(known["SwapTotal:"])) + 2**30
    # A tensor that the model has no use for, of zeros that take no room on the disk.
    header["more"] = {"dtype": "U8", "shape": [more], "data_offsets": [held, held + more]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])
    os.truncate(file, 8 + len(text) + held + more)

    with pytest.raises(ModelError, match=r"Linux does not map .*model.safetensors \([\d.]+ GB\), which is larger than"):
        load_model(str(folder), offload=True)


def test_a_truncated_file_is_one_line(saved: Any) -> None:
    folder, _ = saved("llama")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ModelError, match="is truncated or corrupt"):
        load_model(str(folder), offload=True)
