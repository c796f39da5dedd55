"""The parts that the file of one family takes over from others: `extends`, and `[[include]]`.

Both work on documents, as `tomllib` reads them, so that a `Family` is made in one place.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from normkit.errors import ModelError

Document = dict[str, Any]

_INDEX = re.compile(r"\.(\d+|\{[^{}]*\})$")

_INCLUDED = ("family", "classes", "config", "names")
_SECTIONS = ("norm", "linear", "table", "attention")
# The fields of entries that hold a key of config.json, where they hold a word.
_KEYS = ("weight", "bias", "eps", "width", "heads", "kv_heads", "softcap", "clip")
# The fields of entries that hold names, and those that hold labels of sums and points.
_NAMES = ("of", "aliases", "value", "output", "key", "sinks", "beside", "reads", "writes", "gives")


def extended(values: Document, base: Document, name: str) -> Document:
    """The document of a family that differs from another one by names, and by the parts that it declares itself.

    `rename` replaces words in all keys and values of the base; where several fit, the first. Then tables are merged key
    by key; `[classes]` takes the place of the base's, and parts take that of all of the base's parts with the same
    `at`: the first that of the first, and so on. Parts of the base at places that `without` names are left out.

    Raises:
        ModelError: If `rename` or `without` names something that the base does not contain.
    """
    words = values.pop("rename", {})
    for word in words:
        if word not in str(base):
            raise ModelError(f"{name}: rename has {word!r}, which {base['model_type']}.toml does not contain")
    pattern = re.compile("|".join(map(re.escape, words)) or r"(?!)")
    taken = _mapped(base, lambda text: pattern.sub(lambda match: words[match[0]], text))
    own, parts, left_out = values.pop("part", []), taken.pop("part", []), values.pop("without", [])
    places = [part.get("at", "") for part in base["part"]]
    if unknown := sorted({*left_out} - {*places}):
        raise ModelError(f"{name}: without has {unknown[0]!r}, where {base['model_type']}.toml has no part")
    parts = [part for place, part in zip(places, parts, strict=True) if place not in left_out]
    result: Document = taken | {
        key: taken[key] | value if isinstance(value, dict) and key in taken and key != "classes" else value
        for key, value in values.items()
    }
    replaced = [part.get("at", "") for part in own]
    for place in dict.fromkeys(replaced):
        old = [index for index, part in enumerate(parts) if part.get("at", "") == place]
        new = [part for part in own if part.get("at", "") == place]
        if not old:
            parts += new
            continue
        for index in reversed(old[len(new) :]):
            del parts[index]
        places = old[: len(new)]
        for index, part in zip(places, new, strict=False):
            parts[index] = part
        parts[places[-1] + 1 : places[-1] + 1] = new[len(places) :]
    return result | {"part": parts}


def with_included(values: Document, document: Callable[[str], Document], name: str) -> Document:
    """The document of a model that contains models of other families.

    Raises:
        ModelError: If an `[[include]]` lacks a key, has an unknown one, or maps classes that are not there.
    """
    for include in values.pop("include"):
        unknown = sorted(set(include) - {*_INCLUDED, "word", "taken_by", "flat", "returned", "when", "without"})
        missing = sorted({"family", "classes", "config", "names"} - set(include))
        if unknown or missing:
            key = (unknown or missing)[0]
            raise ModelError(f"{name}: an include {'has the unknown' if unknown else 'lacks the'} key {key!r}")
        _include(values, copy.deepcopy(document(f"{include['family']}.toml")), include, name)
    return values


def _include(values: Document, base: Document, include: Mapping[str, Any], name: str) -> None:
    """Put the parts of one family into the document of another."""
    word, under, classes = include.get("word", ""), include["config"], include["classes"]
    if unknown := sorted({*classes} - {*values["classes"]}) or sorted({*classes.values()} - {*base["classes"]}):
        raise ModelError(f"{name}: an include maps the class {unknown[0]!r}, which is not declared")
    labels = set(_labels(base))

    def named(text: str) -> str:
        for placeholder in base.get("repeat", {}) if word else ():
            text = text.replace(f"{{{placeholder}", f"{{{word}_{placeholder}")
        return text

    def full(text: str) -> str:
        """A name in full, or a label, as it is in the larger model."""
        if stem(text) in labels:
            return named(f"{word} {text}".strip())
        start = next((start for start in include["names"] if text and text.startswith(start)), None)
        return named(text if start is None else include["names"][start] + text.removeprefix(start))

    used: set[str] = set()

    def keyed(key: str) -> str:
        used.add(key)
        return f"{under}.{key}"

    def settings(condition: Mapping[str, Any]) -> dict[str, Any]:
        return {keyed(key): value for key, value in condition.items()}

    def outer(only: list[str]) -> list[str]:
        return [each for each, inner in classes.items() if inner in only]

    config = base["config"]
    given_up = {place for inner in classes.values() for place in base["classes"][inner]}
    parts = []
    for part in base["part"]:
        at, only = part.get("at", ""), outer(part["only"] if "only" in part else list(classes.values()))
        if not only or at in include.get("without", ()):
            continue
        for section in _SECTIONS:
            entries = {}
            for key, entry in part.get(section, {}).items():
                if "only" in entry and not outer(entry["only"]):
                    continue
                entries[named(key) if at else full(key)] = entry
                if section == "norm" and "eps" in config:
                    entry.setdefault("eps", config["eps"])
                if section == "attention":
                    entry.setdefault("heads", config["heads"])
                    entry.setdefault("kv_heads", config.get("kv_heads", config["heads"]))
                if section == "table" and "writes" in entry:
                    entry.setdefault("width", config["width"])
                places = {entry.get("gives", ""), f"{at}.{key}".lstrip(".")}
                if section == "norm" and "taken_by" in include and places & given_up:
                    entry["opaque"] = include["taken_by"]
                if "only" in entry:
                    entry["only"] = outer(entry["only"])
                if "when" in entry:
                    entry["when"] = settings(entry["when"])
                for field in _KEYS:
                    if isinstance(entry.get(field), str) and not (section == "linear" and field == "weight"):
                        entry[field] = keyed(entry[field])
                for field in _NAMES:
                    if field in entry:
                        entry[field] = _mapped(
                            entry[field], lambda text: named(text) if text.startswith(".") else full(text)
                        )
            part[section] = entries
        part |= {key: full(part[key]) for key in ("at", "in_memory", "given", "lacking") if part.get(key)}
        part |= {"only": only} if set(only) != set(values["classes"]) else {}
        part |= {"either": f"{word} {part['either']}".strip()} if "either" in part else {}
        held = include.get("when", {}) | settings(part.get("when", {}))
        part |= {"when": held} if held else {}
        parts.append(part)
    for each, inner in classes.items():
        returned = [full(place) for place in base["classes"][inner]]
        values["classes"][each] += [] if "taken_by" in include or not include.get("returned", True) else returned
    values["part"] = values.get("part", []) + parts
    own = values.setdefault("config", {})
    own["dropout"] = own.get("dropout", []) + [keyed(key) for key in config.get("dropout", [])]
    values["requires"] = settings(base.get("requires", {})) | values.get("requires", {})
    values["repeat"] = values.get("repeat", {}) | {
        f"{word}_{placeholder}".strip("_"): _mapped(counts, keyed)
        for placeholder, counts in base.get("repeat", {}).items()
    }
    values["buffers"] = values.get("buffers", []) + [full(pattern) for pattern in base.get("buffers", [])]
    taken = {key: value for key, value in config.get("default", {}).items() if key in used}
    if include.get("flat"):
        defaults = taken | {f"{under}.{key}": f"={key}" for key in sorted(used)}
    else:
        defaults = {
            keyed(key): f"={keyed(value[1:])}" if isinstance(value, str) and value[:1] == "=" else value
            for key, value in taken.items()
        }
    own["default"] = defaults | own.get("default", {})
    if word:
        values["towers"] = [*values.get("towers", []), word]
    else:
        for field in ("width", "eps", "heads", "kv_heads", "head_dim"):
            if field in config:
                own.setdefault(field, keyed(config[field]))
        if "tie" in base:
            tie = {field: full(text) for field, text in base["tie"].items() if field in ("head", "table", "bias")}
            values["tie"] = base["tie"] | tie | values.get("tie", {})


def _labels(base: Document) -> Iterator[str]:
    """The names of sums, and of points that are not called as their norm is, without an index."""
    for part in base["part"]:
        for section in _SECTIONS:
            for entry in part.get(section, {}).values():
                for field in ("writes", "gives"):
                    found = entry.get(field, [])
                    yield from (stem(text) for text in ([found] if isinstance(found, str) else found))


def stem(place: str) -> str:
    """The name of a sum or a point without the index of its layer."""
    return _INDEX.sub("", place)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A document with each of its texts changed, keys too."""
    if isinstance(value, dict):
        return {change(key): _mapped(member, change) for key, member in value.items()}
    if isinstance(value, list):
        return [_mapped(member, change) for member in value]
    return change(value) if isinstance(value, str) else value
