import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normkit.errors import InputError
from normkit.study import corpus
from normkit.study.corpus import (
    MarkovChain,
    held_out_loss,
    next_token_loss,
    stationary,
    text_of_the_library,
    transitions,
    windows,
)


@pytest.fixture(scope="module")
def library():
    return corpus.read()


def test_a_library_is_listed_the_same_twice_without_other_encodings(tmp_path):
    write_library(tmp_path, count=20)
    first, second = corpus.read(tmp_path), corpus.read(tmp_path)
    assert first == second
    assert first.digest == second.digest
    write_library(tmp_path, count=20)
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (tmp_path / "null.py").write_bytes(b"name = '\0'\n")
    assert {"latin.py", "null.py"}.isdisjoint(file.name for file in corpus.read(tmp_path).files)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_library_is_listed_in_order(library):
    names = [file.name for file in library.files]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py"} <= set(names)


@pytest.mark.slow
def test_text_is_plain_source_of_which_a_small_part_is_held_out(library):
    folders = {part for file in library.files for part in file.name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "encodings", "__pycache__"}
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


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="found 0 in"):
        corpus.read(tmp_path)


def write_library(root, count):
    """Enough files that the hash of a name holds some out."""
    root.mkdir(exist_ok=True)
    for index in range(count):
        (root / f"source{index}.py").write_text(f"def function{index}():\n    return {index}\n")


def first(text, **choices):
    return next(windows(text, **{"batch": 4, "window": 16, "seed": 3, **choices}))[0]


def test_windows_follow_from_their_seed_and_reach_both_ends():
    text = bytes(range(256)) * 8
    torch.manual_seed(0)
    batch = first(text)
    torch.manual_seed(1)
    assert torch.equal(first(text), batch)
    assert not torch.equal(first(text, seed=4), batch)
    assert batch.shape == (4, 17)
    # Each window is a stretch of the text, which here counts upwards.
    assert torch.equal((batch[:, 1:] - batch[:, :-1]) % 256, torch.ones(4, 16, dtype=torch.int64))
    text = b"a" + b"b" * 16 + b"c"
    supply = windows(text, batch=4, window=16, seed=0)
    seen = torch.cat([next(supply)[0] for _ in range(20)])
    assert set(seen[:, 0].tolist()) == {ord("a"), ord("b")}
    assert set(seen[:, -1].tolist()) == {ord("b"), ord("c")}


class Table(nn.Module):
    """Logits of the next token by a table of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.dropout = nn.Embedding(256, 256), nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.table(ids))


def test_the_loss_is_that_of_each_token_after_the_first():
    model = Table().eval()
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    expected = F.cross_entropy(model.table.weight[[5, 6, 8, 9]], torch.tensor([6, 7, 9, 10]))
    assert next_token_loss(model, (ids,)).item() == pytest.approx(expected.item(), rel=1e-6)
    model = Table()
    nn.init.zeros_(model.table.weight)
    assert held_out_loss(model, bytes(range(256)) * 4, window=16) == pytest.approx(math.log(256), rel=1e-6)


def test_held_out_text_is_measured_in_evaluation_mode_at_fixed_places():
    model = Table().train()
    nn.init.normal_(model.table.weight)
    text = bytes(range(256)) * 4
    losses = {held_out_loss(model, text, window=16, count=20) for _ in range(2)}
    assert len(losses) == 1
    assert model.training
    # 20 windows are more than a batch, and each counts alike: those that are spread over the text, to its end.
    starts = torch.linspace(0, len(text) - 17, 20).long()
    ids = torch.tensor(list(text))[starts[:, None] + torch.arange(17)]
    model.eval()
    expected = sum(next_token_loss(model, (row[None],)).item() for row in ids) / 20
    assert losses.pop() == pytest.approx(expected, rel=1e-5)


def test_the_library_gives_text_to_train_on_and_other_text_to_measure_on():
    training, held_out = text_of_the_library()
    assert len(training) > 10 * len(held_out) > 100_000


def drawn(chain, batch, seed=0):
    return next(chain.batches(batch=batch, seed=seed))[0]


def test_the_floor_is_the_entropy_of_all_sequences_given_their_first_symbol():
    symbols, window = 3, 4
    likely = transitions(symbols, 1.5)
    start = stationary(likely)
    whole = total = 0.0
    for ids in itertools.product(range(symbols), repeat=window + 1):
        value = start[ids[0]].item() * math.prod(likely[a, b].item() for a, b in itertools.pairwise(ids))
        total += value
        whole -= value * math.log(value)
    assert total == pytest.approx(1, abs=1e-12)
    of_first = -(start * start.log()).sum().item()
    floor = MarkovChain(symbols, window=window, sharpness=1.5).floor
    assert floor == pytest.approx((whole - of_first) / window, rel=1e-12)


def test_a_chain_has_the_textbooks_distribution():
    likely = torch.tensor([[0.9, 0.1], [0.3, 0.7]], dtype=torch.float64)
    torch.testing.assert_close(stationary(likely), torch.tensor([0.75, 0.25], dtype=torch.float64))
    assert MarkovChain(8, window=10, sharpness=0).floor == pytest.approx(math.log(8))


class Predictor(nn.Module):
    """Knows the transitions."""

    def __init__(self, likely):
        super().__init__()
        self.likely = likely

    def forward(self, ids):
        return self.likely[ids].log()


def test_the_best_predictor_reaches_the_floor():
    chain = MarkovChain(6, window=40, sharpness=1.5)
    ids = drawn(chain, 4000)
    assert ids.shape == (4000, 41)
    likely = transitions(6, 1.5)
    # 160,000 tokens of a standard deviation near 1 nat: the mean errs by some 0.003.
    assert next_token_loss(Predictor(likely), (ids,)).item() == pytest.approx(chain.floor, abs=0.01)
    counted = torch.bincount(ids.flatten(), minlength=6) / ids.numel()
    torch.testing.assert_close(counted.double(), stationary(likely), rtol=0, atol=0.01)


def test_a_seed_decides_the_batches():
    chain = MarkovChain(6, window=9)
    assert torch.equal(drawn(chain, 4, seed=2), drawn(chain, 4, seed=2))
    assert not torch.equal(drawn(chain, 4, seed=2), drawn(chain, 4, seed=3))
    assert drawn(chain, 4).dtype == torch.long
    stream = chain.batches(batch=4, seed=2)
    assert not torch.equal(next(stream)[0], next(stream)[0])


@pytest.mark.parametrize(("symbols", "window"), [(0, 3), (3, 0)])
def test_a_chain_has_symbols_and_a_window(symbols, window):
    with pytest.raises(InputError, match="must be at least 1, got 0"):
        MarkovChain(symbols, window=window)
