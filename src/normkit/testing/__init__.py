"""A conformance test for normalization layers, for other people's test suites.

violation.py        the checks by name; Violation; ConformanceError
norm_under_test.py  the norm that was given, and copies of it in one dtype, with parameters of known values
agreement.py        output, variance, casts and dtype against the spec
causes.py           the convention that differs, in place of its symptoms
conduct.py          input, layout, rows, batch, NaN, constant rows
derivatives.py      gradients
conformance.py      `assert_conforms`, `violations`: all of it, in order
"""

from normkit.testing.conformance import assert_conforms, violations
from normkit.testing.violation import ConformanceError, Violation

__all__ = ["ConformanceError", "Violation", "assert_conforms", "violations"]
