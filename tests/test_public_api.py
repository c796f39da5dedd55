"""What `import normkit` offers: every name resolves, is documented, and keeps its signature."""

from __future__ import annotations

import inspect
import re
from types import FunctionType, ModuleType

import pytest

import normkit
from helpers import ROOT

# A change there is a change for every user: say so in the changelog.
SIGNATURES = (ROOT / "tests" / "signatures.txt").read_text(encoding="utf-8").splitlines()


def signature(value) -> str:
    """Names and defaults of the parameters, without annotations; empty for an exception and for a constant."""
    if not callable(value) or (isinstance(value, type) and issubclass(value, Exception)):
        return ""
    given = inspect.signature(value)
    plain = [parameter.replace(annotation=parameter.empty) for parameter in given.parameters.values()]
    return str(given.replace(parameters=plain, return_annotation=given.empty))


def described(name: str, value) -> dict[str, object]:
    """A public name, and the public methods of a class or the public contents of a module under it."""
    if isinstance(value, ModuleType):
        names = getattr(value, "__all__", None)
        if names is not None:
            return {
                full: member
                for key in names
                for full, member in described(f"{name}.{key}", getattr(value, key)).items()
            }
        own = {
            key: member for key, member in vars(value).items() if getattr(member, "__module__", "") == value.__name__
        }
        return {f"{name}.{key}": member for key, member in own.items() if not key.startswith("_")}
    found = {name: value}
    if isinstance(value, type):
        # Of bases that are no public names themselves, too.
        bases = [each for each in value.__mro__[1:] if each.__module__.startswith("normkit.")]
        hidden = [each for each in bases if each.__name__ not in normkit.__all__]
        for key, member in (pair for owner in (value, *hidden) for pair in vars(owner).items()):
            member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if isinstance(member, FunctionType) and not key.startswith("_"):
                found[f"{name}.{key}"] = member
    return found


PUBLIC = {name: value for top in normkit.__all__ for name, value in described(top, getattr(normkit, top)).items()}


def test_all_is_sorted_and_equals_the_table_and_completion_offers_the_names():
    assert normkit.__all__ == sorted(normkit.__all__)
    assert normkit.__all__ == list(normkit._HOME)
    assert dir(normkit) == sorted([*normkit.__all__, "__version__"])
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", normkit.__version__)
    with pytest.raises(AttributeError, match="module 'normkit' has no attribute 'group_norm'"):
        normkit.group_norm  # noqa: B018


def test_what_a_type_checker_sees_is_the_table():
    source = inspect.getsource(normkit)
    block = source[source.index("if TYPE_CHECKING:") : source.index("# name -> the module")]
    seen = {}
    for module, names in re.findall(r"from (\S+) import ([^\n]+)", block):
        for name in names.split(", "):
            seen[name] = f"normkit.{name}" if module == "normkit" else module
    assert seen == normkit._HOME


def test_every_name_is_documented_and_nothing_else():
    lines = (ROOT / "docs" / "reference" / "api" / "index.md").read_text(encoding="utf-8").splitlines()
    documented = [line.split("`")[1] for line in lines if line.startswith("- `") and "." not in line.split("`")[1]]
    assert sorted(documented) == normkit.__all__


@pytest.mark.parametrize("name", normkit.__all__)
def test_a_name_resolves_to_what_its_home_defines(name):
    value = getattr(normkit, name)
    if isinstance(value, ModuleType):
        assert value.__name__ == normkit._HOME[name]
    else:
        assert value.__module__ == normkit._HOME[name]
        assert value.__name__ == name


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_docstring_of_its_own(name):
    doc = PUBLIC[name].__doc__ or ""
    assert doc.strip()
    assert not doc.startswith(name.split(".")[-1] + "(")


@pytest.mark.parametrize(
    "name", ["layer_norm", "rms_norm", "normalize", "identify", "identify_rows", "inspect", "explore"]
)
def test_a_public_function_says_what_it_takes_gives_and_refuses(name):
    doc = inspect.getdoc(PUBLIC[name])
    for section in ("Args:", "Returns:", "Raises:", "Example:"):
        assert f"\n{section}\n" in doc


def test_signatures_are_the_ones_written_here():
    actual = [f"{name}{signature(value)}" for name, value in sorted(PUBLIC.items())]
    assert actual == SIGNATURES
