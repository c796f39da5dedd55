"""The synthetic inspections, as fixtures."""

from imagined_inspections import *  # noqa: F403
