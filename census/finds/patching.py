"""The fix of a report, applied to a copy of the file as installed: the installed file stays as it is."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

REPORTS = Path(__file__).parents[2] / "docs" / "wild" / "reports"


def diff(name: str) -> dict[str, str]:
    """File of the peer -> its hunks, from the block that is marked `diff` in a report."""
    block = re.search(r"^```diff\n(.*?)^```$", (REPORTS / f"{name}.md").read_text(encoding="utf-8"), re.S | re.M)
    assert block is not None, f"{name}.md has no block marked diff"
    return dict(re.findall(r"^--- a/(\S+)\n\+\+\+ b/\S+\n(.*?)(?=^--- a/|\Z)", block[1], re.S | re.M))


def patched(source: str, hunks: str) -> str:
    """A source with its hunks applied; each must be there once."""
    for hunk in re.split(r"^@@.*\n", hunks, flags=re.M)[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] or "\n" for line in lines if not line.startswith("+"))
        after = "".join(line[1:] or "\n" for line in lines if not line.startswith("-"))
        assert source.count(before) == 1, f"{source.count(before)} places of the file have\n{before}"
        source = source.replace(before, after)
    return source


def fixed(name: str, module: ModuleType) -> ModuleType:
    """A module of the peer with the report's fix: a copy in a folder of its own, in its package by another name."""
    path = Path(module.__file__)
    # A repository may keep its packages below src, an installation does not.
    hunks = next(hunks for file, hunks in diff(name).items() if path.as_posix().endswith(file.removeprefix("src/")))
    copy = Path(tempfile.mkdtemp(), f"{path.stem}_fixed.py")
    copy.write_text(patched(path.read_text(encoding="utf-8"), hunks), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_fixed", copy)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[loaded.__name__] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def versions(*distributions: str) -> str:
    """Versions of Python and of distributions, in one line."""
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in distributions)])
