import json
import os
from contextlib import closing

import pytest

from forks import Fork
from normkit.errors import InputError
from normkit.study.result import Arm
from normkit.study.store import Finished, Store, require_new

ARMS = tuple(Arm(name=name) for name in ("a, b", "a/b", "1e-3", "1e+3", "é!", "..", "x" * 300))
CONFIGURATION = {"study": "s", "settings": {"seeds": 2, "widths": (1, 2)}, "where": {"torch": "2"}}


def opened(folder, *, resume=False, **changes):
    return Store(folder, {**CONFIGURATION, **changes}, ARMS, resume=resume)


def refused(folder, *, resume=True, **changes):
    """Why the folder cannot be used, after its own path."""
    with pytest.raises(InputError) as error, closing(opened(folder, resume=resume, **changes)) as store:
        store.finished(range(2))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def folder(tmp_path):
    """Of a study of which one arm is finished."""
    store = opened(tmp_path / "out" / "s")
    store.keep("a, b", 1, Finished({"value": 0.1, "list": [1, 2], "is": True, "none": None}, 2.5))
    store.close()
    return tmp_path / "out" / "s"


def test_what_is_kept_is_read_again_and_a_refused_folder_is_let_go(folder):
    store = opened(folder, resume=True)
    found = store.finished(range(2))
    store.close()
    assert found == {(1, "a, b"): Finished({"value": 0.1, "list": [1, 2], "is": True, "none": None}, 2.5)}
    assert store.finished(range(1)) == {}
    refused(folder, study="t")
    opened(folder, resume=True).close()


def test_the_log_has_a_line_a_finished_arm_and_torn_files_are_removed(folder):
    store = opened(folder, resume=True)
    store.keep("é!", 0, Finished({"é": 1}, 1 / 3))
    store.close()
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert lines == [
        {"study": "s", "arm": "a, b", "seed": 1, "seconds": 2.5, "numbers": {"value": 0.1, "is": True}},
        {"study": "s", "arm": "é!", "seed": 0, "seconds": 0.333, "numbers": {"é": 1}},
    ]
    for torn in (folder / ".results.json.abc", folder / "arms" / ".a-b-0.json.abc"):
        torn.touch()
    (folder / ".kept").touch()
    opened(folder, resume=True).close()
    assert {path.name for path in folder.glob("**/.*")} == {".kept"}


def test_every_arm_has_a_file_of_its_own(tmp_path):
    store = opened(tmp_path / "s")
    for place, arm in enumerate(ARMS):
        store.keep(arm.name, 0, Finished({"place": place}, 0.0))
    store.close()
    found = store.finished(range(1))
    assert [found[0, arm.name].measurement["place"] for arm in ARMS] == list(range(len(ARMS)))
    names = sorted(path.name for path in (tmp_path / "s" / "arms").iterdir())
    assert len(names) == len(ARMS)
    assert {"a-b-0.json", "a-b-2-0.json", "1e-3-0.json", "1e+3-0.json"} <= set(names)
    assert max(map(len, names)) < 100


def test_kept_runs_are_dropped_with_their_arm_only(tmp_path):
    store = opened(tmp_path / "s")
    for seed in (0, 1):
        store.checkpoint_folder("a, b", seed).mkdir(parents=True)
        (store.checkpoint_folder("a, b", seed) / "run.safetensors").touch()
    store.keep("a, b", 0, Finished({}, 0.0))
    assert not store.checkpoint_folder("a, b", 0).exists()
    assert store.checkpoint_folder("a, b", 1).exists()
    store.keep("a, b", 1, Finished({}, 0.0))
    assert not (tmp_path / "s" / "runs").exists()
    store.close()


def test_a_folder_with_results_is_not_begun_anew_and_locked_while_it_is_written(folder):
    expected = f"{folder} holds results already; go on with --resume, or choose another folder with --out"
    assert refused(folder, resume=False) == expected
    with pytest.raises(InputError, match="holds results already"):
        require_new(folder)
    held = opened(folder, resume=True)
    assert refused(folder) == (
        f"another normkit study writes to {folder}; wait for it, or choose another folder with --out"
    )
    held.close()
    opened(folder, resume=True).close()


