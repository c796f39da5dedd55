"""Every fault of a GGUF port is named, tensor by tensor, and nothing else is."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

from gguf_files import Raw
from gguf_ports import (
    ARCHITECTURES,
    FAMILIES,
    FAULTS,
    LAYERS,
    WIDTH,
    Port,
    Truth,
    converted,
    family_port,
    folder_of,
    ports,
    real,
    reference,
)
from normkit.comparison.comparing import compare
from normkit.comparison.gguf_file import read_gguf
from normkit.comparison.metadata import compare_metadata
from normkit.comparison.report import values_facts
from normkit.comparison.values import Values, compare_values
from normkit.comparison.weights import weights_of
from normkit.errors import ModelError
from tiny_models import tiny


def told(port: Port) -> dict[str, Truth]:
    """What is true of a port, as far as a relation says it: the constant of an offset alone."""
    return {
        name: Truth(value.kind, value.constant if value.kind == "offset" else None, value.other, value.is_right)
        for name, value in port.truth.items()
    }


def truth_of(values: Values) -> dict[str, Truth]:
    """What was found, in the form of the truth."""
    found = {
        each.name: Truth(
            each.relation.kind,
            each.relation.constant if each.relation.kind == "offset" else None,
            each.relation.other,
            each.is_right is True,
        )
        for each in values.tensors
    }
    return found | {name: Truth("missing", is_right=False) for name in values.missing}


@pytest.mark.parametrize(("architecture", "fault"), ports())
def test_each_gain_and_eps_of_a_port_is_what_was_planted(tmp_path, architecture, fault):
    tensors = reference(architecture)
    port = converted(architecture, tensors)
    port = FAULTS[fault](port) if fault else port
    given = read_gguf(port.write(tmp_path / "model.gguf"))
    folder = weights_of(folder_of(tmp_path / "model", architecture, tensors))
    values = compare_values(given, folder)
    assert truth_of(values) == told(port)
    assert values.is_right == all(value.is_right for value in port.truth.values())
    eps = compare_metadata(given, folder, [(each.path, each.reference_path) for each in values.tensors]).eps
    assert {(each.given, each.expected, each.is_same) for each in eps} == {(port.eps, 1e-6, fault != "eps_wrong")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_right_port_is_right_whatever_the_folder_was_stored_in(tmp_path, architecture, dtype):
    tensors = reference(architecture, dtype)
    port = converted(architecture, tensors)
    values = compare_values(
        read_gguf(port.write(tmp_path / "model.gguf")), weights_of(folder_of(tmp_path / "model", architecture, tensors))
    )
    assert truth_of(values) == port.truth
    assert values.is_right is True


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_norms_are_paired_by_the_table_whatever_their_values(tmp_path, family):
    model, _ = tiny(family, dtype=torch.float32)
    port = family_port(family, model.state_dict())
    right = compare_values(read_gguf(port.write(tmp_path / "model.gguf")), weights_of(model))
    assert {each.name: each.reference_name for each in right.tensors}.items() <= port.places.items()
    assert all(each.is_right and each.paired_by in ("name", "table of names") for each in right.tensors)
    assert (right.is_right, right.extra, right.missing) == (True, (), ())
    drawn = {name: torch.randn_like(tensor) for name, tensor in port.tensors.items()}
    wrong = compare_values(read_gguf(replace(port, tensors=drawn).write(tmp_path / "model.gguf")), weights_of(model))
    assert [each.reference_name for each in wrong.tensors] == [each.reference_name for each in right.tensors]
    assert not any(each.is_right for each in wrong.tensors)


@pytest.mark.parametrize(
    ("architecture", "held", "elsewhere"),
    [
        ("gemma3", "language_model.model.norm", "vision_tower.vision_model.post_layernorm"),
        ("gemma3", "model.language_model.norm", "model.multi_modal_projector.mm_soft_emb_norm"),
        ("clip", "vision_tower.vision_model.post_layernorm", "language_model.model.norm"),
        ("bert", "bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm"),
    ],
)
def test_what_the_runtime_keeps_elsewhere_is_not_missing(tmp_path, architecture, held, elsewhere):
    ours = {"gemma3": "output_norm.weight", "clip": "v.post_ln.weight", "bert": "token_embd_norm.weight"}[architecture]
    gain = torch.randn(40)
    right = gain + 1 if architecture == "gemma3" else gain
    file = Port(architecture, {ours: right}, {}, {}).write(tmp_path / "model.gguf")
    tensors = {f"{held}.weight": gain, f"{elsewhere}.weight": torch.randn(40)}
    reference = replace(weights_of(tensors), runtime="transformers", architecture=architecture)
    values = compare_values(read_gguf(file), reference)
    assert [(each.reference_name, each.is_right) for each in values.tensors] == [(f"{held}.weight", True)]
    assert (values.is_right, values.missing, [*values.elsewhere]) == (True, (), [f"{elsewhere}.weight"])


def test_tensors_that_nothing_here_reads_are_said_and_no_fault(tmp_path):
    tensors = reference("llama")
    extra = {f"model.layers.{layer}.mlp.up_proj.weight": torch.randn(8, WIDTH) for layer in range(LAYERS)}
    port = converted("llama", tensors)
    packed = {f"blk.{layer}.ffn_up.weight": Raw(139, bytes(288), (8, WIDTH)) for layer in range(LAYERS)}
    file = replace(port, tensors={**port.tensors, **packed}).write(tmp_path / "model.gguf")
    folder = weights_of(folder_of(tmp_path / "model", "llama", tensors | extra))
    values = compare_values(read_gguf(file), folder)
    assert values.is_right is True
    assert (values.missing, values.others.missing) == ((), ())
    assert values.elsewhere == dict.fromkeys(extra, "not read: its encoding 139 is not known")
    assert [fact.label for fact in values_facts(values) if "encoding" in fact.value] == ["not read"]


@pytest.mark.parametrize("is_port", [True, False])
def test_norms_of_single_heads_are_found_in_the_matrix_that_llama_cpp_makes_of_them(tmp_path, is_port):
    heads = [f"self_attn.{kind}_layernorm.norms.{head}" for kind in "qk" for head in range(3)]
    gains = {f"model.layers.{layer}.{name}.weight": torch.rand(8) for layer in range(2) for name in heads}
    held = {
        f"blk.{layer}.attn_{kind}_norm.weight": torch.stack(
            [gains[f"model.layers.{layer}.self_attn.{kind}_layernorm.norms.{head}.weight"] for head in range(3)]
        )
        for layer in range(2)
        for kind in "qk"
    }
    wrong = held["blk.1.attn_k_norm.weight"].clone()
    wrong[2] += 1
    norm, model = torch.rand(24), tmp_path / "model.gguf"
    folder = replace(weights_of(gains | {"model.norm.weight": norm}), runtime="transformers", architecture="stablelm")
    for each, expected in ((held, True), (held | {"blk.1.attn_k_norm.weight": wrong}, False)):
        file = read_gguf(Port("stablelm", each | {"output_norm.weight": norm}, {}, {}).write(model))
        values = compare_values(file, folder) if is_port else compare_values(folder, file)
        assert (len(values.tensors), values.missing, values.extra) == (13, (), ())
        assert values.is_right is expected
        names = [each.path if is_port else each.reference_path for each in values.tensors if not each.is_right]
        assert names == ([] if expected else ["blk.1.attn_k_norm.2"])


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(40))
def test_damage_to_a_port_is_one_line_or_an_answer(tmp_path, seed):
    drawing, file = random.Random(seed), tmp_path / "model.gguf"
    tensors = reference("gemma3")
    content = converted("gemma3", tensors).write(file).read_bytes()
    header = content.index(b"output_norm.weight")
    folder = weights_of(folder_of(tmp_path / "model", "gemma3", tensors))
    outcomes, refusals = set(), []
    for _ in range(25):
        damaged = bytearray(content)
        for _ in range(drawing.choice((1, 1, 2, 4))):
            place = drawing.randrange(header if drawing.random() < 0.7 else len(content))
            damaged[place] = drawing.choice((damaged[place] ^ 1 << drawing.randrange(8), 0, 1, 8, 26, 28, 127, 255))
        file.write_bytes(damaged)
        try:
            port = read_gguf(file)
            values = compare_values(port, folder)
            json.dumps(values.to_json(), allow_nan=False)
            assert values_facts(values)
            compare_metadata(port, folder, [(each.path, each.reference_path) for each in values.tensors])
            outcomes.add(values.is_right)
        except ModelError as error:
            refusals.append(str(error))
    assert outcomes
    assert refusals
    assert all(refusal.isprintable() for refusal in refusals)


REAL = [("gemma3", fault) for fault in ("", *FAULTS)]
REAL += [
    ("smollm2", fault) for fault in ("", *FAULTS) if fault not in ("offset_dropped", "offset_doubled_in_attention")
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "fault"), REAL)
def test_each_gain_of_a_real_file_is_what_was_planted(real_models, tmp_path, name, fault):
    folder = weights_of(real_models / name)
    port = real(read_gguf(real_models / f"{name}.gguf"), folder.source.tensors, 1.0 if name == "gemma3" else 0.0)
    port = FAULTS[fault](port) if fault else port
    file = port.write(tmp_path / "model.gguf")
    values = compare_values(read_gguf(file), folder)
    # pytest keeps the folders of three sessions, and these files are large.
    file.unlink()
    assert truth_of(values) == told(port)
    assert values.is_right == all(value.is_right for value in port.truth.values())


@pytest.mark.parametrize("architecture", ["gemma3", "nemotron"])
def test_another_architecture_is_the_only_cause_of_a_file_that_is_right_but_for_it(tmp_path, architecture):
    tensors = reference(architecture)
    port = replace(converted(architecture, tensors), architecture="qwen2" if architecture == "nemotron" else "llama")
    found = compare(
        port.write(tmp_path / "model.gguf"), folder_of(tmp_path / "model", architecture, tensors), run=False
    )
    assert found.values is not None
    assert found.values.is_right is True
    [cause] = found.causes
    words = f"names the architecture {port.architecture} instead of {architecture}; llama.cpp computes what it"
    assert words in cause.sentence
    assert found.differs
