"""The classes of transformers that are called norms, grouped by what their source says."""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import transformers

MODELS = Path(transformers.__file__).parent / "models"
_CLASS = re.compile(r"(?P<indent> *)class (?P<name>\w+)\b")
_UNREAD = ("extra_repr", "_load_from_state_dict")
"""Methods that say nothing about what is computed."""


@dataclass(frozen=True, order=True)
class Definition:
    """A class of a modeling file.

    Attributes:
        family: Its folder below `transformers.models`.
        name: Its name.
        module: The module to import it from.
        body: Fingerprint of its source: the same for two that differ in names, comments and type hints only.
    """

    family: str
    name: str
    module: str
    body: str

    def __str__(self) -> str:
        """Family and name, as the expectations give them."""
        return f"{self.family}.{self.name}"


def find(also: Iterable[str] = ()) -> list[Definition]:
    """The classes with "norm" in their name, and what is called one of these ("family.Name")."""
    wanted = set(also)
    found = []
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        family = path.parent.name
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            head = _CLASS.match(line)
            if head and ("norm" in head["name"].lower() or f"{family}.{head['name']}" in wanted):
                (node,) = ast.parse(_block(lines[number:], len(head["indent"]))).body
                module = f"transformers.models.{family}.{path.stem}"
                found.append(Definition(family, head["name"], module, fingerprint(node)))
    return found


def _block(lines: list[str], indent: int) -> str:
    """The class that begins with the first line; to parse whole files takes half a minute."""
    body = takewhile(lambda line: not line[: indent + 1].strip(" )"), lines[1:])
    return textwrap.dedent("\n".join([lines[0], *body]))


def fingerprint(node: ast.ClassDef) -> str:
    """Eight digits that depend on what is computed, not on its names, comments and type hints."""
    node = _Bare(node.name).visit(node)
    return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:8]


class _Bare(ast.NodeTransformer):
    """Leaves out docstrings, type hints, decorators and messages; the name of the whole becomes `Self`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = []
        node.body = [child for child in node.body if getattr(child, "name", "") not in _UNREAD]
        return self._without_docstring(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = []
        node.returns = None
        return self._without_docstring(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.Raise(exc=node.exc.func if isinstance(node.exc, ast.Call) else node.exc)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("Self", node.ctx) if node.id == self.name else node

    def _without_docstring(self, node: ast.ClassDef | ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if node.name == self.name:
            node.name = "Self"
        return self.generic_visit(node)
