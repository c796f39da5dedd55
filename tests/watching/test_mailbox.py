"""Letters are read in order, when they are there, and hold what was posted."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.watching.mailbox import CopyLetter, Mailbox


class Late:
    """A letter that arrives after it was asked for so many times."""

    def __init__(self, asked: int) -> None:
        self.asked = asked

    def has_arrived(self, patience: float = 0.0) -> bool:
        self.asked -= 1
        return self.asked < 0 or patience > 0

    def read(self) -> Tensor | None:
        return torch.zeros(1)


def test_a_letter_holds_what_was_posted():
    values = torch.ones(2)
    letter = CopyLetter(values)
    values.fill_(7)
    assert letter.has_arrived()
    found = letter.read()
    assert (found.dtype, found.tolist()) == (torch.float64, [1.0, 1.0])


def test_a_later_letter_waits_for_the_earlier():
    mailbox = Mailbox()
    mailbox.post(0, Late(asked=1))
    mailbox.post(1, CopyLetter(torch.ones(1)))
    assert list(mailbox.arrived()) == []
    assert [step for step, _ in mailbox.arrived()] == [0, 1]
    assert list(mailbox.arrived()) == []


def test_patience_brings_what_is_under_way():
    mailbox = Mailbox()
    mailbox.post(4, Late(asked=9))
    assert [step for step, _ in mailbox.arrived(1.0)] == [4]
