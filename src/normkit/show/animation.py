"""The moments of an animation that goes from stage to stage, and its frames as the bytes of a GIF or an MP4."""

from __future__ import annotations

import contextlib
import io
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from normkit.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

Clip = Literal["gif", "mp4"]

# Shares of the time: the first stage, each way, each rest, and the way back.
_FIRST, _WAY, _REST, _BACK = 0.9, 1.15, 1.0, 1.0
# Number of shades from the paper to the ink, and to each other colour.
_GREYS, _SHADES = 18, 6
# With the last six, neither the date nor the build of ffmpeg gets into a file.
_ENCODING = (
    *("-an", "-crf", "20", "-preset", "medium", "-pix_fmt", "yuv420p", "-movflags", "+faststart"),
    *("-threads", "1", "-fflags", "+bitexact", "-flags:v", "+bitexact"),
)


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
    parts = [(0, 0, 0.0, _FIRST)]
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


def clip_of(path: Path) -> Clip:
    """The format that the name of a file asks for.

    Raises:
        InputError: If it is neither .gif nor .mp4.
    """
    match path.suffix.lower():
        case ".gif":
            return "gif"
        case ".mp4":
            return "mp4"
        case _:
            raise InputError(f"an animation is a file .gif or .mp4, got {path.name!r}; give it one of these endings")


def ffmpeg() -> str:
    """Path of ffmpeg: the system's, else that of imageio-ffmpeg.

    Raises:
        InputError: If there is neither.
    """
    if found := shutil.which("ffmpeg"):
        return found
    try:
        from imageio_ffmpeg import get_ffmpeg_exe

        return str(get_ffmpeg_exe())
    except (ImportError, RuntimeError):
        raise InputError(
            'MP4 needs ffmpeg, which is not installed: pip install "normkit[video]", or name the file .gif'
        ) from None


def gif(pictures: Iterable[Image], paper: str, ink: str, colours: Sequence[str], hundredths: int) -> bytes:
    """A GIF that plays for ever; equal bytes for equal pictures.

    Its one palette goes in fine steps from the paper to each colour: with Matplotlib's own writer, which gives each
    frame a palette, the file is larger and its colours change from frame to frame.

    Args:
        pictures: In their order, all of one size.
        paper: The colour of the background, as "#rrggbb".
        ink: The colour of words and lines; they and all greys are kept in fine steps from the paper.
        colours: The others, kept in steps from the paper.
        hundredths: How long each is shown, in hundredths of a second, the unit of the format.
    """
    from PIL import Image

    shades = [(ink, step / _GREYS) for step in range(_GREYS + 1)]
    shades += [(colour, step / _SHADES) for colour in colours for step in range(1, _SHADES + 1)]
    palette = Image.new("P", (1, 1))
    palette.putpalette(
        [
            round((1 - share) * under + share * over)
            for colour, share in shades
            for under, over in zip(bytes.fromhex(paper[1:]), bytes.fromhex(colour[1:]), strict=True)
        ]
    )
    first, *others = (picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures)
    buffer = io.BytesIO()
    first.save(
        buffer, format="GIF", save_all=True, append_images=others, duration=10 * hundredths, loop=0, optimize=False
    )
    return buffer.getvalue()


def mp4(pictures: Iterable[Image], frames_per_second: float) -> bytes:
    """An MP4 that every browser plays (H.264, 4:2:0), with its index at the front; equal bytes for equal pictures.

    Args:
        pictures: In their order, all of one size, an even number of dots across and down.
        frames_per_second: How many are shown in a second.

    Raises:
        InputError: If there is no ffmpeg, or it refuses.
    """
    program = ffmpeg()
    frames = iter(pictures)
    first = next(frames)
    size = f"{first.width}x{first.height}"
    given = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", f"{frames_per_second:g}", "-i", "-")
    # ffmpeg can move the index to the front of a file, but not of a pipe.
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "said").open("w+b") as said:
        target = Path(folder) / "clip.mp4"
        command = [program, "-loglevel", "error", *given, "-c:v", "libx264", *_ENCODING, str(target)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said) as process:
            try:
                if process.stdin is not None:
                    # It may have ended before it has read everything, and then has said why.
                    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                        for picture in itertools.chain([first], frames):
                            pipe.write(picture.tobytes())
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines() or [f"it ended with {process.returncode}"]
            raise InputError(f"ffmpeg ({program}) could not write MP4: {lines[-1]}; name the file .gif")
        return target.read_bytes()


def new_figure(size: tuple[int, int], dots: int = 100) -> Figure:
    """A figure of so many dots across and down, and so many an inch, with an Agg canvas."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] / dots, size[1] / dots), dpi=dots)
    FigureCanvasAgg(figure)
    return figure


def picture_of(figure: Figure) -> Image:
    """A figure with an Agg canvas as it is now."""
    from PIL import Image

    canvas: Any = figure.canvas
    canvas.draw()
    return Image.fromarray(np.array(canvas.buffer_rgba())[..., :3])


def clear(figure: Figure) -> None:
    """Remove all that was drawn; faster than clearing the axes, which would rebuild ticks and spines."""
    for ax in figure.axes:
        for parts in (ax.lines, ax.patches, ax.collections, ax.texts):
            for part in list(parts):
                part.remove()
    for part in [*figure.texts, *figure.artists]:
        part.remove()
