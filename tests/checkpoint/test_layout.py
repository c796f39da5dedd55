from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

import folding_runs
from normkit.checkpoint.layout import FileLayout, index, lay_out
from normkit.checkpoint.plan import FoldPlan, TensorEdit
from normkit.checkpoint.source import TORCH, CheckpointSource


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folding_runs.save(tmp_path / "model")


def layouts(folder: Path, plan: FoldPlan) -> tuple[FileLayout, ...]:
    with CheckpointSource(folder) as source:
        return lay_out(plan, source)


def names(layout: FileLayout) -> list[str]:
    return [edit.name for edit in layout.edits]


def test_tensors_stay_in_their_files_and_created_ones_join_the_last(folder):
    made = layouts(folder, folding_runs.plan())
    assert [layout.name for layout in made] == sorted(path.name for path in folder.glob("*.safetensors"))
    for layout in made:
        with safe_open(folder / layout.name, "pt") as held:
            there = set(held.keys()) - {"gone"}
        assert set(names(layout)) - {"created.table"} == there
    assert "created.table" in names(made[-1])


def test_wide_numbers_stand_before_narrow_ones(folder):
    for layout in layouts(folder, folding_runs.plan()):
        for edit, start in zip(layout.edits, layout.starts, strict=False):
            assert start % TORCH[edit.dtype].itemsize == 0
    # The float32 table is created last; behind thirteen bytes of a mask it would not be aligned.
    last = layouts(folder, folding_runs.plan())[-1]
    assert names(last)[0] == "created.table"
    assert names(last)[-1] == "mask"


def test_equal_widths_keep_the_order_of_the_source(folder):
    with CheckpointSource(folder) as source:
        order = [name for name, tensor in source.tensors.items() if tensor.dtype == "BF16" and name != "gone"]
    kept = [name for layout in layouts(folder, folding_runs.plan()) for name in names(layout) if name in order]
    assert kept == order


def test_the_order_of_the_plan_does_not_matter(folder):
    plan = folding_runs.plan()
    assert layouts(folder, replace(plan, edits=plan.edits[::-1])) == layouts(folder, plan)


def test_starts_and_texts_are_those_that_safetensors_reads(folder):
    layout = layouts(folder, folding_runs.plan("float32"))[0]
    length = int.from_bytes(layout.header[:8], "little")
    header = json.loads(layout.header[8:])
    assert len(layout.header) == 8 + length == layout.starts[0]
    assert header.pop("__metadata__") == {"format": "pt", "by": "a test"}
    assert list(header) == names(layout)
    for entry, start, stop in zip(header.values(), layout.starts, layout.starts[1:], strict=False):
        assert [layout.starts[0] + offset for offset in entry["data_offsets"]] == [start, stop]
    assert header["table"] == {"dtype": "F32", "shape": [2048, 384], "data_offsets": header["table"]["data_offsets"]}
    assert layout.size == layout.starts[-1]


def test_what_is_left_to_read_is_told_for_every_tensor(folder):
    with CheckpointSource(folder) as source:
        for layout in lay_out(folding_runs.plan(), source):
            assert layout.read[-1] == (folder / layout.name).stat().st_size
            for position, reached in enumerate(layout.read[:-1]):
                left = [source.tensors[name] for name in names(layout)[position:] if name in source.tensors]
                assert reached == min(tensor.start for tensor in left if tensor.file.name == layout.name)


def test_a_file_may_end_up_empty(folder):
    plan = folding_runs.plan()
    with CheckpointSource(folder) as source:
        first = {name for name, tensor in source.tensors.items() if tensor.file == source.files[0]}
        plan = replace(plan, edits=tuple(edit for edit in plan.edits if edit.name not in first))
        made = lay_out(plan, source)
        named = index(made, source)["weight_map"]
    assert made[0].edits == ()
    assert made[0].size == len(made[0].header)
    assert set(named.values()) == {layout.name for layout in made[1:]}


def test_the_index_names_every_tensor_and_keeps_the_rest(folder):
    with CheckpointSource(folder) as source:
        made = lay_out(folding_runs.plan(), source)
        document = index(made, source)
    assert document["metadata"] == {
        "total_size": sum(layout.size - layout.starts[0] for layout in made),
        "kept": "as it is",
    }
    assert document["weight_map"] == dict(sorted((name, layout.name) for layout in made for name in names(layout)))


def test_parameters_are_counted_where_they_were(folder):
    file = folder / folding_runs.INDEX
    file.write_text(json.dumps(json.loads(file.read_text()) | {"metadata": {"total_parameters": 1}}))
    with CheckpointSource(folder) as source:
        edits = (
            TensorEdit(name="table", source="table", dtype="BF16"),
            TensorEdit(name="mask", source="mask", dtype="BOOL"),
        )
        document = index(lay_out(replace(folding_runs.plan(), edits=edits), source), source)
    assert document["metadata"] == {"total_parameters": 2048 * 384 + 13, "total_size": 2 * 2048 * 384 + 13}


@pytest.mark.parametrize("metadata", [None, [1], "absent"])
def test_an_index_without_metadata_gains_its_size(folder, metadata):
    file = folder / folding_runs.INDEX
    document = json.loads(file.read_text()) | {"metadata": metadata}
    if metadata == "absent":
        del document["metadata"]
    file.write_text(json.dumps(document))
    with CheckpointSource(folder) as source:
        assert list(index(lay_out(folding_runs.plan(), source), source)["metadata"]) == ["total_size"]


def test_one_file_has_no_index(tmp_path):
    with CheckpointSource(folding_runs.save(tmp_path / "one", shards=1)) as source:
        made = lay_out(folding_runs.plan(), source)
        assert [layout.name for layout in made] == ["model.safetensors"]
        assert index(made, source) is None
