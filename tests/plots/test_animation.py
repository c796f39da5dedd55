import shutil
import subprocess
import sys

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image

from normkit import NormSpec, specs
from normkit.errors import InputError
from normkit.plots import theme
from normkit.plots.animation import write_animation
from normkit.plots.film import SIZE, Film
from normkit.plots.stages import course_of
from normkit.plots.timeline import timeline

# Draws whole clips; the parts they are made of have quick tests.
pytestmark = pytest.mark.slow

GAIN, BIAS = torch.tensor([1.3, 0.6, 1.0]).double(), torch.tensor([0.3, 0.1, 0.9]).double()
SPEC = NormSpec()
X = np.random.default_rng(0).normal(size=(12, 3)) + 0.4
GROUPS = [k % 3 for k in range(12)]
KNOWN = {"spec": SPEC, "weight": GAIN, "bias": BIAS}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("animation") / "new folder" / "out.gif"
    told = []
    found = write_animation(
        path, X, GROUPS, **KNOWN, seconds=2.0, frames_per_second=5, progress=lambda *said: told.append(said)
    )
    return path, found, told


@pytest.fixture(scope="module")
def frames(written):
    with Image.open(written[0]) as image:
        shown = []
        for k in range(image.n_frames):
            image.seek(k)
            shown.append(np.asarray(image.convert("RGB")).astype(int))
    return shown


def test_it_has_its_frames_and_loops(written):
    path, found, _ = written
    assert found == path
    with Image.open(path) as image:
        assert (image.n_frames, image.size) == (10, SIZE)
        assert (image.info["loop"], image.info["duration"]) == (0, 200)
    assert [entry.name for entry in path.parent.iterdir()] == ["out.gif"]


def test_progress_counts_the_frames(written):
    assert written[2] == [("frames", k, 10) for k in range(10)]


@pytest.mark.parametrize("frame", [0, 4, 9])
def test_a_frame_of_the_file_is_the_drawing_of_its_moment(frames, frame):
    with theme.style():
        drawn = Film(course_of(X, GROUPS, SPEC, GAIN, BIAS)).picture(timeline(5, 10)[frame])
    gap = np.abs(frames[frame] - np.asarray(drawn).astype(int))
    # The palette has steps of 13 greys and 43 of a colour; where colours mix, somewhat more.
    assert np.percentile(gap, 99) <= 24
    assert gap.mean() < 1.0


def test_the_first_frame_is_the_raw_cloud_and_the_last_leads_back_to_it(frames):
    first = np.abs(np.diff(frames + frames[:1], axis=0)).mean((1, 2, 3))
    assert first[-1] < 2 * np.median(first)
    for colour in ("accent", "contrast", "third"):
        wanted = list(bytes.fromhex(theme.LIGHT[colour][1:]))
        assert (frames[0][100:500] == wanted).all(-1).any()


def test_a_second_run_writes_the_same_bytes(written, tmp_path):
    again = write_animation(tmp_path / "again.gif", X, GROUPS, **KNOWN, seconds=2.0, frames_per_second=5)
    assert again.read_bytes() == written[0].read_bytes()


def test_other_arguments_write_others(tmp_path):
    dark = write_animation(tmp_path / "dark.gif", X, GROUPS, **KNOWN, scheme="dark", seconds=1.0, frames_per_second=3)
    with Image.open(dark) as image:
        assert "#{:02x}{:02x}{:02x}".format(*image.convert("RGB").getpixel((1, 1))) == theme.DARK["paper"]


def test_an_rms_norm_has_three_stages(tmp_path):
    path = write_animation(
        tmp_path / "rms.gif", X.tolist(), spec=specs.LLAMA, weight=GAIN, seconds=1.0, frames_per_second=3
    )
    with Image.open(path) as image:
        assert image.n_frames == 3


def test_mp4_can_be_read(tmp_path):
    path = write_animation(tmp_path / "out.mp4", X, GROUPS, **KNOWN, seconds=1.0, frames_per_second=8)
    # Its own reader leaves pipes open.
    reading = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    read = subprocess.run(reading, capture_output=True, check=True)
    entering = read.stderr.decode().partition("Stream mapping")[0]
    for fact in ("Video: h264", "yuv420p", "640x580", "8 fps", "Duration: 00:00:01.00"):
        assert fact in entering
    pictures = np.frombuffer(read.stdout, np.uint8).reshape(-1, SIZE[1], SIZE[0], 3).astype(int)
    assert len(pictures) == 8
    with theme.style():
        drawn = Film(course_of(X, GROUPS, SPEC, GAIN, BIAS)).picture(timeline(5, 8)[0])
    # H.264 blurs colours over two dots.
    assert np.abs(pictures[0] - np.asarray(drawn).astype(int)).mean() < 3.0
    assert path.read_bytes().index(b"moov") < path.read_bytes().index(b"mdat")


def test_what_cannot_be_made_is_refused_before_anything_is_drawn(tmp_path, monkeypatch):
    def unexpected(*_):
        raise AssertionError("a frame was drawn")

    monkeypatch.setattr(Film, "picture", unexpected)
    for name, options, message in (
        ("out.webm", {}, r"a file \.gif or \.mp4, got 'out\.webm'"),
        ("out.gif", {"seconds": 0.0}, "more than 0 and at most 600 seconds, got 0"),
        ("out.gif", {"seconds": float("inf")}, "at most 600 seconds, got inf"),
        ("out.gif", {"seconds": float("nan")}, "got nan"),
        ("out.gif", {"frames_per_second": 60}, "at most 50 frames per second, got 60"),
        ("out.gif", {"frames_per_second": 0}, "got 0"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            write_animation(tmp_path / name, X, GROUPS, **KNOWN, **options)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(InputError, match=r"normkit\[video\]"):
        write_animation(tmp_path / "out.mp4", X, GROUPS, **KNOWN)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_leaves_nothing(tmp_path):
    def stop(_, done, __):
        if done == 2:
            raise KeyboardInterrupt

    for name in ("out.gif", "out.mp4"):
        with pytest.raises(KeyboardInterrupt):
            write_animation(tmp_path / name, X, GROUPS, **KNOWN, seconds=1.0, frames_per_second=5, progress=stop)
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_as_it_comes_it_is_small_enough_for_a_page(tmp_path):
    """A norm of four stages; one of three has fewer frames."""
    cloud = np.random.default_rng(1).normal(size=(40, 3))
    path = write_animation(tmp_path / "out.gif", cloud, [k % 3 for k in range(40)], spec=SPEC, weight=GAIN, bias=BIAS)
    with Image.open(path) as image:
        # 2 seconds a stage, at 12.5 frames a second.
        assert image.n_frames == 125
    assert path.stat().st_size <= 1.5e6
