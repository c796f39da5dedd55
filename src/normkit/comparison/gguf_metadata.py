"""What the metadata of a GGUF file must say: an eps, and the architecture by which llama.cpp reads the reference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from normkit.comparison.gguf_file import names_in_transformers
from normkit.comparison.weights import Weights

_RELATIVES: Mapping[str, tuple[str, ...]] = {
    "bert": ("jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe"),
    "gemma3": ("gemma-embedding",),
    "llama": ("llama-embed",),
    "mistral3": ("llama",),
    "nemotron_h": ("nemotron_h_moe",),
    "t5": ("t5encoder",),
}
"""Architecture -> others that llama.cpp's converter writes for some models of the same model_type."""

_GEMMAS = ("gemma", "gemma2", "gemma3", "gemma3n")
_LACKING = {("llama", each): "no scale of the embeddings, SiLU in place of GELU" for each in _GEMMAS}
"""Architecture in the file and the reference's own -> what llama.cpp then computes otherwise (src/models/llama.cpp)."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of the metadata that is no norm's own."""

    label: str
    """What it is about: "eps" or "architecture"."""
    words: str
    """What is wrong, without the name of the file."""
    sentence: str
    """What is wrong, with the name of the file."""
    remedy: str
    """What to do, in a few words."""

    def to_json(self) -> dict[str, str]:
        """Plain values."""
        return asdict(self)


def faults_of(port: Weights, reference: Weights) -> Iterator[Fault]:
    """The faults of a GGUF file's metadata; none of another form, or of a file of vision or sound alone.

    Args:
        port: The parameters of the port.
        reference: Those of the reference, of transformers.
    """
    if port.runtime != "llama.cpp" or port.architecture in ("", "clip"):
        return
    own = expected_architecture(port, reference)
    if own != port.architecture:
        lacking = _LACKING.get((port.architecture, own), "")
        computes = f"llama.cpp computes what it computes for {port.architecture}"
        computes = f"{computes}: {lacking}" if lacking else computes
        yield Fault(
            label="architecture",
            words=f"{port.architecture} instead of {own}; {computes}",
            sentence=f"{port.name} names the architecture {port.architecture} instead of {own}; {computes}.",
            remedy=f"write {own} into general.architecture, and its keys, or convert the reference anew",
        )
    if not port.eps:
        rms = any("rms" in key for key in reference.settings)
        layer = any(re.search(r"layer_?norm", key) for key in reference.settings)
        names = [f"layer_norm_{'rms_' if each else ''}epsilon" for each in (True, False) if rms is each or layer is rms]
        keys = " or ".join(f"{port.architecture}.attention.{name}" for name in names)
        yield Fault(
            label="eps",
            words=f"none; llama.cpp refuses a file without {keys}",
            sentence=f"{port.name} states no eps: llama.cpp refuses a file without {keys}.",
            remedy="write the reference's eps into the metadata of the file",
        )


def expected_architecture(port: Weights, reference: Weights) -> str:
    """The architecture that a GGUF file should name: its own, where nothing speaks against it."""
    own = own_architecture(str(reference.settings.get("model_type", "")))
    is_right = not own or port.architecture in (own, *_RELATIVES.get(own, ()))
    return port.architecture if is_right else own


def with_expected_names(port: Weights, reference: Weights) -> Weights:
    """The port; a GGUF file that names another architecture has the names of the reference's own."""
    if port.runtime != "llama.cpp" or port.architecture in ("", "clip"):
        return port
    expected = expected_architecture(port, reference)
    if expected == port.architecture:
        return port
    return replace(port, names=names_in_transformers(expected, port.source.tensors)[0])


def own_architecture(model_type: str) -> str:
    """The architecture of llama.cpp with the name of a model type of transformers; "" if none has its name.

    Example:
        >>> own_architecture("gemma3_text"), own_architecture("mistral")
        ('gemma3', '')
    """
    try:
        from gguf.constants import MODEL_ARCH_NAMES
    except ImportError:
        return ""
    known = {_letters(name): name for name in MODEL_ARCH_NAMES.values()}
    names = (_letters(model_type), _letters(model_type.removesuffix("_text")))
    return next((known[name] for name in names if name in known), "")


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
