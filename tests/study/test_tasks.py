import itertools
import math

import pytest
import torch
from torch import nn

from normkit.errors import InputError
from normkit.study.tasks import copying, markov_chain, modular_addition, stationary, transitions
from normkit.study.windows import next_token_loss


class Predictor(nn.Module):
    """Logits from a function of the ids that have been read."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, ids):
        return self.logits(ids)


def first(task, batch, seed=0):
    return next(task.batches(batch=batch, seed=seed))[0]


def certain(likely):
    """Logits whose softmax is a distribution that may hold zeros; a finite floor keeps the loss of a miss large."""
    return likely.clamp_min(1e-30).log()


def copier(symbols, length):
    def logits(ids):
        likely = torch.full((*ids.shape, symbols + 1), 1 / symbols, dtype=torch.float64)
        likely[..., symbols] = 0
        likely[:, length - 1 :] = 0
        likely[:, length - 1, symbols] = 1
        likely[:, length:] = torch.nn.functional.one_hot(ids[:, :length], symbols + 1).double()
        return certain(likely)

    return Predictor(logits)


def adder(modulus):
    def logits(ids):
        likely = torch.full((*ids.shape, modulus), 1 / modulus, dtype=torch.float64)
        sums = (ids[:, :-1] + ids[:, 1:]) % modulus
        likely[:, 1::3] = torch.nn.functional.one_hot(sums[:, ::3], modulus).double()
        return certain(likely)

    return Predictor(logits)


@pytest.mark.parametrize(
    ("task", "best"),
    [
        (copying(symbols=5, length=4), copier(5, 4)),
        (modular_addition(modulus=7, problems=3), adder(7)),
    ],
)
def test_the_best_predictor_of_a_task_of_chance_and_certainty_reaches_its_floor(task, best):
    # Every random token costs log(symbols) exactly, whatever is drawn.
    ids = first(task, 50)
    assert ids.shape == (50, task.window + 1)
    assert ids.min() >= 0
    assert ids.max() < task.vocabulary
    assert next_token_loss(best, (ids,)).item() == pytest.approx(task.floor, rel=1e-6)


def test_what_is_copied_and_added_varies():
    copied = first(copying(symbols=5, length=4), 200)
    assert set(copied[:, :4].flatten().tolist()) == set(range(5))
    assert torch.equal(copied[:, :4], copied[:, 5:])
    added = first(modular_addition(modulus=7, problems=2), 200)
    assert torch.equal((added[:, 0] + added[:, 1]) % 7, added[:, 2])
    assert set(added[:, 2].tolist()) == set(range(7))


def probability(ids, likely, contexts, symbols, order):
    """Of one sequence of the chain, from its definition."""
    start = sum(symbol * symbols ** (order - 1 - place) for place, symbol in enumerate(ids[:order]))
    value, context = contexts[start].item(), start
    for symbol in ids[order:]:
        value *= likely[context, symbol].item()
        context = (context * symbols + symbol) % symbols**order
    return value


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_floor_of_a_chain_is_the_entropy_of_all_its_sequences(order):
    symbols, window = 2, 5
    likely = transitions(symbols=symbols, order=order, sharpness=1.5, seed=3)
    contexts = stationary(likely)
    every = [
        probability(ids, likely, contexts, symbols, order)
        for ids in itertools.product(range(symbols), repeat=window + 1)
    ]
    assert sum(every) == pytest.approx(1, abs=1e-12)
    whole = -sum(value * math.log(value) for value in every)
    share = contexts.view(symbols, -1).sum(1)
    first_symbol = -(share * share.log()).sum().item()
    task = markov_chain(symbols=symbols, window=window, order=order, seed=3)
    # The chain rule: all but the first symbol are predicted.
    assert task.floor == pytest.approx((whole - first_symbol) / window, rel=1e-12)


def test_two_states_have_the_entropy_rate_of_the_textbook():
    likely = torch.tensor([[0.9, 0.1], [0.3, 0.7]], dtype=torch.float64)
    torch.testing.assert_close(stationary(likely), torch.tensor([0.75, 0.25], dtype=torch.float64))


def test_a_chain_without_sharpness_is_chance():
    assert markov_chain(symbols=8, window=10, sharpness=0).floor == pytest.approx(math.log(8))


@pytest.mark.parametrize("order", [1, 2])
def test_who_knows_the_transitions_measures_the_floor(order):
    symbols, window, sequences = 6, 40, 4000
    likely = transitions(symbols=symbols, order=order, sharpness=1.5, seed=1)
    start = stationary(likely).view(symbols, -1)

    def logits(ids):
        if order == 1:
            return likely[ids].log()
        context = symbols * ids[:, :-1] + ids[:, 1:]
        opening = (start / start.sum(1, keepdim=True))[ids[:, :1]]
        return torch.cat([opening, likely[context]], dim=1).log()

    task = markov_chain(symbols=symbols, window=window, order=order, seed=1)
    ids = first(task, sequences)
    measured = next_token_loss(Predictor(logits), (ids,)).item()
    # 160,000 tokens of a standard deviation near 1 nat: the mean errs by some 0.003.
    assert measured == pytest.approx(task.floor, abs=0.01)
    counted = torch.bincount(ids.flatten(), minlength=symbols) / ids.numel()
    torch.testing.assert_close(counted.double(), start.sum(1), rtol=0, atol=0.01)


def test_a_seed_tells_the_batches():
    task = markov_chain(symbols=6, window=9)
    assert torch.equal(first(task, 4, seed=2), first(task, 4, seed=2))
    assert not torch.equal(first(task, 4, seed=2), first(task, 4, seed=3))
    assert first(task, 4).dtype == torch.long
    stream = task.batches(batch=4, seed=2)
    assert not torch.equal(next(stream)[0], next(stream)[0])


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: copying(symbols=0, length=3), "symbols must be at least 1, got 0"),
        (lambda: modular_addition(modulus=3, problems=0), "problems must be at least 1, got 0"),
        (lambda: markov_chain(symbols=3, window=2, order=3), "window must be at least the order, 3, got 2"),
    ],
)
def test_sizes_that_give_no_task_are_refused(build, words):
    with pytest.raises(InputError, match=words):
        build()
