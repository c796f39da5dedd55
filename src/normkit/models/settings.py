"""A configuration as its family reads it: values, what a missing one means, and conditions on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normkit.errors import ModelError
from normkit.models.family import Condition, Family
from normkit.text import quoted


class Settings:
    """A config.json as its family reads it."""

    def __init__(self, family: Family, config: Mapping[str, Any]) -> None:
        self._family, self._config = family, config
        self.architecture = str(config["architectures"][0])

    def require_described(self) -> None:
        """Check that the family's file describes this checkpoint.

        Raises:
            ModelError: If the class is another, or a setting is not as the file requires.
        """
        family = self._family
        if self.architecture not in family.classes:
            raise ModelError(
                f"expected one of the classes {', '.join(family.classes)}, which models/{family.model_type}.toml "
                f"describes, got {quoted(self.architecture)}; give a checkpoint of one of them"
            )
        for key, wanted in family.requires.items():
            if not _matches(self.value(key), wanted):
                raise ModelError(
                    f"expected {key} = {_shown(wanted)} in a {family.model_type} model, the only variant that "
                    f"models/{family.model_type}.toml describes, got {_shown(self.value(key))}; nothing is folded"
                )

    def value(self, key: str) -> Any:
        """The value of a key, or its default."""
        key = self.path(key)
        found = self._stored(key)
        return self._family.config.default.get(key) if found is None else found

    def path(self, key: str) -> str:
        """The key of config.json that decides its value: the key itself, or the one that it stands for if missing."""
        default = self._family.config.default.get(key)
        is_other = isinstance(default, str) and default.startswith("=") and self._stored(key) is None
        return self.path(str(default)[1:]) if is_other else key

    def _stored(self, key: str) -> Any:
        found: Any = self._config
        for name in key.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def holds(self, condition: Condition) -> bool:
        """Whether every key has its value."""
        return all(_matches(self.value(key), wanted) for key, wanted in condition.items())

    def flag(self, value: bool | str) -> bool:
        """The value itself, or the truth of the key that it names."""
        return bool(self.value(value)) if isinstance(value, str) else value

    def eps(self, value: str | float) -> float | None:
        """A norm's own eps, or the family's.

        Raises:
            ModelError: If the value is not a number.
        """
        key = value or self._family.config.eps
        if isinstance(key, float | int):
            return float(key)
        found = self.value(key) if key else None
        if found is not None and (isinstance(found, bool) or not isinstance(found, float | int)):
            raise ModelError(f"expected a number as {key} in config.json, got {quoted(found)}; correct it")
        return None if found is None else float(found)

    def number(self, key: str, *, otherwise: int | None = None) -> int:
        """A key that holds a whole number.

        Raises:
            ModelError: If it does not, and there is no `otherwise`.
        """
        found = self.value(key) if key else None
        if found is None and otherwise is not None:
            return otherwise
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise ModelError(f"expected a whole number as {key} in config.json, got {quoted(found)}; correct it")
        return found

    def count(self, placeholder: str) -> int:
        """How often a placeholder repeats: a whole number, or the length of a list."""
        keys = self._family.repeat[placeholder]
        found = next((key for key in keys if self.value(key) is not None), keys[0])
        listed = self.value(found)
        return len(listed) if isinstance(listed, list) else self.number(found)

    def counts(self) -> dict[str, int]:
        """How often each placeholder repeats whose key is set."""
        words = self._family.repeat
        return {word: self.count(word) for word in words if any(self.value(key) is not None for key in words[word])}


def _matches(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple | list):
        return any(_matches(value, choice) for choice in wanted)
    return bool(value) is wanted if isinstance(wanted, bool) else value == wanted


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return " or ".join(_shown(choice) for choice in value)
    return str(value).lower() if isinstance(value, bool) or value is None else quoted(value)
