"""Pages of inspections, each drawn once for all tests that only read or open it."""

from __future__ import annotations

import functools

from normkit.inspection.report import description as page
from normkit.inspection.result import Inspection


@functools.cache
def rendered(inspection: Inspection) -> str:
    """The page of an inspection; equal inspections share it."""
    return page.render(inspection)
