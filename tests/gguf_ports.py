"""Small models as llama.cpp's converter writes them, and with one fault each, with the truth about every gain.

A reference is named as in transformers. `converted` does what `conversion/` of llama.cpp does to the norms of its
architecture; a fault then changes what was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf as package
import torch
from safetensors.torch import save_file
from torch import Tensor

from gguf_files import Raw, gguf
from normkit.comparison.gguf_header import _ENCODINGS, GgufTensor
from normkit.comparison.weights import Weights

LAYERS, WIDTH, HEAD = 4, 64, 32

_BLOCK = {
    "llama": ("input_layernorm", "post_attention_layernorm"),
    "gemma3": (
        *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        *("self_attn.q_norm", "self_attn.k_norm"),
    ),
    "qwen3next": (
        *("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
        "linear_attn.norm",
    ),
    "nemotron": ("input_layernorm", "post_attention_layernorm"),
}
ARCHITECTURES = tuple(_BLOCK)

_MODEL_TYPES = {"llama": "llama", "gemma3": "gemma3_text", "qwen3next": "qwen3_next", "nemotron": "nemotron"}

_PLAIN = {"llama": ("",), "qwen3next": ("linear_attn.norm.weight",), "gemma3": (), "nemotron": ()}
"""The ends of names to which the converter adds no 1."""


@dataclass(frozen=True)
class Truth:
    """What a gain or bias of a port is to the reference's of the same place."""

    kind: str = "equal"
    constant: float | None = None
    other: str = ""
    """The path in the reference of the norm whose values it has."""
    is_right: bool = True


@dataclass(frozen=True)
class Port:
    """A port as a GGUF file holds it, and what is true of it."""

    architecture: str
    tensors: Mapping[str, Tensor | Raw]
    """By the names of llama.cpp."""
    places: Mapping[str, str]
    """Name of a tensor -> the reference's name of its place."""
    truth: Mapping[str, Truth]
    """Name of a tensor, or the reference's name of a missing one, -> what is true of it."""
    eps: float = 1e-6

    def write(self, file: Path) -> Path:
        """Write the file."""
        rms = "layer_norm" if self.architecture == "nemotron" else "layer_norm_rms"
        settings = {
            "general.architecture": self.architecture,
            f"{self.architecture}.block_count": LAYERS,
            f"{self.architecture}.attention.{rms}_epsilon": self.eps,
            "tokenizer.ggml.tokens": ["<s>", "a", "b"],
        }
        file.write_bytes(gguf(settings, self.tensors))
        return file


