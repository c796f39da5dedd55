"""`verify`: what was folded is proved, and nothing else; what is tampered with is named, forged certificates too."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from folded_checkpoints import Pair, check, failed, flipped, folded, forge, tensors, without_english
from normkit import demo
from normkit.checkpoint import build_model, fold, verify
from normkit.checkpoint.model_folder import CERTIFICATE, INDEX
from normkit.checkpoint.verification import Checked, Verification, difference, judged
from normkit.errors import InputError, NormkitError
from tiny_models import tiny

ALL = ("gain", "bias", "final", "centre", "rms", "value")

# Of each relation several tensors: matrices of experts and of heads, tables, gains, biases.
TAMPERED = {
    "identical": ("transformer.wte.weight", "transformer.wpe.weight", "transformer.h.1.mlp.c_proj.weight"),
    "product": ("transformer.h.0.attn.c_attn.weight", "transformer.h.1.mlp.c_fc.weight", "lm_head.weight"),
    "sum": ("transformer.h.0.attn.c_attn.bias", "transformer.h.1.mlp.c_fc.bias"),
    "constant": ("transformer.h.0.ln_1.weight", "transformer.h.1.ln_2.bias", "transformer.ln_f.weight"),
}


# What is right passes.


@pytest.mark.slow
def test_every_kind_of_tensor_is_counted_and_proved_by_any_number_of_threads(saved, centred):
    found = verify(saved.source, saved.result, threads=2)
    assert failed(found) == {}
    assert (found.source, found.result) == ("GPT2LMHeadModel", "GPT2LMHeadModel")
    relations = [entry["relation"] for entry in saved.certificate["tensors"].values()]
    for relation in TAMPERED:
        assert check(found, relation).what.startswith(f"{relations.count(relation)} tensors, ")
    assert check(found, "plan").what.endswith("5 of 5 norms folded")
    assert check(found, "reload").passed
    assert sum(file.suffix == ".safetensors" for file in saved.result.iterdir()) > 2
    what = check(verify(centred.source, centred.result), "plan").what
    assert what.endswith("5 of 5 norms folded, 5 made RMSNorms, 6 writers centred")
    assert (
        verify(centred.source, centred.result).to_json() == verify(centred.source, centred.result, threads=3).to_json()
    )


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "olmo", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_families_and_dtypes_are_proved(family, dtype, tmp_path):
    pair = folded(tmp_path, family, dtype, operations=ALL, untie=True)
    assert failed(verify(pair.source, pair.result)) == {}


@pytest.mark.slow
def test_what_was_widened_is_proved(tmp_path):
    pair = folded(tmp_path, dtype=torch.bfloat16, operations=ALL, untie=True, dtype_of_result="float32")
    found = verify(pair.source, pair.result)
    assert failed(found) == {}
    assert check(found, "sum").passed


@pytest.mark.slow
def test_what_was_refused_is_proved_too_and_recorded_as_asked(tmp_path):
    source = demo.directory("layernorm")
    # Tied: the final norm stays.
    certificate = fold(source, tmp_path / "tied", operations=ALL)
    assert "final" in {refusal["operation"] for refusal in certificate.plan["refusals"]}
    assert failed(verify(source, tmp_path / "tied")) == {}
    pair = folded(tmp_path, "t5", untie=True)
    assert pair.certificate["asked"]["untie"] is True
    assert pair.certificate["plan"]["untie"] is False
    assert failed(verify(pair.source, pair.result)) == {}


@pytest.mark.slow
def test_hidden_files_beside_the_result_do_not_matter(pair):
    (pair.result / ".gitattributes").write_text("*.safetensors filter=lfs")
    (pair.result / ".cache").mkdir()
    (pair.result / ".cache" / "lock").write_text("")
    assert failed(verify(pair.source, pair.result)) == {}


@pytest.mark.slow
def test_progress_counts_every_byte(saved):
    seen = []
    verify(saved.source, saved.result, threads=2, progress=lambda *call: seen.append(call))
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["gains and biases", "verifying"]
    done = [done for stage, done, _ in seen if stage == "verifying"]
    assert done == sorted(done)
    assert seen[-1][1] == seen[-1][2]


# One bit.


def complaints(pair: Pair) -> list[str]:
    """What fails, or the one line about what cannot be used."""
    try:
        return list(failed(verify(pair.source, pair.result)).values())
    except NormkitError as error:
        return [str(error)]


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("relation", "name"), [(relation, name) for relation in TAMPERED for name in TAMPERED[relation]]
)
def test_one_bit_of_a_tensor_is_named(saved, relation, name):
    place = tensors(saved.result)[name]
    assert saved.certificate["tensors"][name]["relation"] == relation
    for element in (0, place.nbytes // 4 - 1):
        where = [element // place.matrix[1], element % place.matrix[1]][-len(place.shape) :]
        with flipped(place.file, place.start + 4 * element + 1, 3):
            faults = failed(verify(saved.source, saved.result))
        assert faults.keys() == {"result files", relation}
        assert faults["result files"].startswith(f"{place.file.name} is not the one in the certificate: SHA-256 ")
        assert faults[relation].startswith(f"{name}[{', '.join(map(str, where))}] is ")
        assert "more" not in faults[relation]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer.wte.weight", "transformer.h.0.mlp.c_proj.weight", "lm_head.weight"])
def test_the_last_bit_of_a_centred_tensor_is_named(centred, name):
    place = tensors(centred.result)[name]
    with flipped(place.file, place.stop - 2):
        faults = failed(verify(centred.source, centred.result))
    relation = centred.certificate["tensors"][name]["relation"]
    assert faults.keys() == {"result files", relation}
    assert faults[relation].startswith(f"{name}[{place.shape[0] - 1}, {place.shape[1] - 1}] is ")


def positions(file: Path, count: int) -> list[tuple[int, int]]:
    """Bytes and bits of a file, at random: its start, where it is dense with meaning, and all of it."""
    draw, size = random.Random(file.name), file.stat().st_size
    within = [min(size, 3000), size]
    return [(draw.randrange(within[each % 2]), draw.randrange(8)) for each in range(count)]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("side", ["source", "result"])
def test_no_bit_of_any_file_can_be_turned_over(saved, side, part):
    folder = getattr(saved, side)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != CERTIFICATE]
    assert {"config.json", INDEX, "tokenizer.json", "generation_config.json"} <= {path.name for path in files}
    for file in files:
        for byte, bit in positions(file, 8)[2 * part : 2 * part + 2]:
            with flipped(file, byte, bit):
                faults = failed(verify(saved.source, saved.result))
            assert file.name in faults[f"{side} files"], (file, byte, bit)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_no_bit_of_the_certificate_can_be_turned_over(saved, part):
    file = saved.result / CERTIFICATE
    version = file.read_bytes().index(b'"normkit": "') + len('"normkit": "')
    before = without_english(saved.certificate)
    for byte, bit in positions(file, 100)[20 * part : 20 * part + 20]:
        if version <= byte < version + 12:
            # Nothing can tell which version made it.
            continue
        with flipped(file, byte, bit):
            lines = complaints(saved)
            is_english = not lines and without_english(saved.certificate) == before
        assert lines or is_english, (byte, bit)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["source", "result"])
def test_a_file_that_is_gone_is_named(pair, side):
    for name in ("tokenizer.json", "config.json", INDEX, sorted(pair.source.glob("*.safetensors"))[1].name):
        moved = getattr(pair, side) / name
        moved.rename(moved.with_name(".away"))
        faults = failed(verify(pair.source, pair.result))
        assert f"{name} is missing" in faults[f"{side} files"]
        moved.with_name(".away").rename(moved)
    assert failed(verify(pair.source, pair.result)) == {}


@pytest.mark.slow
def test_a_file_that_became_shorter_or_longer_is_named(pair):
    file = sorted(pair.result.glob("*.safetensors"))[0]
    whole = file.read_bytes()
    for content in (whole[:-1], whole + b"\0", b""):
        file.write_bytes(content)
        faults = failed(verify(pair.source, pair.result))
        assert f"{len(content):,} bytes, not {len(whole):,}" in faults["result files"]
        assert faults["headers"].startswith(f"{file.name} has") or "truncated" in faults["headers"]


# What cannot be held against each other.


def test_another_source_one_of_another_family_or_a_damaged_one_fails_by_its_files(saved, tmp_path):
    tiny("gpt2", dtype=torch.float32, seed=1)[0].save_pretrained(tmp_path / "other", max_shard_size="20KB")
    faults = failed(verify(tmp_path / "other", saved.result))
    assert {"source files", "identical", "product", "sum"} <= faults.keys()
    tiny("llama", dtype=torch.float32)[0].save_pretrained(tmp_path / "llama")
    faults = failed(verify(tmp_path / "llama", saved.result))
    assert "source files" in faults
    shutil.copytree(saved.source, tmp_path / "damaged")
    (tmp_path / "damaged" / "config.json").write_text("{")
    faults = failed(verify(tmp_path / "damaged", saved.result))
    assert faults.keys() == {"source files", "derivation"}
    assert "config.json" in faults["derivation"]


def test_a_nan_in_the_source_is_named(pair):
    place = tensors(pair.source)["transformer.h.0.attn.c_attn.weight"]
    with place.file.open("r+b") as file:
        file.seek(place.start)
        file.write(b"\xff\xff\xff\xff")
    forge(pair)
    faults = failed(verify(pair.source, pair.result))
    assert "transformer.h.0.attn.c_attn.weight holds a NaN" in " ".join(faults.values())


def test_folders_without_a_certificate_are_refused_and_accelerate_is_not_needed(saved, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"expected the folder of a checkpoint, got .*nowhere"):
        verify(tmp_path / "nowhere", saved.result)
    with pytest.raises(InputError, match=r"expected the folder of a checkpoint, got .*nowhere"):
        verify(saved.source, tmp_path / "nowhere")
    with pytest.raises(InputError, match=rf"found no {CERTIFICATE} in .*; give SRC, then DST"):
        verify(saved.result, saved.source)
    before = {path: path.stat().st_mtime_ns for side in (saved.source, saved.result) for path in side.rglob("*")}
    verify(saved.source, saved.result)
    assert {
        path: path.stat().st_mtime_ns for side in (saved.source, saved.result) for path in side.rglob("*")
    } == before
    monkeypatch.setattr(build_model, "find_spec", lambda _: None)
    found = verify(saved.source, saved.result)
    assert check(found, "reload").passed is None
    assert found.passed


@pytest.mark.slow
def test_every_failure_is_one_line(pair):
    for file in sorted(pair.result.glob("*")):
        if file.name == CERTIFICATE or not file.is_file():
            continue
        whole = file.read_bytes()
        for content in (b"", b"\0" * 64, b"[" * 2000, whole[::-1]):
            file.write_bytes(content)
            lines = complaints(pair)
            assert lines
            assert all("\n" not in line for line in lines)
        file.write_bytes(whole)


MEASURE = """
import resource, sys
from normkit.checkpoint import fold, verify
from normkit.demo import directory

