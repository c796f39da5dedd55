"""The synthetic inspections of the report's tests: figures are drawn of the same."""

import importlib.util
from pathlib import Path

_SOURCE = Path(__file__).parents[1] / "report" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("synthetic_inspections", _SOURCE)
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)

healthy, faulty, twelve, long, empty = (getattr(_MODULE, n) for n in ("healthy", "faulty", "twelve", "long", "empty"))
