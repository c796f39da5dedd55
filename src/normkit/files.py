"""Files are written whole or not at all; JSON is written in one spelling and read strictly."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from normkit.errors import InputError
from normkit.text import quoted

# A configuration of transformers has about five levels; recursive readers need a stack frame for each.
_DEEPEST = 100
# transformers writes 10**30 for "no limit"; a float holds numbers of up to 308 digits.
_LONGEST_INTEGER = 100
_SURROGATE = re.compile("[\ud800-\udfff]")
_KINDS: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
}
Kind = TypeVar("Kind")


def json_text(document: Mapping[str, Any]) -> str:
    """The document as indented JSON with a final newline; the same bytes for the same values."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: float) -> float | None:
    """The number, or None if it is NaN or infinite, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def parse_json(content: bytes, *, infinity: bool = False) -> Any:
    """The JSON document in a file that somebody else has written, read strictly.

    Python's own reader accepts more than JSON, which fails later: numbers that are not finite, half a character, a key
    that occurs twice, integers that no float holds, more levels than the stack has.

    Args:
        content: The content of the file.
        infinity: Take `Infinity`, `-Infinity` and `NaN`: transformers 4 wrote them into configurations.

    Raises:
        InputError: If it is not strict JSON in UTF-8; the message is the reason alone, without the name of the file.

    Example:
        >>> parse_json(b'{"eps": 1e-5}')
        {'eps': 1e-05}
        >>> parse_json(b'{"eps": 1e999}')
        Traceback (most recent call last):
        normkit.errors.InputError: it holds the number 1e999
    """
    try:
        document = json.loads(
            content.decode(),
            object_pairs_hook=_unique,
            parse_float=_finite,
            parse_int=_integer,
            parse_constant=float if infinity else _finite,
        )
    except UnicodeDecodeError:
        raise InputError("it is not JSON in UTF-8") from None
    except json.JSONDecodeError as error:
        raise InputError(f"it is not JSON: line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise InputError(f"it is nested more than {_DEEPEST} levels deep") from None
    _check_nested(document)
    return document


def field(document: Mapping[str, Any], name: str, kind: type[Kind], where: str = "") -> Kind:
    """A value of a JSON object that somebody else may have edited; a number may be whole where `kind` is float.

    Args:
        document: The object.
        name: Of the key.
        kind: dict, list, str, int, float or bool.
        where: The place of the object in its document, for the message.

    Raises:
        InputError: If the key is missing or its value is of another kind; the message does not name the file.

    Example:
        >>> field({"calls": 1}, "calls", int)
        1
        >>> field({"calls": True}, "calls", int, "h.0.ln_1")
        Traceback (most recent call last):
        normkit.errors.InputError: "calls" of h.0.ln_1 must be a whole number, got True
    """
    place = f'"{name}" of {where}' if where else f'"{name}"'
    if name not in document:
        raise InputError(f"{place} is missing")
    value = document[name]
    kinds: Any = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or isinstance(value, bool) != (kind is bool):
        raise InputError(f"{place} must be {_KINDS[kind]}, got {quoted(value)}")
    return cast(Kind, value)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InputError(f"it holds the number {quoted(text)[1:-1]}")
    return value


def _integer(text: str) -> int:
    if len(text) > _LONGEST_INTEGER:
        raise InputError(f"it holds an integer of {len(text):,} digits")
    return int(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise InputError(f"it holds the key {quoted(twice)} twice")
    return found


def _check_nested(document: Any) -> None:
    """Refuse deep nesting and half characters, without recursion."""
    level = [document]
    for _ in range(_DEEPEST + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
                raise InputError(f"it holds half a character, in {quoted(value)}")
        if not inner:
            return
        level = inner
    raise InputError(f"it is nested more than {_DEEPEST} levels deep")


def write_text(path: Path, text: str) -> Path:
    """Write a text file in UTF-8 with `write_bytes`.

    Raises:
        InputError: If the folder cannot be made or written to; nothing is left behind.
    """
    return write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes, *, mode: int = 0o666) -> Path:
    """Write a file under a temporary name, flush it to disk, rename it last.

    Args:
        path: Path of the file; missing folders are made.
        content: The whole content.
        mode: Permissions of the file, without those that the umask removes.

    Raises:
        InputError: If the folder cannot be made or written to; nothing is left behind.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose another folder with --out") from None
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private, but a report should be as readable as other files of the user.
        temporary.chmod(mode & ~umask())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror}; choose another folder with --out") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def lock(handle: int) -> bool:
    """Hold an open file or folder until it is closed; False if another process holds it.

    A file system without locks says nothing about other processes, so there it is True.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def umask() -> int:
    """The permissions that the umask of this process removes from new files."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