source, result, small = sys.argv[1:]
fold(directory("rmsnorm"), small)
assert verify(directory("rmsnorm"), small, threads=2).passed
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert verify(source, result, threads=2).passed
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    config = LlamaConfig(vocab_size=24_000, hidden_size=1024, intermediate_size=64, num_hidden_layers=1)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.add_(torch.randn(1024))
    model.save_pretrained(tmp_path / "large")
    fold(tmp_path / "large", tmp_path / "folded")
    size = (tmp_path / "folded" / "model.safetensors").stat().st_size
    assert size > 200 * 2**20
    arguments = [tmp_path / "large", tmp_path / "folded", tmp_path / "small"]
    done = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True)
    # Two threads with some chunks of 2^17 numbers each.
    assert int(done.stdout) < 40 * 2**20


DUE = {"a": {"b": [1, {"c": "x"}], "d": None}, "e": 1.5}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (DUE, None),
        ({"e": 1.5, "a": {"d": None, "b": (1, {"c": "x"})}}, None),
        ({"a": {"b": [1, {"c": "y"}], "d": None}, "e": 1.5}, "at.a.b.1.c is recorded as 'y', 'x' follows"),
        ({"a": {"b": [1], "d": None}, "e": 1.5}, "at.a.b is recorded as [1], [1, {'c': 'x'}] follows"),
        ({"a": {"b": [True, {"c": "x"}], "d": None}, "e": 1.5}, "at.a.b.0 is recorded as True, 1 follows"),
        ({"a": {"b": [1, {"c": "x"}]}, "e": 1.5}, "'at.a.d' is not recorded"),
        ({**DUE, "\n": 1}, r"'at.\n' is recorded and does not follow"),
        ([], "at is recorded as [], {"),
        ({**DUE, "e": 1}, "at.e is recorded as 1, 1.5 follows"),
    ],
)
def test_the_first_difference_is_named(found, said):
    answer = difference(found, DUE, "at")
    assert answer is None if said is None else answer is not None and answer.startswith(said)


def test_the_first_fault_stands_for_all():
    assert judged("x", [], "fine") == Checked(name="x", passed=True, what="fine")
    assert judged("x", ["a"], "fine") == Checked(name="x", passed=False, what="a")
    assert judged("x", ["a", "b", "c"], "fine") == Checked(name="x", passed=False, what="a (and 2 more)")


@pytest.mark.parametrize(
    ("answers", "passed"),
    [((), True), ((True, True), True), ((True, None), True), ((True, False), False), ((None, False), False)],
)
def test_what_was_not_tried_does_not_fail(answers, passed):
    checks = tuple(Checked(name=f"{at}", passed=answer, what="w") for at, answer in enumerate(answers))
    found = Verification(source="A", result="B", checks=checks)
    assert found.passed is passed
    document = found.to_json()
    assert (document["schema_version"], document["passed"], document["source"]) == (1, passed, "A")
    assert [each["passed"] for each in document["checks"].values()] == list(answers)
