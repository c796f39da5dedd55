"""The page of JSON documents: dataclasses from their docstrings, keys of others from json_documents.toml."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import tomllib
import types
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from marking import marked, table
from normkit.checkpoint.plan import FoldPlan
from normkit.inspection.result import Inspection
from normkit.spec import NormSpec

PAGE = "reference/json.md"
DOCUMENTS: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "json_documents.toml").read_text(encoding="utf-8")
)["document"]


def pages() -> dict[str, str]:
    """The page, by path."""
    parts = [
        "# JSON documents",
        "What each `--json` prints and each file of normkit holds: every key with its meaning. A document has a "
        "`schema_version`, which changes when a key goes or means something else; keys may come without that. Numbers "
        "that JSON has none for stand as the strings `nan`, `inf` and `-inf`.",
        "## An inspection",
        "`normkit inspect MODEL --json`, report.json, `Inspection.to_json()`: `schema_version` and these.",
        *_dataclass(Inspection),
        "## What a fold would do",
        "`normkit fold SRC --plan --json`: `schema_version` and these.",
        *_dataclass(FoldPlan),
    ]
    for document in DOCUMENTS:
        rows = [(f"`{key}`", words) for key, words in {**document["keys"], **document.get("also", {})}.items()]
        command = f"{document['command']} --json" if document["command"].startswith("normkit") else document["command"]
        parts += [f"## {document['title']}", f"`{command}`", table(("key", "what it is"), rows)]
    return {PAGE: "\n\n".join(parts) + "\n"}


def _dataclass(outermost: type) -> list[str]:
    """Tables of a dataclass and of all that its fields hold; those below the first are folded."""
    parts, left, seen = [], [outermost], {outermost}
    while left:
        shown = left.pop(0)
        hints, said = get_type_hints(shown), _attributes(shown)
        rows = []
        for field in dataclasses.fields(shown):
            rows.append((f"`{field.name}`", _words(hints[field.name]), marked(said.get(field.name, ""))))
            new = [each for each in _within(hints[field.name]) if each not in seen]
            seen.update(new)
            left += new
        text = table(("key", "type", "what it is"), rows)
        if shown is outermost:
            parts.append(text)
        else:
            first = (inspect.getdoc(shown) or "").split("\n\n")[0]
            body = "\n\n".join([marked(" ".join(first.split())), text])
            parts.append(f'??? abstract "{shown.__name__}"\n\n' + re.sub(r"^(?=.)", "    ", body, flags=re.MULTILINE))
    return parts


def _attributes(shown: type) -> dict[str, str]:
    """The fields of a dataclass, as the string under each describes it; some are still described in its docstring."""
    _, _, section = (inspect.getdoc(shown) or "").partition("Attributes:\n")
    words = re.split(r"^    (\w+): ", section.split("\n\n")[0], flags=re.MULTILINE)[1:]
    found = dict(zip(words[::2], words[1::2], strict=True))
    (tree,) = ast.parse(inspect.getsource(shown)).body
    for field, below in pairwise(tree.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = text
    return {name: " ".join(text.split()) for name, text in found.items()}


def _within(hint: Any) -> list[type]:
    """The dataclasses in a type; a spec is told elsewhere."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and hint is not NormSpec:
        return [hint]
    return [each for part in get_args(hint) if get_origin(hint) is not Literal for each in _within(part)]


def _words(hint: Any) -> str:
    """A type as JSON has it."""
    origin, inner = get_origin(hint), [part for part in get_args(hint) if part is not Ellipsis]
    if origin is Literal:
        return "one of " + ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _words(part) for part in inner)
    if origin is tuple:
        several = len(get_args(hint)) == 2 and get_args(hint)[1] is Ellipsis
        return f"list of {_words(inner[0])}" if several else f"list ({', '.join(map(_words, inner))})"
    if hint is NormSpec:
        return "[spec](api/specs.md#normkit.NormSpec)"
    plain = {str: "string", int: "number", float: "number", bool: "true or false", dict: "object"}
    return plain.get(origin or hint) or f"`{getattr(hint, '__name__', 'object')}`"
