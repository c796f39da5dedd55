"""The settings of two models: the keys of config.json or of a GGUF that both state and that differ."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from normkit.comparison.weights import TEXT_PARTS, Weights

SAME = 2.0**-22
"""The relative difference below which two numbers are one: formats hold them as float32 numbers or as decimals."""

_ROPE = "rope_parameters"
_BASE = f"{_ROPE}.rope_theta"
_ACTIVATIONS = ("hidden_act", "hidden_activation")
_LAYERED = ("full_attention", "sliding_attention")
_GGUF_BASE = 10_000.0
"""The base that llama.cpp takes where the file states none (src/llama-model.cpp, rope_freq_base_train)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A key of two models' settings with two values."""

    name: str
    """As the reference writes it; parts of parts are joined with dots."""
    given: Any
    """The port's value."""
    expected: Any
    """The reference's value."""
    computes: bool
    """The key is known to change what is computed."""
    reason: str = ""
    """Why the port has this value, where its file does not state it."""

    @property
    def words(self) -> str:
        """Name and both values.

        Example:
            >>> Setting(name="rope_theta", given=10000.0, expected=500000.0, computes=True).words
            'rope_theta is 10000 instead of 500000'
        """
        why = f": {self.reason}" if self.reason else ""
        return f"{self.name} is {_shown(self.given)} instead of {_shown(self.expected)}{why}"

    @property
    def shown(self) -> str:
        """The reference's value, as text."""
        return _shown(self.expected)

    @property
    def is_of_attention(self) -> bool:
        """Whether it changes what attention computes, so that a difference born there follows from it."""
        return self.computes and bool(
            re.search(r"rope|rotary|head|attn|attention|window|layer_types|causal", self.name)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def compare_settings(port: Weights, reference: Weights, holding: Collection[str] = ()) -> tuple[Setting, ...]:
    """The settings that both sides state and that differ, those that compute something else first.

    `holding` names the matrices of the port that hold a gain of the reference: a head among them is its table.

    Keys that say nothing about what is computed are left out. Where one side is a GGUF, only keys are compared whose
    meaning in transformers is known.

    Example:
        >>> from dataclasses import replace
        >>> from normkit.comparison.weights import weights_of
        >>> made = [{"rope_theta": 10000.0}, {"rope_parameters": {"rope_theta": 500000.0}, "use_cache": True}]
        >>> sides = [replace(weights_of({}), runtime="transformers", settings=settings) for settings in made]
        >>> [each.words for each in compare_settings(*sides)]
        ['rope_parameters.rope_theta is 10000 instead of 500000']
    """
    sides = (port, reference)
    if not all(side.settings and side.runtime in ("transformers", "MLX", "llama.cpp") for side in sides):
        return ()
    theirs = [_flat(side.settings, side.runtime) for side in sides]
    stated = [
        _of_gguf(each, theirs[1 - place]) if sides[place].runtime == "llama.cpp" else _of_transformers(each)
        for place, each in enumerate(theirs)
    ]
    reasons: dict[str, str] = {}
    # The base that a runtime takes because it does not find the one that is written.
    is_expected = _BASE in stated[1] or f"{_ROPE}.full_attention.rope_theta" in stated[1]
    if port.runtime == "llama.cpp" and _BASE not in stated[0] and is_expected:
        stated[0][_BASE] = _GGUF_BASE
        reasons[_BASE] = "the file states no rope.freq_base, and llama.cpp takes this"
    known = _document()["mlx_rope_theta"].get(port.architecture)
    is_below = "rope_theta" not in port.settings and _ROPE in port.settings
    if port.runtime == "MLX" and known is not None and is_below:
        stated[0][_BASE] = known
        reasons[_BASE] = "config.json has it below rope_parameters, mlx-lm reads it at the top and takes this"
    # Key -> its name in the reference's file, where that is another.
    names = {name: key for key, name in _document()["rope"].items() if key in reference.settings}
    if reference.runtime == "llama.cpp":
        names = {each: key for key, alternatives in _document()["gguf"].items() for each in alternatives}
    if any(key.startswith(f"{_ROPE}.{part}.") for each in stated for key in each for part in _LAYERED):
        stated = [{_layered(key): value for key, value in each.items()} for each in stated]
        names, reasons = ({_layered(key): text for key, text in each.items()} for each in (names, reasons))
    found = []
    for key in stated[1]:
        if key not in stated[0] or _matches(key, "silent") or is_same(stated[0][key], stated[1][key]):
            continue
        if key == "tie_word_embeddings" and _head(port, stated[0], holding) == _head(reference, stated[1], ()):
            continue
        found.append(
            Setting(
                name=names.get(key, key),
                given=stated[0][key],
                expected=stated[1][key],
                computes=_matches(key, "computes"),
                reason=reasons.get(key, ""),
            )
        )
    places = ["top" if "rope_theta" in side.settings else _ROPE in side.settings and "below" for side in sides]
    if port.runtime == "transformers" and places == ["below", "top"]:
        # One thing in two places, of which older readers know one.
        found.append(
            Setting(
                name="rope_theta",
                given="below rope_parameters",
                expected="at the top of config.json",
                computes=False,
                reason="transformers 5 reads both, transformers 4 and most models of mlx-lm find the top alone",
            )
        )
    return tuple(sorted(found, key=lambda each: not each.computes))


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are one: numbers as far as float32 tells, activations by their function."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, str) and isinstance(other, str):
        known = _document()["activations"]
        return bool(known.get(one, one) == known.get(other, other))
    is_number = [isinstance(each, (int, float)) and not isinstance(each, bool) for each in (one, other)]
    if all(is_number):
        return bool(one == other or abs(one - other) <= SAME * max(abs(one), abs(other)))
    # A setting of None is off.
    return bool((False if one is None else one) == (False if other is None else other))


def _flat(settings: Mapping[str, Any], runtime: str) -> dict[str, Any]:
    """Keys of parts joined with dots; those of the language model as if they stood at the top."""
    if runtime == "llama.cpp":
        architecture = settings.get("general.architecture", "")
        return {key.removeprefix(f"{architecture}."): value for key, value in settings.items()}
    found: dict[str, Any] = {}
    left = [(("",), settings)]
    while left:
        (above,), part = left.pop()
        for key, value in part.items():
            name = above if key in TEXT_PARTS and not above else f"{above}{key}"
            if isinstance(value, Mapping) and value:
                left.append(((f"{name}." if name else "",), value))
            elif name:
                found.setdefault(name, value)
    return found


def _of_transformers(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with one name for each, and with what follows from others."""
    found: dict[str, Any] = {}
    renamed = _document()["rope"]
    for key, value in flat.items():
        name = renamed.get(key, key)
        if key.startswith("rope_scaling."):
            name = f"{_ROPE}.{key.removeprefix('rope_scaling.')}"
        if name == f"{_ROPE}.type" or name.endswith(".rope_scaling.type"):
            name = f"{name.removesuffix('type')}rope_type"
        is_default = value is None and (name.startswith(f"{_ROPE}.") or name in _ACTIVATIONS)
        if key not in ("rope_scaling", _ROPE) and not is_default:
            found.setdefault(name, value)
    for part in ("", *(f"{each}." for each in _LAYERED)):
        if f"{_ROPE}.{part}rope_theta" in found:
            found.setdefault(f"{_ROPE}.{part}rope_type", "default")
    if found.get("use_sliding_window") is False and "sliding_window" in found:
        found["sliding_window"] = None
    heads, width = found.get("num_attention_heads"), found.get("hidden_size")
    if isinstance(heads, int) and heads > 0:
        if found.get("num_key_value_heads", 0) is None:
            found["num_key_value_heads"] = heads
        if isinstance(width, int) and found.get("head_dim") is None:
            found["head_dim"] = width // heads
    return found


def _of_gguf(flat: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a GGUF under the names that the other side has for them."""
    found = {}
    there = _of_transformers(other) if "general.architecture" not in other else {}
    # Latent attention is stored as if all heads shared one key.
    is_latent = there.get("kv_lora_rank") is not None
    for key, alternatives in _document()["gguf"].items():
        value = flat.get(key)
        if value is None or isinstance(value, (list, tuple)):
            continue
        name = next((each for each in alternatives if each in there), alternatives[0])
        is_unlike = is_latent and name in ("num_key_value_heads", "head_dim")
        # Two kinds of layers may have heads of two sizes; transformers states that of the one as head_dim.
        if not is_unlike and not (name == "head_dim" and "attention.key_length_swa" in flat):
            found[name] = "default" if value == "none" else value
    if found.get("sliding_window") == 0:
        found["sliding_window"] = None
    return found


def _layered(key: str) -> str:
    """The key for layers of full attention, of one that is for all layers."""
    part = key.removeprefix(f"{_ROPE}.")
    is_for_all = key.startswith(f"{_ROPE}.") and part.partition(".")[0] not in _LAYERED
    return f"{_ROPE}.{_LAYERED[0]}.{part}" if is_for_all else key


def _head(weights: Weights, stated: Mapping[str, Any], holding: Collection[str]) -> str:
    """Whose matrix makes the logits: "embedding", also as one that holds a gain, "own", or "none" without one."""
    heads = [name for name in weights.source.tensors if name.endswith(("lm_head.weight", "embed_out.weight"))]
    if stated["tie_word_embeddings"] or (heads and heads[0] in holding):
        return "embedding"
    if not heads:
        return "none"
    ends = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
    embedding = next((name for name in weights.source.tensors if name.endswith(ends)), None)
    if embedding is None:
        return "own"
    rows = min(64, *(weights.source.tensors[name].matrix[0] for name in (heads[0], embedding)))
    head, tokens = (weights.source.rows(name, 0, rows) for name in (heads[0], embedding))
    return "embedding" if head.shape == tokens.shape and bool((head == tokens).all()) else "own"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _matches(key: str, kind: str) -> bool:
    last = key.rpartition(".")[2]
    return any(fnmatchcase(name, pattern) for pattern in _document()[kind] for name in (key, last))


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads((files("normkit.comparison") / "settings.toml").read_text(encoding="utf-8"))
