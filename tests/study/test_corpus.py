import pytest

from normkit.errors import InputError
from normkit.study import corpus


@pytest.fixture(scope="module")
def library():
    return corpus.read()


def test_a_library_is_listed_the_same_twice(tmp_path):
    write_library(tmp_path, count=20)
    first, second = corpus.read(tmp_path), corpus.read(tmp_path)
    assert first == second
    assert first.digest == second.digest


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_library_is_listed_in_order(library):
    names = [file.name for file in library.files]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py"} <= set(names)


@pytest.mark.slow
def test_tests_and_generated_tables_are_left_out(library):
    folders = {part for file in library.files for part in file.name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "encodings", "__pycache__"}


@pytest.mark.slow
def test_held_out_files_are_a_small_part_and_not_in_the_training_text(library):
    held_out = [file for file in library.files if file.held_out]
    # One in twenty by hash: of some 600 files, 30 with a standard deviation of 5.
    assert 0.02 < len(held_out) / len(library.files) < 0.09
    assert len(library.training) + len(library.held_out) == sum(len(file.text) + 1 for file in library.files)
    longest = max(held_out, key=lambda file: len(file.text)).text
    assert longest in library.held_out
    assert longest not in library.training


def test_the_digest_sees_a_changed_byte_and_a_changed_name(tmp_path):
    digests = set()
    for name, text in [("a", b"x = 1\n"), ("a", b"x = 2\n"), ("b", b"x = 1\n")]:
        root = tmp_path / f"{len(digests)}"
        write_library(root, count=20)
        (root / f"{name}.py").write_bytes(text)
        digests.add(corpus.read(root).digest)
    assert len(digests) == 3


def test_other_encodings_and_null_bytes_are_left_out(tmp_path):
    write_library(tmp_path, count=20)
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (tmp_path / "null.py").write_bytes(b"name = '\0'\n")
    assert {"latin.py", "null.py"}.isdisjoint(file.name for file in corpus.read(tmp_path).files)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="found 0 in"):
        corpus.read(tmp_path)


def write_library(root, count):
    """Enough files that the hash of a name holds some out."""
    root.mkdir(exist_ok=True)
    for index in range(count):
        (root / f"source{index}.py").write_text(f"def function{index}():\n    return {index}\n")
