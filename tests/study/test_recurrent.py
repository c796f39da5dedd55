import torch
from torch.nn import functional as F

from normkit import specs
from normkit.study.norms import BatchNorm
from normkit.study.recurrent import Recurrent, RecurrentConfig


def test_it_is_the_recurrence_of_its_docstring():
    model = Recurrent(RecurrentConfig(inputs=3, width=5, outputs=2), seed=1)
    x, state = torch.randn(4, 6, 3), torch.zeros(4, 5)
    states = []
    for time in range(6):
        summed = F.linear(x[:, time], model.incoming.weight, model.incoming.bias) + state @ model.recurrent.weight.T
        state = torch.tanh(F.layer_norm(summed, (5,)))
        states.append(state)
    torch.testing.assert_close(model.states(x), torch.stack(states, 1))
    torch.testing.assert_close(model(x), model.output(state))


def test_a_state_knows_nothing_of_later_inputs():
    model = Recurrent(RecurrentConfig(inputs=3))
    x = torch.randn(2, 6, 3)
    changed = torch.cat([x[:, :4], torch.randn(2, 2, 3)], 1)
    assert torch.equal(model.states(x)[:, :4], model.states(changed)[:, :4])
    assert not torch.equal(model.states(x)[:, 4], model.states(changed)[:, 4])


def test_norms_of_single_times_see_their_time_and_the_last_serves_all_later_ones():
    model = Recurrent(RecurrentConfig(inputs=3, width=5, norm=BatchNorm, norms=3))
    model(torch.randn(8, 6, 3))
    assert [int(norm.num_batches_tracked) for norm in model.norms] == [1, 1, 4]
    one = Recurrent(RecurrentConfig(inputs=3, width=5, norm=BatchNorm))
    one(torch.randn(8, 6, 3))
    assert [int(norm.num_batches_tracked) for norm in one.norms] == [6]


def test_nets_of_one_seed_share_their_weights_whatever_their_norms():
    first, second = (Recurrent(RecurrentConfig(norm=norm), seed=2) for norm in (None, specs.TORCH_RMS_NORM))
    assert all(torch.equal(weight, dict(second.named_parameters())[path]) for path, weight in first.named_parameters())
