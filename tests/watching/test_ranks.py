"""Several processes: their statistics are those of one, what should be alike is compared, none waits for another."""

from __future__ import annotations

import math
import pickle
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import distributed_runs
from forks import Fork
from normkit.inspection.result import Inspection
from normkit.measurement.row_counters import RowCounter, Table, Tables, gradient_table, row_tables
from normkit.spec import NormSpec
from normkit.watching.parameters import PARAMETER_SUMS
from normkit.watching.ranks import AsyncCopy, CopyQueue, ManyRanks, Ranks
from small_training import is_of_data

# Sums of some thousand float64 numbers, added in another order: 1e4 times 1e-16, and a margin for what cancels.
TOLERANCE = 1e-10
# What is not of the run: how a norm was found, and how the report came about.
APART = {"evidence", "observer", "ranks", "remarks", "model", "checks"}
# Seconds, on a busy machine.
LIMIT = 240
WORK = """
import sys
from pathlib import Path
from distributed_runs import work
rank, folder, *ports = sys.argv[1:]
work(int(rank), tuple(map(int, ports)), folder)
"""


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@dataclass(frozen=True)
class Runs:
    """What two processes left: each run's inspection in either, exit codes, and a folder a run that did not end."""

    inspections: tuple[Mapping[str, Inspection], Mapping[str, Inspection]]
    codes: list[int | None]
    folder: Path

    def __getitem__(self, rank: int) -> Mapping[str, Inspection]:
        return self.inspections[rank]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two processes do all runs, one after the other; the first also does one alone."""
    folder = tmp_path_factory.mktemp("runs")
    ports = tuple(port() for _ in range(1 + len(distributed_runs.UNFINISHED)))
    both = [Fork(WORK, rank, folder, *ports) for rank in (0, 1)]
    told = [process.communicate(LIMIT)[1] for process in both]
    found = [folder / f"{rank}.pickle" for rank in (0, 1)]
    assert all(path.exists() for path in found), "\n".join(told)
    first, second = (pickle.loads(path.read_bytes()) for path in found)
    return Runs(inspections=(first, second), codes=[process.returncode for process in both], folder=folder)


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two results differ by more than the order of sums."""
    if is_dataclass(expected):
        names = [field.name for field in fields(expected) if field.name not in APART]
        parts = [(f"{where}.{name}", getattr(found, name), getattr(expected, name)) for name in names]
    elif isinstance(expected, (tuple, list)) and len(found) == len(expected):
        parts = [(f"{where}[{index}]", *pair) for index, pair in enumerate(zip(found, expected, strict=True))]
    elif isinstance(expected, float):
        alike = math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=0) or (found != found and expected != expected)
        return [] if alike else [f"{where}: {found} for {expected}"]
    else:
        return [] if found == expected else [f"{where}: {found} for {expected}"]
    return [line for part in parts for line in differences(part[1], part[2], part[0])]


