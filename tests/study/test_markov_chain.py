import itertools
import math

import pytest
import torch
from torch import nn

from normkit.errors import InputError
from normkit.study.corpus import next_token_loss
from normkit.study.markov_chain import MarkovChain, stationary, transitions


def first(chain, batch, seed=0):
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


def test_two_states_have_the_stationary_distribution_of_the_textbook():
    likely = torch.tensor([[0.9, 0.1], [0.3, 0.7]], dtype=torch.float64)
    torch.testing.assert_close(stationary(likely), torch.tensor([0.75, 0.25], dtype=torch.float64))


def test_a_chain_without_sharpness_is_chance():
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
    ids = first(chain, 4000)
    assert ids.shape == (4000, 41)
    likely = transitions(6, 1.5)
    # 160,000 tokens of a standard deviation near 1 nat: the mean errs by some 0.003.
    assert next_token_loss(Predictor(likely), (ids,)).item() == pytest.approx(chain.floor, abs=0.01)
    counted = torch.bincount(ids.flatten(), minlength=6) / ids.numel()
    torch.testing.assert_close(counted.double(), stationary(likely), rtol=0, atol=0.01)


def test_a_seed_decides_the_batches():
    chain = MarkovChain(6, window=9)
    assert torch.equal(first(chain, 4, seed=2), first(chain, 4, seed=2))
    assert not torch.equal(first(chain, 4, seed=2), first(chain, 4, seed=3))
    assert first(chain, 4).dtype == torch.long
    stream = chain.batches(batch=4, seed=2)
    assert not torch.equal(next(stream)[0], next(stream)[0])


@pytest.mark.parametrize(("symbols", "window"), [(0, 3), (3, 0)])
def test_a_chain_has_symbols_and_a_window(symbols, window):
    with pytest.raises(InputError, match="must be at least 1, got 0"):
        MarkovChain(symbols, window=window)
