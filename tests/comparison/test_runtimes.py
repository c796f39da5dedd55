"""What runtimes do with stored gains."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from normkit.comparison.relations import Relation
from normkit.comparison.runtimes import Convention, convention, judged, runtimes
from normkit.comparison.weights import Weights, weights_of
from normkit.models.norm_classes import declared, key_of


def weights(runtime: str, architecture: str) -> Weights:
    return replace(weights_of({}), runtime=runtime, architecture=architecture)


def adds(runtime: str, architecture: str, path: str) -> float | None:
    found = convention(weights(runtime, architecture), path)
    return None if found is None else found.adds


@pytest.mark.parametrize(
    ("runtime", "architecture", "path", "number"),
    [
        ("transformers", "gemma3_text", "model.layers.0.self_attn.q_norm", 1.0),
        ("transformers", "gemma3", "vision_tower.vision_model.encoder.layers.0.layer_norm1", 0.0),
        ("transformers", "gemma3n", "model.norm", 0.0),
        ("transformers", "llama", "model.norm", 0.0),
        ("transformers", "qwen3_next", "model.layers.0.linear_attn.norm", 0.0),
        ("transformers", "muse_glimmer", "model.language_model.norm", 0.0),
        ("llama.cpp", "gemma3", "blk.0.attn_norm", 0.0),
        ("MLX", "gemma3_text", "model.norm", 1.0),
        ("MLX", "qwen3_5", "language_model.model.norm", 0.0),
        ("transformers", "opt", "model.decoder.final_layer_norm", 0.0),
        ("transformers", "mpnet", "encoder.layer.0.output.LayerNorm", 0.0),
        ("transformers", "plamo2", "model.norm", None),
        ("", "gemma3", "model.norm", None),
    ],
)
def test_what_is_added(runtime: str, architecture: str, path: str, number: float | None) -> None:
    assert adds(runtime, architecture, path) == number


def test_every_entry_has_a_source() -> None:
    tables = [
        each
        for table in runtimes().values()
        for kind in ("entry", "elsewhere", "reordered")
        for each in table.get(kind, ())
    ]
    assert all(each["source"] for each in (*tables, *runtimes().values()))


PLAIN, ONE = (Convention(adds=number) for number in (0.0, 1.0))
PLUS_ONE, PLUS_TWO, EQUAL = (
    *(Relation(kind="offset", constant=number) for number in (1.0, 2.0)),
    Relation(kind="equal"),
)


@pytest.mark.parametrize(
    ("found", "port", "reference", "verdict", "is_right"),
    [
        (PLUS_ONE, PLAIN, ONE, "as X stores it", True),
        (EQUAL, PLAIN, ONE, "dropped: X adds nothing to it and computes gains - 1", False),
        (PLUS_TWO, PLAIN, ONE, "doubled: X adds nothing to it and computes gains + 1", False),
        (PLUS_ONE, ONE, ONE, "doubled: X adds 1 to it and computes gains + 1", False),
        (EQUAL, ONE, ONE, "", True),
        (EQUAL, PLAIN, PLAIN, "", True),
        (PLUS_ONE, PLAIN, PLAIN, "wrong: X adds nothing to it and computes gains + 1", False),
        (Relation(kind="offset", constant=-1.0), ONE, PLAIN, "as X stores it", True),
        (EQUAL, None, ONE, "right for a loader that adds 1", True),
        (EQUAL, None, PLAIN, "", True),
        (PLUS_ONE, None, ONE, "right for a loader that multiplies by it, doubled for one that adds 1", None),
        (PLUS_TWO, None, ONE, "doubled: a loader needs +1, or nothing if it adds 1", False),
        (PLUS_ONE, None, PLAIN, "wrong: gains + 1", False),
        (PLUS_ONE, None, None, "right only if the two loaders add numbers that are 1 apart", None),
        (PLUS_TWO, None, None, "", False),
        (Relation(kind="different"), PLAIN, PLAIN, "", False),
        (Relation(kind="undecided"), PLAIN, PLAIN, "", None),
    ],
)
def test_what_a_relation_means(
    found: Relation, port: Convention | None, reference: Convention | None, verdict: str, is_right: bool | None
) -> None:
    assert judged(found, port, reference, "X") == (verdict, is_right)


OFFSET_TYPES = [
    *("gemma", "gemma2", "gemma3", "gemma3_text", "paligemma", "t5gemma", "t5gemma2", "vaultgemma", "recurrent_gemma"),
    *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "step3p7", "minimax_m3_vl"),
    *("minimax_m3_vl_text", "muse_glimmer", "muse_glimmer_text", "muse_spark", "muse_spark_text", "videoprism"),
]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", OFFSET_TYPES)
def test_what_transformers_adds_is_what_its_classes_add(kind: str) -> None:
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        model = MODEL_MAPPING[type(config)](config)
    checked = set()
    for path, module in model.named_modules():
        spec = declared().get(key_of(type(module).__module__, type(module).__name__))
        if spec is not None and spec.has_weight:
            assert adds("transformers", kind, path) == spec.weight_offset, path
            checked.add(re.sub(r"\d+", "*", path))
    assert checked


def test_every_family_of_transformers_that_adds_something_is_listed() -> None:
    families = {name.partition(".")[0] for name, spec in declared().items() if spec.weight_offset}
    listed = {name for each in runtimes()["transformers"]["entry"] for name in each["architectures"]}
    assert families <= listed