def in_order(inspection: Inspection) -> tuple[Any, ...]:
    """All that was measured; series come in the order in which they became known."""
    training = inspection.training
    assert training is not None
    # Each process sees batches of its own.
    shared = (each for each in training.series if not is_of_data(each))
    series = sorted(shared, key=lambda each: (each.quantity, each.path))
    return inspection.sites, inspection.blocks, inspection.attentions, training.parameters, series


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "ddp_empty", "fsdp", "tp", "by_hand"])
def test_several_processes_measure_what_one_does(runs: Any, name: str) -> None:
    for inspections in runs.inspections:
        assert inspections[name].training.ranks == 2
        assert inspections[name].training.remarks == ()
        assert differences(in_order(inspections[name]), in_order(runs[0]["alone"])) == []
        assert inspections[name].findings == ()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_sequence_parallel_rows_are_those_of_one_process(runs: Runs) -> None:
    found, alone = runs[0]["sp"], runs[0]["alone"]
    for site, expected in zip(found.sites, alone.sites, strict=True):
        assert differences((site.input, site.output, site.gain), (expected.input, expected.output, expected.gain)) == []
    assert differences(found.attentions, alone.attentions) == []
    assert found.findings == ()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_gradients_that_are_parts_of_a_sum_are_left_out_with_a_remark(runs: Runs) -> None:
    training = runs[0]["sp"].training
    assert "gradients of 8 parameters, such as blocks.0.before.weight, are parts of a sum" in " ".join(training.remarks)
    for parameter, expected in zip(training.parameters, runs[0]["alone"].training.parameters, strict=True):
        assert parameter.gradient_steps == expected.gradient_steps
        if parameter.site:
            assert math.isnan(parameter.gradient_rms)
        else:
            assert parameter.gradient_rms == pytest.approx(expected.gradient_rms, rel=TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_norm_gradients_that_are_never_reduced_are_a_finding(runs: Runs) -> None:
    for inspections in runs.inspections:
        forgotten = inspections["forgotten"]
        assert [found.rule for found in forgotten.findings] == ["E7"]
        assert set(forgotten.findings[0].sites) == {site.path for site in forgotten.sites}
        spreads = {each.path: each.gradient_rank_spread for each in forgotten.training.parameters}
        assert all(
            (spread > 1e-3) == ("before" in path or "between" in path or "norm" in path)
            for path, spread in spreads.items()
        )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_norm_that_drifted_apart_is_a_finding(runs: Runs) -> None:
    found = runs[0]["drifted"]
    assert [each.rule for each in found.findings] == ["E7"]
    assert found.findings[0].sites == ("norm",)
    spreads = {each.path: (each.rank_spread, each.gradient_rank_spread) for each in found.training.parameters}
    assert spreads.pop("norm.weight")[0] == pytest.approx(1e-4 / 6, rel=1)
    assert set(spreads.values()) == {(0.0, 0.0)}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_replicas_that_are_alike_differ_by_nothing(runs: Runs) -> None:
    for name in ("ddp", "ddp_empty", "tp", "sp", "fsdp", "by_hand"):
        parameters = runs[0][name].training.parameters
        assert {(each.rank_spread, each.gradient_rank_spread) for each in parameters} == {(0.0, 0.0)}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_processes_with_other_norms_are_watched_apart(runs: Runs) -> None:
    for rank, inspections in enumerate(runs.inspections):
        found = inspections["stages"]
        assert found.training.ranks == 1
        assert found.training.remarks == (f"2 groups of processes hold different norms: this is of process {rank}",)
        assert [site.path for site in found.sites] == [f"blocks.{rank}.before", f"blocks.{rank}.between"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_break_in_another_process_is_found_in_the_first(runs: Runs) -> None:
    training = runs[0]["hole"].training
    assert (training.reason, training.reason_step) == ("non-finite values in the forward pass", 1)
    first = next(each for each in training.of("non-finite") if each.path == "blocks.1.between.inner" or 1 in each.steps)
    assert first.steps[0] == 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_watch_proves_itself_in_every_run(runs: Runs) -> None:
    for name in ("ddp", "ddp_empty", "fsdp", "tp", "sp", "by_hand"):
        line = runs[0][name].training.observer
        assert line.startswith("observer verified: 27 of 27 statistics within ")
        assert line.endswith(" of float64 on 5 uneven shards in 2 processes")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_when_a_process_is_killed_the_others_end_as_without_the_watch(runs: Runs) -> None:
    assert runs.codes == [0, -9]
    assert (runs.folder / "killed" / "end").read_text() == "raised RuntimeError"
    report = runs.folder / "killed" / "report"
    assert (report / "report.html").read_text().rstrip().endswith("</html>")
    assert len((report / "history.jsonl").read_text().splitlines()) == 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_process_that_leaves_its_watch_is_not_waited_for(runs: Runs) -> None:
    assert (runs.folder / "raised" / "other").read_text() == "raised ValueError"
    assert (runs.folder / "raised" / "end").exists()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_watch_in_one_process_alone_is_of_that_process(runs: Runs) -> None:
    *alone, both = (runs.folder / "absent" / "end").read_text().splitlines()
    assert [line.startswith("1 ranks; 1 of 2 processes began a watch within 0 s") for line in alone] == [True] * 2
    # The next one that both begin is of both.
    assert both == "2 ranks"


LAYOUT = (
    *row_tables(2),
    gradient_table(1),
    Table(name="heads", shape=(0, 1, 3)),
    Table(name="head peaks", shape=(0, 1, 2), keeps_largest=True),
    Table(name="parameters", shape=(3, len(PARAMETER_SUMS))),
    Table(name="steps", shape=(1, 2)),
)
PLAIN, SPLIT = (), (0,)


def counted(loss: float, *inputs: Tensor, sums: Tensor | None = None) -> Tensor:
    """The packed vector of a process that saw these rows, one place each."""
    tables = Tables(LAYOUT, torch.device("cpu"))
    for place, rows in enumerate(inputs):
        RowCounter(place=place, spec=NormSpec(), enters_norm=True).add(tables, rows, None)
    tables["steps"][0] = torch.tensor([1.0, loss])
    if sums is not None:
        tables["parameters"].copy_(sums)
    return tables.packed()


def ranks(
    size: int = 2, held: tuple[tuple[Any, ...], ...] | None = None, compared: tuple[bool, ...] = (True,) * 3
) -> Ranks:
    return ManyRanks(None, 0, held or ((PLAIN,) * 3,) * size, compared)


def pooled(*vectors: Tensor) -> Tensor:
    """Calls, rows and rows of zeros at each of two places."""
    tables = Tables(LAYOUT, torch.device("cpu"))
    found = ranks(len(vectors)).pooled(torch.stack(vectors), tables, 0)
    return tables.part(found, "rows")[:, :3]


def test_rows_of_several_processes_are_added_and_their_calls_are_one() -> None:
    a, b = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    assert pooled(counted(1.0, a, b), counted(2.0, b, a)).tolist() == [[1, 8, 0], [1, 8, 0]]


def test_rows_that_several_processes_have_alike_are_counted_once() -> None:
    a, b, c = (torch.randn(3, 4, dtype=torch.float64) for _ in range(3))
    assert pooled(counted(1.0, a, b), counted(1.0, a, c), counted(1.0, a, b)).tolist() == [[1, 3, 0], [1, 6, 0]]


@pytest.mark.parametrize(("losses", "rows"), [((1.0, 1.0), 3), ((1.0, 2.0), 6), ((math.nan, math.nan), 3)])
def test_lines_that_tell_nothing_are_told_apart_by_the_loss(losses: tuple[float, float], rows: int) -> None:
    a, b = counted(losses[0], torch.zeros(3, 4)), counted(losses[1], torch.zeros(3, 4))
    assert pooled(a, b)[0].tolist() == [1, rows, rows]


def test_a_parameter_counts_by_how_many_processes_hold_the_same_part() -> None:
    held = ((PLAIN, (0,), (0, 1)), (PLAIN, (1,), (0, 1)), (PLAIN, (0,), (1, 1)))
    assert ranks(held=held).shares(3) == [pytest.approx(1 / 3), 0.5, 0.5]


def test_only_parts_that_should_be_alike_are_compared() -> None:
    held = ((PLAIN, (0,), PLAIN), (PLAIN, (1,), PLAIN))
    sums = torch.zeros(3, len(PARAMETER_SUMS))
    sums[:, PARAMETER_SUMS.index("squares")] = 4.0
    sums[:, PARAMETER_SUMS.index("elements")] = 1.0
    other = sums.clone()
    other[:, PARAMETER_SUMS.index("squares")] = 9.0
    other[0, PARAMETER_SUMS.index("gradient squares")] = math.nan
    vectors = torch.stack([counted(1.0, sums=sums), counted(2.0, sums=other)])
    tables = Tables(LAYOUT, torch.device("cpu"))
    found = ranks(held=held, compared=(True, True, False)).spreads(vectors, tables)
    assert found[0].tolist() == [pytest.approx(1 / 3), math.inf]
    assert not found[1:].any()


def test_one_process_alone_pools_nothing() -> None:
    tables = Tables(LAYOUT, torch.device("cpu"))
    vector = counted(1.0, torch.randn(3, 4))
    assert torch.equal(Ranks().pooled(vector[None], tables, 0), vector)
    assert not Ranks().spreads(vector[None], tables).any()


COUNTS = [
    Table(name="peaks", shape=(2,), keeps_largest=True),
    Table(name="sums", shape=(2, 3)),
    Table(name="none", shape=(0, 4)),
]


def made() -> Tables:
    return Tables(COUNTS, torch.device("cpu"))


def test_empty_tables_are_zeros_and_lowest_numbers():
    tables = made()
    assert tables["sums"].dtype == torch.float64
    assert tables["sums"].tolist() == [[0.0] * 3] * 2
    assert tables["peaks"].tolist() == [-math.inf] * 2


def test_a_packed_vector_is_a_copy_that_unpacks_to_the_tables():
    tables = made()
    tables["sums"].copy_(torch.arange(6.0).view(2, 3))
    tables["peaks"].copy_(torch.tensor([3.0, -1.0]))
    vector = tables.packed()
    tables.clear()
    assert tables["sums"].eq(0).all()
    assert tables["peaks"].isneginf().all()
    found = tables.unpacked(vector)
    assert found["sums"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["peaks"].tolist() == [3, -1]
    assert found["none"].shape == (0, 4)
    tables.part(vector, "sums")[1, 2] = 9
    assert tables.unpacked(vector)["sums"][1, 2] == 9
    with pytest.raises(KeyError):
        tables.part(vector, "no such table")


def test_sums_of_several_vectors_are_added_and_the_largest_kept():
    vectors = []
    for value in (1.0, 2.0, -5.0):
        tables = made()
        tables["sums"].fill_(value)
        tables["peaks"][0] = value
        vectors.append(tables.packed())
    found = made().unpacked(made().merged(torch.stack(vectors)))
    assert found["sums"].eq(-2).all()
    assert found["peaks"].tolist() == [2.0, -math.inf]


class Late:
    """Numbers that are ready after they were asked for so many times."""

    def __init__(self, asked: int) -> None:
        self.asked = asked

    def is_ready(self, patience: float = 0.0) -> bool:
        self.asked -= 1
        return self.asked < 0 or patience > 0

    def read(self) -> Tensor | None:
        return torch.zeros(1)


def test_a_copy_holds_what_was_copied():
    values = torch.ones(2)
    copy = AsyncCopy(values)
    values.fill_(7)
    assert copy.is_ready()
    found = copy.read()
    assert (found.dtype, found.tolist()) == (torch.float64, [1.0, 1.0])


def test_a_later_copy_waits_for_the_earlier():
    queue = CopyQueue()
    queue.put(0, Late(asked=1))
    queue.put(1, AsyncCopy(torch.ones(1)))
    assert list(queue.take_ready()) == []
    assert [step for step, _ in queue.take_ready()] == [0, 1]
    assert list(queue.take_ready()) == []


def test_patience_waits_for_what_is_pending():
    queue = CopyQueue()
    queue.put(4, Late(asked=9))
    assert [step for step, _ in queue.take_ready(1.0)] == [4]
