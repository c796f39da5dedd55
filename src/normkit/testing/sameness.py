"""`assert_same`: a port computes what its reference computes, to the reference's own rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normkit.comparison.differences import Comparison


class DifferenceError(AssertionError):
    """A port differs from its reference by more than rounding, or it cannot be decided whether it does."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__(comparison)
        self.comparison = comparison
        """All that was found, level by level."""

    def __str__(self) -> str:
        """The differences and their places, then the place of the first difference of the two runs."""
        from normkit.comparison.report import describe_comparison

        section = describe_comparison(self.comparison)
        verdict = section.verdict
        lines = [f"{section.title}: {verdict.headline if verdict else ''}", verdict.detail if verdict else ""]
        return "\n  ".join([*lines, *section.notes])


def assert_same(port: Any, reference: Any, batch: Any = None, *, shape: Any = None, dtype: str = "auto") -> None:
    """Assert that a port is the same as its reference: stored gains, conventions of norms, and rows of a run.

    What differs by no more than the reference's own rounding passes: its batch of one against its batch of two, and in
    16 bits its own run in float32. A convention that differs fails also where no row feels it, such as another eps; so
    does what stays undecided, such as a gain that is the reference's + 1 in a runtime that is not known.

    Args:
        port: As `compare` takes it: a module, a folder, a file, a recording, ...
        reference: Likewise.
        batch: What models run on; by default the start of a text that ships, or the tokens of a recording.
        shape: Of an input of the two, if they are single norms.
        dtype: In which models from folders are loaded.

    Raises:
        DifferenceError: If they differ, or it is undecided; `.comparison` has all of it.
        InputError: If there is nothing that can be compared.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> stock = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        >>> port = nn.Sequential(stock[0], nn.LayerNorm(8, eps=1e-3))
        >>> assert_same(stock, stock, torch.randn(16, 4))
        >>> assert_same(port, stock, torch.randn(16, 4))
        Traceback (most recent call last):
        normkit.testing.sameness.DifferenceError: port compared with reference: different
          1 has eps 0.001 instead of 1e-05...
    """
    __tracebackhide__ = True
    from normkit.comparison.comparing import compare

    found = compare(port, reference, batch, shape=shape, dtype=dtype)
    if found.verdict != "the same":
        raise DifferenceError(found)
