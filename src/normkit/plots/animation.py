"""A norm of three features as an animation: raw, centred, scaled, times gain, plus bias."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normkit import files
from normkit.errors import InputError
from normkit.plots import clips, theme
from normkit.plots.film import SIZE, Film
from normkit.plots.scene import GROUPS
from normkit.plots.stages import course_of
from normkit.plots.timeline import Moment, timeline
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from PIL.Image import Image

Progress = Callable[[str, int, int], None]

_SECONDS = 2.0
_LONGEST = 600.0
_RATES: Mapping[clips.Clip, float] = {"gif": 12.5, "mp4": 20.0}


def write_animation(
    path: str | Path,
    points: Any,
    groups: Sequence[int] | None = None,
    *,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scheme: theme.Scheme = "light",
    seconds: float | None = None,
    frames_per_second: float | None = None,
    progress: Progress | None = None,
) -> Path:
    """Draw what a norm does to points of three features, step by step, as a GIF or MP4 that loops.

    The points travel straight from raw to centred (not for RMSNorm) to scaled, times gain, plus bias, with a pause at
    each, while the camera sways; each step has its formula and what holds after it, from `geometry.decompose`.

    Args:
        path: A file .gif or .mp4, written whole or not at all; the same GIF for the same arguments.
        points: Of shape (N, 3), finite; some hundreds can be told apart.
        groups: For each point a whole number, its colour modulo 3; None for one colour.
        spec: A LayerNorm or an RMSNorm over the last axis.
        weight: Gain as stored, of shape (3,); None leaves the step out.
        bias: Of shape (3,); None leaves the step out.
        scheme: Colours on white, or on a dark page.
        seconds: How long it is before it starts again; 2 for each stage unless given.
        frames_per_second: At most 50; 12.5 for a GIF, which counts in hundredths of a second, and 20 for an MP4, unless
            given.
        progress: Called with "frames", how many are drawn, and of how many.

    Returns:
        The path.

    Raises:
        ShapeError: If the points, gain or bias are not of three features.
        InputError: If the file is neither .gif nor .mp4 or cannot be written; if points, groups, norm or times cannot
            be used; if it is an MP4 and ffmpeg is not installed.
    """
    target = Path(path)
    kind = clips.clip_of(target)
    rate = _RATES[kind] if frames_per_second is None else frames_per_second
    if not (0 < rate <= 50):
        raise InputError(f"an animation has more than 0 and at most 50 frames per second, got {rate:g}")
    if seconds is not None and not 0 < seconds <= _LONGEST:
        raise InputError(f"an animation takes more than 0 and at most {_LONGEST:g} seconds, got {seconds:g}")
    if kind == "mp4":
        clips.ffmpeg()
    course = course_of(points, groups, spec, weight, bias)
    hundredths = round(100 / rate)
    length = _SECONDS * len(course.stages) if seconds is None else seconds
    moments = timeline(len(course.stages), max(2, round(length * (100 / hundredths if kind == "gif" else rate))))
    with theme.style(scheme):
        film = Film(course)
        pictures = _told(film, moments, progress)
        if kind == "gif":
            paper, ink, *colours = (theme.colour(name) for name in ("paper", "ink", *GROUPS))
            content = clips.gif(pictures, paper, ink, colours, hundredths)
        else:
            content = clips.mp4(pictures, SIZE, rate)
    return files.write_bytes(target, content)


def _told(film: Film, moments: Sequence[Moment], progress: Progress | None) -> Iterator[Image]:
    for done, moment in enumerate(moments):
        if progress is not None:
            progress("frames", done, len(moments))
        yield film.picture(moment)
