"""Assertions about norms and models, for other people's test suites.

violation.py        the checks by name; Violation; ConformanceError
norm_under_test.py  the norm that was given, and copies of it in one dtype, with parameters of known values
agreement.py        output, variance, casts and dtype against the spec
causes.py           the convention that differs, in place of its symptoms
conduct.py          input, layout, rows, batch, NaN, constant rows
derivatives.py      gradients
fused.py            norms fused with an addition
conformance.py      `assert_conforms`, `violations`: all of it, in order
batch_invariance.py `assert_batch_invariant`, `bit_changes`: whole models, bit for bit
sameness.py         `assert_same`: a port against its reference
"""

from normkit.testing.batch_invariance import BatchInvarianceError, BitChange, assert_batch_invariant, bit_changes
from normkit.testing.conformance import assert_conforms, violations
from normkit.testing.sameness import DifferenceError, assert_same
from normkit.testing.violation import ConformanceError, Violation

__all__ = [
    "BatchInvarianceError",
    "BitChange",
    "ConformanceError",
    "DifferenceError",
    "Violation",
    "assert_batch_invariant",
    "assert_conforms",
    "assert_same",
    "bit_changes",
    "violations",
]
