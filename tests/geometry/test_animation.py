import shutil
import subprocess
import sys

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import layer_norm, rms_norm

from normkit import NormSpec, specs
from normkit.errors import InputError, ShapeError
from normkit.geometry import animation
from normkit.geometry.animation import SIZE, Film, course_of, write_animation
from normkit.geometry.space_figures import upright
from normkit.show import theme
from normkit.show.animation import Moment, picture_of, timeline
from normkit.show.scene import Camera

GAIN, BIAS = torch.tensor([1.3, 0.6, 1.0]).double(), torch.tensor([0.3, 0.1, 0.9]).double()
SPEC, RMS = NormSpec(eps=1e-3), specs.LLAMA.replace(eps=1e-3)
X = torch.randn(14, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.4
GROUPS = [k % 3 for k in range(14)]
KNOWN = {"spec": SPEC, "weight": GAIN, "bias": BIAS}


def test_the_stages_are_what_torch_computes():
    course = course_of(X, None, SPEC, GAIN, BIAS)
    expected = {
        "Raw": X,
        "Centre": X - X.mean(-1, keepdim=True),
        "Scale": layer_norm(X, (3,), eps=1e-3),
        "Gain": layer_norm(X, (3,), GAIN, None, 1e-3),
        "Bias": layer_norm(X, (3,), GAIN, BIAS, 1e-3),
    }
    assert [stage.name for stage in course.stages] == list(expected)
    for stage, rows in zip(course.stages, expected.values(), strict=True):
        assert stage.points @ upright().numpy().T == pytest.approx(rows.numpy(), abs=1e-13)
    assert "norm = √3 · shrink" in course.stages[2].holds
    formulas = [stage.formula for stage in course.stages]
    assert "0.001" in formulas[2]
    assert "w" not in formulas[2]
    assert r"w \odot" in formulas[3]
    assert ["+ b" in formula for formula in formulas[3:]] == [False, True]

    course = course_of(X, None, RMS, GAIN, None)
    assert [stage.name for stage in course.stages] == ["Raw", "Scale", "Gain"]
    scaled = course.stages[-1].points @ upright().numpy().T
    assert scaled == pytest.approx(rms_norm(X, (3,), GAIN, 1e-3).numpy(), abs=1e-13)
    assert not course.is_centred
    assert not any(stage.is_flat for stage in course.stages)


def test_gain_and_bias_can_be_left_out_and_an_offset_counts_to_the_gain():
    assert [stage.name for stage in course_of(X, None, SPEC, None, None).stages] == ["Raw", "Centre", "Scale"]
    only_bias = course_of(X, None, SPEC, None, BIAS).stages[-1]
    assert (only_bias.name, only_bias.gain.tolist()) == ("Bias", [1.0, 1.0, 1.0])
    assert course_of(X, None, specs.GEMMA, GAIN, None).stages[-1].gain == pytest.approx(1 + GAIN.numpy())


def test_invariants_hold_and_are_said_with_the_defect():
    stages = {stage.name: stage for stage in course_of(X, None, SPEC.replace(eps=0.0), GAIN, BIAS).stages}
    assert stages["Raw"].holds.startswith("|x|² = 3 mean² + 3 variance   (defect at most ")
    assert stages["Scale"].holds.startswith("direction unchanged,  norm = √3,  mean = 0   (defect")
    assert stages["Bias"].holds.startswith("|(y - b) / g| = √3,  sum((y - b) / g) = 0   (defect")
    for stage in stages.values():
        # A few units in the last place: rows of three numbers.
        assert float(stage.holds.split("at most ")[1].removesuffix(")")) < 2e-15
    lost = course_of([[2.0, 2.0, 2.0], [1.0, 2.0, 4.0]], None, SPEC.replace(eps=0.0), None, None).stages[2]
    assert lost.holds.endswith("1 of 2 points: 0/0")
    assert np.isnan(lost.points).any(1).tolist() == [True, False]


@pytest.mark.parametrize(
    ("spec", "words"),
    [(SPEC, "a circle of radius √3"), (RMS, "the whole sphere of radius √3"), (SPEC.replace(correction=1), "√2")],
)
def test_the_surface_is_named(spec, words):
    course = course_of(X, None, spec, None, None)
    assert words in course.stages[-1].shape
    assert course.radius == pytest.approx({"√3": 3, "√2": 2}[words[-2:]] ** 0.5)


def test_more_groups_than_colours_use_colours_again():
    assert course_of(X[:5], [0, 1, 2, 3, 7], SPEC, None, None).groups == [0, 1, 2, 0, 1]


def test_points_and_norms_that_cannot_be_shown_are_refused_in_one_line():
    cases = [
        ((X[:, :2], None, SPEC, None, None), ShapeError, r"shape \(N, 3\) are needed, got \(14, 2\)"),
        ((X, None, SPEC, GAIN[:2], None), ShapeError, "a parameter for 3 features"),
        ((X[:0], None, SPEC, None, None), InputError, "at least 1 point"),
        ((X * torch.inf, None, SPEC, None, None), InputError, "finite ones"),
        ((X, [0, 1], SPEC, None, None), InputError, "a group for each of its 14 points, got 2"),
        ((X, None, SPEC.replace(centre_numerator=False), None, None), InputError, "a LayerNorm or an RMSNorm"),
        ((X, None, SPEC.replace(weight_placement="before"), None, None), InputError, "with its gain last"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message) as caught:
            course_of(*arguments)
        assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def layer():
    with theme.style():
        yield Film(course_of(X, [0] * 7 + [1] * 7, SPEC, GAIN, BIAS))


@pytest.fixture(scope="module")
def rms():
    with theme.style():
        yield Film(course_of(X, None, RMS, GAIN, None))


def at_rest(stage):
    return Moment(stage, stage, 1.0, 1.0, 0.25)


def picture(film, moment):
    film.draw(moment)
    return picture_of(film.figure)


def words(film):
    return [text.get_text() for text in film.figure.texts]


def dots(film):
    """Places of the points of the cloud, in one order."""
    places = np.concatenate([part.get_offsets().data for part in film._ax.collections if part.get_label() == "points"])
    return places[np.lexsort(places.round(9).T)]


def corner(image):
    return "#{:02x}{:02x}{:02x}".format(*image.convert("RGB").getpixel((1, 1)))


@pytest.mark.slow
def test_at_rest_the_points_words_and_surfaces_are_those_of_the_stage(layer, rms):
    surfaces = []
    for place, stage in enumerate(layer._course.stages):
        layer.draw(at_rest(place))
        expected = Camera(animation._AZIMUTH + animation._SWAY, animation._ELEVATION).paper(stage.points)
        assert dots(layer) == pytest.approx(expected[np.lexsort(expected.round(9).T)], abs=1e-12)
        assert {stage.name, stage.formula, stage.holds} <= set(words(layer))
        surfaces.append((sheets(layer), len(layer._ax.patches)))
    # A sheet is three polygons, the ball one.
    assert surfaces == [(0, 0), (3, 3), (3, 4), (3, 4), (3, 4)]
    rms.draw(at_rest(1))
    assert (sheets(rms), len(rms._ax.patches)) == (0, 1)


def sheets(film):
    return len([patch for patch in film._ax.patches if len(patch.get_xy()) == 5])


@pytest.mark.slow
def test_on_the_way_points_go_straight(layer):
    layer.draw(Moment(1, 2, 0.5, 0.0, 0.0))
    before, after = (layer._course.stages[k].points for k in (1, 2))
    expected = Camera(animation._AZIMUTH, animation._ELEVATION).paper((before + after) / 2)
    assert dots(layer) == pytest.approx(expected[np.lexsort(expected.round(9).T)], abs=1e-12)


@pytest.mark.slow
def test_drawing_leaves_nothing_behind_for_the_next_and_the_camera_comes_back(layer):
    first = picture(layer, at_rest(0))
    assert (first.size, first.mode) == (SIZE, "RGB")
    assert not any(side % 2 for side in SIZE)
    layer.draw(at_rest(4))
    assert picture(layer, at_rest(0)).tobytes() == first.tobytes()
    first, last = (np.asarray(picture(layer, Moment(0, 0, 1.0, 0.0, turn))).astype(int) for turn in (0.0, 1.0))
    # Rounding of the sine moves a few dots by one shade.
    assert np.abs(first - last).max() <= 2


@pytest.mark.slow
def test_the_circle_becomes_an_ellipse_on_which_points_lie_at_eps_0():
    with theme.style():
        film = Film(course_of(X, None, SPEC.replace(eps=0.0), GAIN, BIAS))
        for stage in (2, 3, 4):
            film.draw(at_rest(stage))
            lines = [line for line in film._ax.lines if line.get_linewidth() == 1.6]
            curve = np.concatenate([np.column_stack(line.get_data()) for line in lines])
            curve = curve[np.isfinite(curve).all(1)]
            # Vertices of a polygon of 120 sides: half a side is 0.06 at the longest semi-axis.
            assert np.linalg.norm(dots(film)[:, None] - curve, axis=-1).min(1).max() < 0.06


@pytest.mark.exhaustive
@pytest.mark.slow
def test_everything_stays_within_its_window(layer, rms):
    for film, stages in ((layer, 5), (rms, 3)):
        for moment in timeline(stages, 23):
            film.draw(moment)
            (left, right), (low, high) = film._ax.get_xlim(), film._ax.get_ylim()
            assert ((dots(film) > (left, low)) & (dots(film) < (right, high))).all()
            # One dot to the right is as long as one dot up.
            box = film._ax.get_window_extent()
            assert (right - left) / box.width == pytest.approx((high - low) / box.height)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", [SPEC, RMS, SPEC.replace(eps_placement="clamp", eps=1.25e-5, correction=1)])
def test_words_do_not_overlap_or_leave_the_picture(spec):
    with theme.style():
        film = Film(course_of(X, None, spec, GAIN, BIAS))
        for stage in range(len(film._course.stages)):
            picture(film, at_rest(stage))
            boxes = [text.get_window_extent() for text in film.figure.texts]
            for k, box in enumerate(boxes):
                assert 0 <= box.x0 < box.x1 <= SIZE[0], words(film)[k]
                assert 0 <= box.y0 < box.y1 <= SIZE[1], words(film)[k]
                assert not any(box.overlaps(other) for other in boxes[k + 1 :]), words(film)[k]


@pytest.mark.slow
def test_a_gain_through_zero_and_rows_of_no_direction_are_drawn_on_dark_paper():
    rows = [[2.0, 2.0, 2.0], [0.0, 0.0, 0.0], [1.0, 2.0, 4.0]]
    with theme.style("dark"):
        film = Film(course_of(rows, None, SPEC.replace(eps=0.0), torch.tensor([-1.0, 0.0, 2.0]).double(), BIAS))
        for moment in timeline(5, 11):
            film.draw(moment)
        assert corner(picture_of(film.figure)) == theme.DARK["paper"]
    assert len(dots(film)) == 3


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


@pytest.mark.slow
def test_it_has_its_frames_and_loops(written):
    path, found, told = written
    assert found == path
    assert told == [("frames", k, 10) for k in range(10)]
    with Image.open(path) as image:
        assert (image.n_frames, image.size) == (10, SIZE)
        assert (image.info["loop"], image.info["duration"]) == (0, 200)
    assert [entry.name for entry in path.parent.iterdir()] == ["out.gif"]


@pytest.mark.slow
def test_frames_are_the_drawings_of_their_moments_and_the_last_leads_back_to_the_first(frames):
    with theme.style():
        film = Film(course_of(X, GROUPS, SPEC, GAIN, BIAS))
        for frame in (0, 4, 9):
            gap = np.abs(frames[frame] - np.asarray(picture(film, timeline(5, 10)[frame])).astype(int))
            # The palette has steps of 13 greys and 43 of a colour; where colours mix, somewhat more.
            assert np.percentile(gap, 99) <= 24
            assert gap.mean() < 1.0
    first = np.abs(np.diff(frames + frames[:1], axis=0)).mean((1, 2, 3))
    assert first[-1] < 2 * np.median(first)
    for colour in ("accent", "contrast", "third"):
        wanted = list(bytes.fromhex(theme.LIGHT[colour][1:]))
        assert (frames[0][100:500] == wanted).all(-1).any()


@pytest.mark.slow
def test_a_second_run_writes_the_same_bytes(written, tmp_path):
    again = write_animation(tmp_path / "again.gif", X, GROUPS, **KNOWN, seconds=2.0, frames_per_second=5)
    assert again.read_bytes() == written[0].read_bytes()


@pytest.mark.slow
def test_a_dark_clip_and_one_of_an_rms_norm_that_has_three_stages(tmp_path):
    dark = write_animation(tmp_path / "dark.gif", X, GROUPS, **KNOWN, scheme="dark", seconds=1.0, frames_per_second=3)
    with Image.open(dark) as image:
        assert corner(image) == theme.DARK["paper"]
    rms = write_animation(
        tmp_path / "rms.gif", X.tolist(), spec=specs.LLAMA, weight=GAIN, seconds=1.0, frames_per_second=3
    )
    with Image.open(rms) as image:
        assert image.n_frames == 3


@pytest.mark.slow
def test_mp4_can_be_read(tmp_path):
    path = write_animation(tmp_path / "out.mp4", X, GROUPS, **KNOWN, seconds=1.0, frames_per_second=4)
    # Its own reader leaves pipes open.
    reading = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    read = subprocess.run(reading, capture_output=True, check=True)
    entering = read.stderr.decode().partition("Stream mapping")[0]
    for fact in ("Video: h264", "yuv420p", "640x580", "4 fps", "Duration: 00:00:01.00"):
        assert fact in entering
    pictures = np.frombuffer(read.stdout, np.uint8).reshape(-1, SIZE[1], SIZE[0], 3).astype(int)
    assert len(pictures) == 4
    with theme.style():
        drawn = picture(Film(course_of(X, GROUPS, SPEC, GAIN, BIAS)), timeline(5, 4)[0])
    # H.264 blurs colours over two dots.
    assert np.abs(pictures[0] - np.asarray(drawn).astype(int)).mean() < 3.0
    assert path.read_bytes().index(b"moov") < path.read_bytes().index(b"mdat")


@pytest.mark.slow
def test_what_cannot_be_made_is_refused_before_anything_is_drawn(tmp_path, monkeypatch):
    def unexpected(*_):
        raise AssertionError("a frame was drawn")

    monkeypatch.setattr(Film, "draw", unexpected)
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


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing(tmp_path):
    def stop(_, done, __):
        if done == 2:
            raise KeyboardInterrupt

    for name in ("out.gif", "out.mp4"):
        with pytest.raises(KeyboardInterrupt):
            write_animation(tmp_path / name, X, GROUPS, **KNOWN, seconds=1.0, frames_per_second=5, progress=stop)
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_as_it_comes_it_is_small_enough_for_a_page(tmp_path):
    """A norm of four stages; one of three has fewer frames."""
    cloud = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    path = write_animation(tmp_path / "out.gif", cloud, [k % 3 for k in range(40)], spec=SPEC, weight=GAIN, bias=BIAS)
    with Image.open(path) as image:
        # 2 seconds a stage, at 12.5 frames a second.
        assert image.n_frames == 125
    assert path.stat().st_size <= 1.5e6
