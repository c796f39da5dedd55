"""What normkit raises on bad input, and what a message offers in place of an unknown name.

    NormkitError (ValueError)      everything this package raises because of what it was given
    |-- SpecError                  a NormSpec that contradicts itself, or an unknown convention
    |-- ShapeError (RuntimeError)  sizes do not fit; torch raises RuntimeError here, so this is one too
    |-- DtypeError (RuntimeError)  a dtype that cannot be normalized; RuntimeError for the same reason
    |-- UseError (RuntimeError)    tensors that cannot be used so; RuntimeError for the same reason
    |-- KindError (TypeError)      an argument that is no tensor, number or shape; torch raises TypeError
    |-- IdentificationError        a norm that cannot be called, or a passport that cannot be used
    |-- ModelError                 a model or checkpoint that cannot be loaded or run
    |-- LostRankError              another process of a distributed run has ended
    `-- InputError                 a text, an option or a file that cannot be used

Every message says what was expected, what was given and what to do, on one line.
"""

from __future__ import annotations

from collections.abc import Collection


class NormkitError(ValueError):
    """Base of everything normkit raises on bad input; catch this one."""


class SpecError(NormkitError):
    """A NormSpec contradicts itself, or names a convention that does not exist."""


class ShapeError(NormkitError, RuntimeError):
    """Sizes do not fit together; the message holds both."""


class DtypeError(NormkitError, RuntimeError):
    """A dtype that a norm cannot work in; the message lists what can."""


class UseError(NormkitError, RuntimeError):
    """Tensors cannot be used together, or not in this way: two devices, or `out` where a gradient is wanted."""


class KindError(NormkitError, TypeError):
    """An argument of the wrong Python type: no tensor, no number, no shape."""


class IdentificationError(NormkitError):
    """A norm cannot be called as it must be to identify it, or a passport cannot be used."""


class ModelError(NormkitError):
    """A model or checkpoint could not be read, built or run."""


class LostRankError(NormkitError):
    """Another process of the run has ended before its time: nothing more can be computed, what was finished is kept."""


class InputError(NormkitError):
    """A text, an option or a file that cannot be used."""


def offer(name: str, known: Collection[str], listing: str = "") -> str:
    """The end of a message on an unknown name: at most five of the known ones, the nearest, and how to list them all.

    Args:
        name: What was given; a part of a known name is near to it.
        known: The names there are.
        listing: The command that lists them, or "".

    Example:
        >>> offer("ln1", ["h.0.ln_1", "h.0.ln_2", "wte"])
        'did you mean h.0.ln_1, h.0.ln_2?'
        >>> offer("nope", [f"h.{layer}.ln_1" for layer in range(61)], "normkit identify MODEL")
        'it is none of 61, such as h.0.ln_1, h.1.ln_1, h.2.ln_1; `normkit identify MODEL` lists them'
    """
    # This file is loaded by `normkit --help`, which has 150 ms.
    import re
    from difflib import SequenceMatcher

    asked = name.lower().strip("*")

    def likeness(candidate: str) -> float:
        whole = candidate.lower()
        if len(asked) > 2 and asked in whole:
            return 1.0
        return max(SequenceMatcher(None, asked, part).ratio() for part in (whole, *re.split(r"[\s.:-]+", whole)))

    ranked = sorted(known, key=likeness, reverse=True)
    near = [each for each in ranked[:5] if likeness(each) > 0.5]
    lists = f"`{listing}` lists them" if listing else ""
    if near:
        return f"did you mean {', '.join(near)}? {lists}".rstrip()
    if len(known) <= 5:
        return f"there {'is' if len(known) == 1 else 'are'} {', '.join(known) or 'none'}"
    return f"it is none of {len(known)}, such as {', '.join([*known][:3])}" + (f"; {lists}" if lists else "")
