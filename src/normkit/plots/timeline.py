"""The timing of an animation: frames from stage to stage, slow at both ends, with a rest at each stage."""

from __future__ import annotations

from dataclasses import dataclass

# Shares of the time: the first look, each way, each rest, and the way back.
_LOOK, _WAY, _REST, _BACK = 0.9, 1.15, 1.0, 1.0


@dataclass(frozen=True)
class Moment:
    """One frame: between two stages, or at rest at the second."""

    before: int
    """Index of the stage that the frame leaves."""
    after: int
    """Index of the stage that the frame goes to; 0 on the way back."""
    way: float
    """Eased position between the two stages, from 0 to 1."""
    rest: float
    """Share of the rest that is over, from 0 to 1."""
    turn: float
    """Share of the whole animation that is over, from 0 to 1."""

    def between(self, before: float, after: float) -> float:
        """A value on the way from one stage's to the other's."""
        return (1.0 - self.way) * before + self.way * after

    def opacity(self, before: bool, after: bool) -> float:
        """The opacity of an element that only some stages show: it appears and disappears early on the way."""
        early = min(1.0, 1.7 * self.way)
        return (1.0 - early) * before + early * after


def timeline(stages: int, frames: int) -> list[Moment]:
    """A look at the first stage, each way with a rest after it, and the way back: so many moments, evenly spaced.

    The first is at rest, and the first would follow on the last.
    """
    parts = [(0, 0, 0.0, _LOOK)]
    parts += [(after - 1, after, _WAY, _REST) for after in range(1, stages)]
    parts += [(stages - 1, 0, _BACK, 0.0)]
    whole = sum(way + rest for _, _, way, rest in parts)
    moments = []
    for frame in range(frames):
        place = whole * frame / frames
        part = 0
        while part < len(parts) - 1 and place >= sum(parts[part][2:]):
            place -= sum(parts[part][2:])
            part += 1
        before, after, way, rest = parts[part]
        done = min(1.0, place / way) if way else 1.0
        rested = max(0.0, place - way) / rest if rest else 0.0
        moments.append(Moment(before, after, eased(done), rested, frame / frames))
    return moments


def eased(way: float) -> float:
    """Slow at both ends: 0, 1/2 and 1 stay where they are, and the speed there is 0, 15/8 and 0."""
    return way**3 * (10.0 - 15.0 * way + 6.0 * way**2)
