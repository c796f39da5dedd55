"""Encodes a sequence of pictures as the bytes of a GIF or an MP4."""

from __future__ import annotations

import io
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from normkit.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

Clip = Literal["gif", "mp4"]

# Number of shades from the paper to the ink, and to each other colour.
_GREYS, _SHADES = 18, 6
# With these, neither the date nor the build of ffmpeg gets into a file.
_REPEATABLE = ("-threads", "1", "-fflags", "+bitexact", "-flags:v", "+bitexact")


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

    Args:
        pictures: In their order, all of one size.
        paper: The colour of the background, as "#rrggbb".
        ink: The colour of words and lines; they and all greys are kept in fine steps from the paper.
        colours: The others, kept in steps from the paper.
        hundredths: How long each is shown, in hundredths of a second, the unit of the format.
    """
    from PIL import Image

    palette = Image.new("P", (1, 1))
    palette.putpalette(_palette(paper, ink, colours))
    first, *others = (picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures)
    buffer = io.BytesIO()
    first.save(
        buffer, format="GIF", save_all=True, append_images=others, duration=10 * hundredths, loop=0, optimize=False
    )
    return buffer.getvalue()


def mp4(pictures: Iterable[Image], size: tuple[int, int], frames_per_second: float) -> bytes:
    """An MP4 that every browser plays (H.264, 4:2:0), with its index at the front.

    Args:
        pictures: In their order, all of this size.
        size: Width and height, even numbers.
        frames_per_second: How many are shown in a second.

    Raises:
        InputError: If there is no ffmpeg, or it refuses.
    """
    width, height = size
    entering = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{frames_per_second:g}")
    leaving = ("-an", "-c:v", "libx264", "-crf", "20", "-preset", "medium", "-pix_fmt", "yuv420p")
    program = ffmpeg()
    with tempfile.TemporaryDirectory() as folder:
        # ffmpeg can move the index to the front of a file, but not of a pipe.
        target, messages = Path(folder) / "clip.mp4", Path(folder) / "messages"
        command = [program, "-v", "error", *entering, "-i", "-", *leaving, *_REPEATABLE]
        with messages.open("wb") as errors:
            process = subprocess.Popen(
                [*command, "-movflags", "+faststart", str(target)], stdin=subprocess.PIPE, stderr=errors
            )
            try:
                _feed(process, pictures)
            finally:
                process.wait()
        if process.returncode:
            said = messages.read_text(errors="replace").strip().splitlines() or [f"it ended with {process.returncode}"]
            raise InputError(f"ffmpeg ({program}) could not write MP4: {said[-1]}; name the file .gif")
        return target.read_bytes()


def _feed(process: subprocess.Popen[bytes], pictures: Iterable[Image]) -> None:
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            for picture in pictures:
                pipe.write(picture.tobytes())
    except BrokenPipeError:
        # ffmpeg ended early; its own message says why.
        return


def _palette(paper: str, ink: str, colours: Sequence[str]) -> list[int]:
    """Red, green and blue of each entry: the shades between the paper and every colour."""
    shades = [(ink, step / _GREYS) for step in range(_GREYS + 1)]
    shades += [(colour, step / _SHADES) for colour in colours for step in range(1, _SHADES + 1)]
    background = _channels(paper)
    return [
        round((1 - share) * under + share * over)
        for colour, share in shades
        for under, over in zip(background, _channels(colour), strict=True)
    ]


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour.removeprefix("#")))
