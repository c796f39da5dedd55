"""The whole catalogue: importing this registers every case."""

import functools

import convnets
import detection
import diffusion
import language
import multimodal
import oddities
import sequences
import small
import speech
import towered
import towers
import watching
from kit import CASES, Case, Subject
from kit import build as build_anew

MODULES = (
    towers,
    convnets,
    detection,
    speech,
    sequences,
    language,
    towered,
    multimodal,
    diffusion,
    small,
    oddities,
    watching,
)


@functools.cache
def build(identifier: str, seed: int) -> Subject:
    """The subject of a case, made once per process."""
    return build_anew(identifier, seed)


def expected(identifier: str, seed: int) -> dict:
    """What is true of a case, said before it runs."""
    made, drawn = CASES[identifier], build_anew(identifier, seed)
    ideal = {
        "clean": "no finding above a note",
        "oddity": "no finding above a note",
        "fault": f"the first finding names the fault and its place: {made.truth}",
        "unseeable": "not checked, or nothing; no norm that is right is blamed",
        "other": "the first finding names the cause or its place in the data; no norm is blamed for it",
    }[made.sort]
    said = {
        "family": made.family,
        "sort": made.sort,
        "how": made.how,
        "truth": made.truth,
        "ideal": made.ideal or ideal,
    }
    said |= {"where": list(drawn.where), "patterns": list(made.say)}
    if made.sort == "clean" and made.how != "watch":
        said |= {"sites": drawn.sites, "batch_norms": drawn.batch_norms, "placement": drawn.placement, "row": drawn.row}
    return said


__all__ = ["CASES", "MODULES", "Case", "Subject", "build", "expected"]
