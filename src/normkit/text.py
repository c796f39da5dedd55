"""Words that several modules put into messages."""

from __future__ import annotations

from collections.abc import Collection


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
    # Commands load this file for `--help`, which has 150 ms.
    import re
    from difflib import SequenceMatcher

    asked = name.lower().strip("*")

    def likeness(candidate: str) -> float:
        whole = candidate.lower()
        if len(asked) > 2 and asked in whole:
            return 1.0
        return max(SequenceMatcher(None, asked, part).ratio() for part in (whole, *re.split(r"[\s.:-]+", whole)))

    ranked = sorted(((likeness(each), each) for each in known), key=lambda pair: pair[0], reverse=True)
    near = [each for like, each in ranked[:5] if like > 0.5]
    lists = f"`{listing}` lists them" if listing else ""
    if near:
        return f"did you mean {', '.join(near)}? {lists}".rstrip()
    if len(known) <= 5:
        return f"there {'is' if len(known) == 1 else 'are'} {', '.join(known) or 'none'}"
    return f"it is none of {len(known)}, such as {', '.join([*known][:3])}" + (f"; {lists}" if lists else "")