def reference(architecture: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The tensors of a trained model's folder: gains around 0 or 1, as the architecture stores them."""
    generator = torch.Generator().manual_seed(5)
    tensors = {"model.embed_tokens.weight": torch.randn(11, WIDTH, generator=generator)}
    paths = [f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in _BLOCK[architecture]]
    for path in [*paths, "model.norm"]:
        size = HEAD if path.endswith(("q_norm", "k_norm", "linear_attn.norm")) else WIDTH
        centre = 1.0 if f"{path}.weight".endswith(_PLAIN[architecture]) else 0.0
        tensors[f"{path}.weight"] = centre + 0.3 * torch.randn(size, generator=generator)
        if architecture == "nemotron":
            tensors[f"{path}.bias"] = 0.1 * torch.randn(size, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def folder_of(folder: Path, architecture: str, tensors: Mapping[str, Tensor]) -> Path:
    """The reference as a folder of transformers."""
    folder.mkdir(exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    eps = "layer_norm_eps" if architecture == "nemotron" else "rms_norm_eps"
    (folder / "config.json").write_text(json.dumps({"model_type": _MODEL_TYPES[architecture], eps: 1e-6}))
    return folder


# Family of tests/tiny_models.py -> its architecture in llama.cpp, and what its converter takes off the names.
FAMILIES = {
    **dict.fromkeys(("llama", "llama_bias", "mistral", "mixtral"), ("llama", "")),
    **dict.fromkeys(("gpt_neox", "gpt_neox_sequential"), ("gptneox", "")),
    **dict.fromkeys(("falcon", "falcon_two_norms"), ("falcon", "")),
    **dict.fromkeys(("stablelm", "stablelm_bias"), ("stablelm", "")),
    **dict.fromkeys(("cohere", "cohere_qk_norm"), ("command-r", "")),
    **dict.fromkeys(("deepseek_v3", "deepseek_v3_full_q"), ("deepseek2", "")),
    **dict.fromkeys(("modernbert", "modernbert_bias"), ("modern-bert", "model.")),
    **{name: (name, "") for name in ("gpt2", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "t5")},
    **{name: (name, "") for name in ("granite", "seed_oss", "smollm3", "glm4", "starcoder2")},
    "phi": ("phi2", ""),
    "qwen2_moe": ("qwen2moe", ""),
    "qwen3_moe": ("qwen3moe", ""),
    "gpt_oss": ("gpt-oss", ""),
    "bert": ("bert", "bert."),
    "bloom": ("bloom", "transformer."),
}


def family_port(family: str, tensors: Mapping[str, Tensor]) -> Port:
    """A right port of a tiny model; what the table does not name, llama.cpp does not have."""
    architecture, prefix = FAMILIES[family]
    number = next(each for each, name in package.MODEL_ARCH_NAMES.items() if name == architecture)
    table = package.get_tensor_name_map(number, LAYERS)
    written: dict[str, Tensor | Raw] = {}
    places = {}
    for name, tensor in tensors.items():
        ours = table.get_name(name.removeprefix(prefix), try_suffixes=(".weight", ".bias"))
        if ours is not None:
            is_shifted = family in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight")
            written[ours], places[ours] = tensor + 1 if is_shifted else tensor, name
    return Port(architecture, written, places, {})


def converted(architecture: str, tensors: Mapping[str, Tensor]) -> Port:
    """A right port: all but float16 as float32, and 1 added to the gains of architectures that have it in the code."""
    number = next(each for each, name in package.MODEL_ARCH_NAMES.items() if name == architecture)
    # Made anew for one architecture: see the decision on GGUF.
    table = package.get_tensor_name_map(number, LAYERS)
    written, places, truth = {}, {}, {}
    for name, tensor in tensors.items():
        ours = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        wide = tensor if tensor.dtype is torch.float16 else tensor.float()
        is_shifted = name.endswith("norm.weight") and not name.endswith(_PLAIN[architecture])
        written[ours], places[ours] = (wide + 1 if is_shifted else wide).float(), name
        if "norm" in name:
            truth[ours] = Truth("offset", 1.0) if is_shifted else Truth()
    return Port(architecture, written, places, truth)


def real(weights: Weights, folder: Collection[str], offset: float) -> Port:
    """The port in a real file. Its gains are those of a folder with these names, with a number added."""
    places = {name: next(other for other in others if other in folder) for name, others in weights.names.items()}
    tensors: dict[str, Tensor | Raw] = {}
    for name, info in weights.source.tensors.items():
        assert isinstance(info, GgufTensor)
        if "norm" in name:
            tensors[name] = weights.source.rows(name, 0, 1)[0]
        else:
            with info.file.open("rb") as opened:
                opened.seek(info.start)
                number = next(number for number, known in _ENCODINGS.items() if known[0] == info.encoding)
                tensors[name] = Raw(number, opened.read(info.stop - info.start), info.shape)
    truth = Truth("offset", offset) if offset else Truth()
    gains = {name: truth for name in tensors if "norm" in name}
    return Port(weights.architecture, tensors, places, gains, weights.eps[""])


def _shifted(port: Port, by: float, ends: tuple[str, ...] = ("norm.weight",)) -> Port:
    """The gains whose names end so, with a number added."""
    chosen = [name for name in port.truth if name.endswith(ends)]
    tensors, truth = dict(port.tensors), dict(port.truth)
    for name in chosen:
        gain = tensors[name]
        assert isinstance(gain, Tensor)
        tensors[name] = gain + by
        constant = (truth[name].constant or 0) + by
        truth[name] = Truth("offset", constant, is_right=False) if constant else Truth(is_right=False)
    return replace(port, tensors=tensors, truth=truth)


def offset_doubled(port: Port) -> Port:
    """1 added to every gain of a file that has it already."""
    return _shifted(port, 1.0)


def offset_dropped(port: Port) -> Port:
    """The gains as the folder has them, although the loader adds nothing."""
    return _shifted(port, -1.0, tuple(name for name, value in port.truth.items() if value.kind == "offset"))


def offset_doubled_in_attention(port: Port) -> Port:
    """1 added twice to the gains of query and key norms alone."""
    return _shifted(port, 1.0, ("attn_q_norm.weight", "attn_k_norm.weight"))


def _tensor_at(port: Port, path: str) -> str:
    """The gain of a norm of the reference."""
    return next(ours for ours, name in port.places.items() if name == f"{path}.weight")


def gains_swapped(port: Port) -> Port:
    """The two gains of one layer in each other's places."""
    paths = "model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm"
    one, other = (_tensor_at(port, path) for path in paths)
    tensors = {**port.tensors, one: port.tensors[other], other: port.tensors[one]}
    truth = {
        **port.truth,
        one: replace(port.truth[one], kind="swapped", other=paths[1], is_right=False),
        other: replace(port.truth[other], kind="swapped", other=paths[0], is_right=False),
    }
    return replace(port, tensors=tensors, truth=truth)


def gain_of_another_layer(port: Port) -> Port:
    """A gain of layer 2 in place of that of layer 0."""
    paths = "model.layers.0.input_layernorm", "model.layers.2.input_layernorm"
    one, other = (_tensor_at(port, path) for path in paths)
    truth = {**port.truth, one: replace(port.truth[one], kind="copied", other=paths[1], is_right=False)}
    return replace(port, tensors={**port.tensors, one: port.tensors[other]}, truth=truth)


def final_norm_missing(port: Port) -> Port:
    """No final norm."""
    gone = "output_norm.weight"
    truth = {name: value for name, value in port.truth.items() if name != gone}
    return replace(
        port,
        tensors={name: tensor for name, tensor in port.tensors.items() if name != gone},
        truth={**truth, port.places[gone]: Truth("missing", is_right=False)},
    )


def eps_wrong(port: Port) -> Port:
    """Another eps in the metadata."""
    return replace(port, eps=1e-5)


FAULTS: dict[str, Callable[[Port], Port]] = {
    fault.__name__: fault
    for fault in (
        *(offset_doubled, offset_dropped, offset_doubled_in_attention, gains_swapped, gain_of_another_layer),
        *(final_norm_missing, eps_wrong),
    )
}


def ports() -> list[tuple[str, str]]:
    """Each architecture with each fault that it can have, and with none: its name and the fault's, or ""."""
    has_offset, has_heads = ("gemma3", "qwen3next", "nemotron"), ("gemma3", "qwen3next")
    return [
        (architecture, fault)
        for architecture in ARCHITECTURES
        for fault in ("", *FAULTS)
        if (fault != "offset_dropped" or architecture in has_offset)
        and (fault != "offset_doubled_in_attention" or architecture in has_heads)
    ]
