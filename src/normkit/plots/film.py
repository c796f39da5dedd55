"""The film of `normkit figures --film`: what norms do to points, in one minute with captions, from fixed data."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from normkit.plots.storyboard import CHAPTERS, Shot, storyboard
from normkit.show import animation, theme
from normkit.show.scene import GROUPS

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

SIZE = (1280, 720)
"""Dots across and down of the MP4."""

GIF_SIZE = (960, 540)

RATE, GIF_STEP = 20, 2
"""Frames of the MP4 in a second, and how many of them are one frame of the GIF."""

_FADE = 6


def film(scheme: theme.Scheme, told: Callable[[str, int, int], None], *, has_mp4: bool) -> tuple[bytes, bytes | None]:
    """The film as a GIF and as an MP4; the same bytes from the same version of normkit, Matplotlib and ffmpeg.

    Args:
        scheme: Colours on white, or on a dark page.
        told: Called with "frames", how many are drawn, and of how many.
        has_mp4: Whether ffmpeg is there; without it there is a GIF only.
    """
    kept: list[Image] = []
    with theme.style(scheme):

        def pictures() -> Iterator[Image]:
            for place, picture in enumerate(_pictures(told)):
                if place % GIF_STEP == 0:
                    kept.append(picture.resize(GIF_SIZE))
                yield picture

        clip = animation.mp4(pictures(), RATE) if has_mp4 else None
        if not has_mp4:
            deque(pictures(), maxlen=0)
        paper, ink, *colours = (theme.colour(name) for name in ("paper", "ink", *GROUPS))
        return animation.gif(kept, paper, ink, colours, 100 * GIF_STEP // RATE), clip


def poster(scheme: theme.Scheme) -> bytes:
    """The last frame of each chapter, in one PNG of the size of a frame."""
    from PIL import Image

    with theme.style(scheme):
        figure = new_figure()
        shots = storyboard(figure)
        sheet = Image.new("RGB", SIZE)
        for chapter in range(len(CHAPTERS)):
            place = max(place for place, shot in enumerate(shots) if shot.chapter == chapter)
            tile = _frame(figure, shots, place, 1.0, _words(figure, shots, place))
            half = (SIZE[0] // 2, SIZE[1] // 2)
            sheet.paste(tile.resize(half), (half[0] * (chapter % 2), half[1] * (chapter // 2)))
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def new_figure() -> Figure:
    """A figure of the size of a frame, whose letters and dots can be seen at that size."""
    return animation.new_figure(SIZE, 150)


def _pictures(told: Callable[[str, int, int], None]) -> Iterator[Image]:
    """Every frame; where nothing has moved since the last one, that one again."""
    from PIL import Image

    figure = new_figure()
    shots = storyboard(figure)
    counts = [round(shot.seconds * RATE) for shot in shots]
    picture = before = Image.new("RGB", SIZE, theme.colour("paper"))
    for place, (shot, count) in enumerate(zip(shots, counts, strict=True)):
        is_new, before, last = place > 0 and shots[place - 1].chapter != shot.chapter, picture, -1.0
        words = _words(figure, shots, place)
        for frame in range(count):
            told("frames", sum(counts[:place]) + frame, sum(counts))
            way = shot.way(frame / (count - 1))
            if way != last:
                last = way
                picture = _frame(figure, shots, place, way, words)
            # One chapter fades into the next.
            is_fading = is_new and frame < _FADE
            yield Image.blend(before, picture, (frame + 1) / (_FADE + 1)) if is_fading else picture


def _words(figure: Figure, shots: list[Shot], place: int) -> Image:
    write(figure, shots, place)
    return animation.picture_of(figure)


def _frame(figure: Figure, shots: list[Shot], place: int, way: float, words: Image) -> Image:
    """Words and scene share no place: of each dot, that of the two which is not paper."""
    from PIL import ImageChops

    draw(figure, shots, place, way)
    joined = ImageChops.lighter if theme.scheme() == "dark" else ImageChops.darker
    return joined(animation.picture_of(figure), words)


def draw(figure: Figure, shots: list[Shot], place: int, way: float) -> None:
    """The scene of a shot and the line of chapters, without words."""
    from matplotlib.lines import Line2D

    animation.clear(figure)
    shots[place].draw(way)
    ends = _ends(shots)
    for low, high in _spans(shots):
        seen = min(high, max(low, ends[place] + way * (ends[place + 1] - ends[place])))
        for end, name in ((high, "line"), (seen, "accent")):
            look: Any = {"color": theme.colour(name), "linewidth": 2.0, "solid_capstyle": "butt"}
            figure.add_artist(Line2D([low, end], [0.045, 0.045], **look))


def write(figure: Figure, shots: list[Shot], place: int) -> None:
    """The words of a shot alone."""
    animation.clear(figure)
    shot, muted = shots[place], theme.colour("muted")
    put: Any = figure.text
    put(0.035, 0.93, shot.title, fontsize=18, weight="bold", va="center")
    put(0.965, 0.915, shot.formula, fontsize=11.5, ha="right", va="center")
    put(0.035, 0.222, shot.caption, fontsize=14, va="top", linespacing=1.35)
    put(0.035, 0.078, shot.measured, fontsize=9.5, va="center", color=muted)
    for chapter, (name, (low, _)) in enumerate(zip(CHAPTERS, _spans(shots), strict=True)):
        ink = theme.colour("ink") if chapter == shot.chapter else muted
        put(low, 0.022, name, fontsize=8, va="center", color=ink)


def _ends(shots: list[Shot]) -> list[float]:
    """The beginning of each shot and the end of the last, as shares of the width of the figure."""
    ends = np.cumsum([0.0, *(shot.seconds for shot in shots)])
    return [float(end) for end in 0.035 + 0.93 * ends / ends[-1]]


def _spans(shots: list[Shot]) -> list[tuple[float, float]]:
    """The ends of each chapter's line."""
    ends, chapters = _ends(shots), [shot.chapter for shot in shots]
    starts = [chapters.index(chapter) for chapter in range(len(CHAPTERS))]
    return [
        (ends[start], ends[following] - 0.006)
        for start, following in zip(starts, [*starts[1:], len(shots)], strict=True)
    ]
