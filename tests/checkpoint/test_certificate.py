"""The certificate: what it says of a fold, that it says it always alike, and what is done about a hostile one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from folded_checkpoints import Pair, folded, write_certificate
from normkit.checkpoint import Certificate, fold
from normkit.checkpoint.model_folder import CERTIFICATE
from normkit.checkpoint.reader import CheckpointSource, vector
from normkit.errors import InputError, ModelError

ALL = ("gain", "bias", "final", "centre", "rms", "value")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    return folded(tmp_path_factory.mktemp("saved"), operations=ALL, untie=True)


@pytest.mark.slow
def test_it_names_every_file_with_its_hash(pair):
    found = Certificate.read(pair.result)
    for prints, folder in ((found.source, pair.source), (found.result, pair.result)):
        due = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {CERTIFICATE}
        assert prints.keys() == due
        for name, print_ in prints.items():
            content = (folder / name).read_bytes()
            assert (print_.size, print_.sha256) == (len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.slow
def test_it_says_how_each_tensor_follows(pair):
    found = Certificate.read(pair.result)
    with CheckpointSource(pair.result) as result, CheckpointSource(pair.source) as source:
        assert found.tensors.keys() == result.tensors.keys()
        for name, entry in found.tensors.items():
            assert entry["dtype"] == result.tensors[name].dtype
            assert entry.get("source") in source.tensors
            assert ("residual" in entry) == (entry["relation"] == "sum")
            # Rounded once, to float32; means of rounded columns are smaller still.
            assert 0 <= entry.get("residual", 0.0) < 2**-23
    assert {entry["relation"] for entry in found.tensors.values()} == {"product", "sum", "constant"}
    assert found.tensors["lm_head.weight"] == {
        "relation": "product",
        "source": "transformer.wte.weight",
        "dtype": "F32",
        "gain": {"weight": "transformer.ln_f.weight", "offset": 0.0, "kept": found.plan["norms"][-1]["kept"]},
        "gain_axis": 1,
    }


def test_it_tells_the_smallest_gain_that_was_divided_by(pair):
    found = Certificate.read(pair.result).smallest_divisor
    with CheckpointSource(pair.source) as source:
        gain = vector(source, "transformer.ln_f.weight").abs()
    assert (gain == 0).any()
    gain[gain == 0] = torch.inf
    assert found == {
        "weight": "transformer.ln_f.weight",
        "coordinate": int(gain.argmin()),
        "size": float(gain.min()),
    }


def test_nothing_divided_leaves_no_divisor(tmp_path):
    assert Certificate.read(folded(tmp_path, "llama").result).smallest_divisor is None


def test_it_says_what_was_asked_and_what_came_of_it(pair):
    found = Certificate.read(pair.result)
    assert (found.operations, found.untie, found.dtype) == (
        ("gain", "bias", "centre", "rms", "final", "value"),
        True,
        "same",
    )
    assert (found.architecture, found.becomes) == ("GPT2LMHeadModel", "GPT2LMHeadModel")
    assert {norm["becomes_rms"] for norm in found.plan["norms"]} == {True}
    assert found.plan["config"]["tie_word_embeddings"] is False
    assert found.reload == {
        "class_name": "GPT2LMHeadModel",
        "missing": [],
        "unexpected": [],
        "mismatched": [],
        "ran": True,
        "reason": "",
    }


def test_a_class_that_changes_is_named(tmp_path):
    found = Certificate.read(folded(tmp_path, "olmo", operations=ALL, untie=True).result)
    assert (found.architecture, found.becomes) == ("OlmoForCausalLM", "LlamaForCausalLM")


@pytest.mark.slow
def test_the_same_fold_elsewhere_gives_the_same_bytes_which_are_read_as_they_were_written(pair, tmp_path):
    fold(pair.source, tmp_path / "elsewhere" / "again", operations=ALL, untie=True, threads=3)
    content = (pair.result / CERTIFICATE).read_bytes()
    assert (tmp_path / "elsewhere" / "again" / CERTIFICATE).read_bytes() == content
    assert str(pair.source.parent).encode() not in content
    found = Certificate.read(pair.result)
    assert found.text().encode() == (pair.result / CERTIFICATE).read_bytes()
    assert fold(pair.source, pair.result.with_name("same"), operations=ALL, untie=True).text() == found.text()


# Hostile ones.


def refused(folder: Path, content: bytes) -> str:
    """The one line about a certificate."""
    (folder / CERTIFICATE).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        Certificate.read(folder)
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) < 400 + len(str(folder))
    assert CERTIFICATE in said
    return said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is not JSON"),
        (b"{", "it is not JSON"),
        (b"\xff\xfe{}", "it is not JSON"),
        (b"[" * 100_000, "it is nested more than 100 levels deep"),
        (b'{"schema_version": ' + b"1" * 10_000 + b"}", "it holds an integer of 10,000 digits"),
        (b'{"schema_version": NaN}', "it holds the number NaN"),
        (b'{"schema_version": 1e999}', "it holds the number 1e999"),
        (b"[]", "it holds a list"),
        (b"null", "it holds a NoneType"),
        (b"{}", "expected schema_version 1, found None"),
        (b'{"schema_version": 2}', "expected schema_version 1, found 2"),
        (b'{"schema_version": true}', "expected schema_version 1, found True"),
        (b'{"schema_version": 1.0}', "expected schema_version 1, found 1.0"),
        (b'{"schema_version": "\\u001b[31m\\n"}', r"found '\x1b[31m\n'"),
        (b'{"schema_version": 1, "schema_version": 1}', "it holds the key 'schema_version' twice"),
        (b'{"schema_version": 1}', '"asked" is missing'),
    ],
)
def test_what_is_no_certificate_is_one_line(tmp_path, content, said):
    assert said in refused(tmp_path, content)


@pytest.mark.slow
def test_one_that_is_too_long_is_not_read(tmp_path):
    assert "more than 67,108,864 bytes" in refused(tmp_path, b" " * (2**26 + 1))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("asked",), [], '"asked" must be an object, got []'),
        (("asked", "operations"), "gain", "\"operations\" of asked must be a list, got 'gain'"),
        (("asked", "operations"), ["gain", "rm -rf"], "found 'rm -rf'"),
        (("asked", "operations"), [["gain"]], "found ['gain']"),
        (("asked", "untie"), 1, '"untie" of asked must be true or false, got 1'),
        (("asked", "dtype"), "float8", "expected a dtype of same, float32, found 'float8'"),
        (("source",), None, '"source" must be an object, got None'),
        (("source", "files"), [], '"files" of source must be an object'),
        (("source", "architecture"), 3, "two names of classes"),
        (("result", "architecture"), "a\nb", "two names of classes"),
        (("result", "files", "config.json"), None, "expected the size and the SHA-256 of 'config.json'"),
        (("result", "files", "config.json"), {"bytes": -1, "sha256": "0" * 64}, "the size and the SHA-256"),
        (("result", "files", "config.json"), {"bytes": True, "sha256": "0" * 64}, "the size and the SHA-256"),
        (("result", "files", "config.json"), {"bytes": 1, "sha256": "0" * 63}, "the size and the SHA-256"),
        (("plan",), "x" * 10_000, '"plan" must be an object, got \'xxx'),
        (("tensors",), [], '"tensors" must be an object'),
        (("reload",), None, '"reload" must be an object'),
        (("smallest_divisor",), 3, "expected a table or nothing under 'smallest_divisor'"),
        (("normkit",), "1" * 300, "expected a version"),
        (("normkit",), 1, "expected a version"),
    ],
)
def test_wrong_types_are_one_line(pair, tmp_path, path, value, said):
    document: Any = pair.certificate
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert said in refused(tmp_path, json.dumps(document).encode())


@pytest.mark.parametrize(
    "name",
    [
        *("../config.json", "a/../../config.json", "..", ".", "", "/etc/passwd", "a//b", "a/./b", "a/"),
        *("..\\config.json", "C:\\x", "a\0b", "a\nb", "\x1b[31m", "x" * 300),
    ],
)
@pytest.mark.parametrize("side", ["source", "result"])
def test_paths_that_lead_elsewhere_are_one_line(pair, tmp_path, side, name):
    document = pair.certificate
    document[side]["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    assert "which is none beside it" in refused(tmp_path, json.dumps(document).encode())


def test_no_certificate_is_one_line(tmp_path):
    with pytest.raises(InputError, match=rf"found no {CERTIFICATE} in "):
        Certificate.read(tmp_path)
    (tmp_path / CERTIFICATE).mkdir()
    with pytest.raises(InputError, match=rf"found no {CERTIFICATE} in "):
        Certificate.read(tmp_path)


def test_what_is_read_is_written_again(pair, tmp_path):
    found = Certificate.read(pair.result)
    (tmp_path / CERTIFICATE).write_text(found.text())
    assert Certificate.read(tmp_path).text() == found.text()
    write_certificate(tmp_path, pair.certificate)
    assert (tmp_path / CERTIFICATE).read_bytes() == (pair.result / CERTIFICATE).read_bytes()