def test_an_empty_folder_is_new(tmp_path):
    (tmp_path / "s").mkdir()
    # As a process leaves it that was killed while it wrote its first file.
    (tmp_path / "s" / ".configuration.json.x1y2").touch()
    require_new(tmp_path / "s")
    require_new(tmp_path / "none")
    opened(tmp_path / "s").close()
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["configuration.json"]


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"study": "t"}, 'study "s", and this run has "t"'),
        ({"settings": {"seeds": 3, "widths": (1, 2)}}, "settings.seeds 2, and this run has 3"),
        ({"settings": {"seeds": 2, "widths": (1, 3)}}, "settings.widths [1, 2], and this run has [1, 3]"),
        ({"settings": {"seeds": 2}}, "settings.widths [1, 2], and this run has none"),
        ({"where": {"torch": "2", "processes": 2}}, "where.processes none, and this run has 2"),
    ],
)
def test_another_configuration_is_refused_by_its_first_difference(folder, changes, first):
    assert refused(folder, **changes) == (
        f"{folder} was begun with {first}; --resume needs the same, or choose another folder with --out"
    )


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "photo.jpg").touch()
    assert refused(tmp_path) == (
        f"{tmp_path} holds files but no configuration.json: it is not a study's; choose another folder with --out"
    )
    assert refused(tmp_path / "photo.jpg").endswith("File exists; choose another folder with --out")
    assert refused(tmp_path / "photo.jpg" / "s").endswith("Not a directory; choose another folder with --out")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_damaged_files_are_named(folder, content):
    arm = folder / "arms" / "a-b-1.json"
    whole = arm.read_bytes()
    arm.write_bytes(content)
    assert refused(folder).startswith(f"{arm} is damaged: it is no JSON object; delete it, and --resume measures")
    arm.write_bytes(whole)
    (folder / "configuration.json").write_bytes(content)
    assert refused(folder) == (
        f"{folder / 'configuration.json'} is damaged: it is no JSON object; choose another folder with --out"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schema_version": 2}, "should have schema_version 1 and has 2"),
        ({"study": "t"}, "should have study 's' and has 't'"),
        ({"arm": "a/b"}, "should have arm 'a, b' and has 'a/b'"),
        ({"seed": 0}, "should have seed 1 and has 0"),
        ({"measurement": [1]}, "holds no measurement"),
        ({"seconds": "2"}, "holds no measurement"),
    ],
)
def test_a_foreign_arm_is_named(folder, changes, expected):
    arm = folder / "arms" / "a-b-1.json"
    arm.write_text(json.dumps({**json.loads(arm.read_text()), **changes}))
    assert refused(folder) == f"{arm} {expected}; delete it, and --resume measures this arm again"


def test_without_room_an_arm_is_not_kept_and_others_are(folder, monkeypatch):
    def full(_handle):
        raise OSError(28, os.strerror(28))

    store = opened(folder, resume=True)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError) as error:
        store.keep("a/b", 0, Finished({}, 0.0))
    assert str(error.value) == (
        f"cannot write {folder / 'arms' / 'a-b-2-0.json'}: No space left on device; finished arms are kept: make room, "
        "then go on with --resume"
    )
    assert set(store.finished(range(2))) == {(1, "a, b")}
    assert len(list((folder / "arms").iterdir())) == 1
    store.close()


@pytest.mark.slow
def test_without_room_the_log_keeps_whole_lines(folder):
    # The system cuts a write that would make a file longer than a process may.
    program = f"""
import resource, signal, sys
from pathlib import Path
from normkit.errors import InputError
from normkit.study.store import Store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = Store.__new__(Store)
store.folder = Path({str(folder)!r})
size = (store.folder / "log.jsonl").stat().st_size
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, most))
try:
    store._log({{"long": "line"}})
except InputError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    sys.stdout.write(str(error))
"""
    before = (folder / "log.jsonl").read_bytes()
    assert Fork(program).communicate() == (
        f"cannot write {folder / 'log.jsonl'}: No space left on device; finished arms are kept: make room, then go on "
        "with --resume",
        "",
    )
    assert (folder / "log.jsonl").read_bytes() == before
