"""The page's random numbers: repeatable, and distributed as they say."""

import math

import pytest
import torch

pytestmark = pytest.mark.browser

MASK = 2**32 - 1


def mulberry32(seed):
    """The generator of Tommy Ettinger, in whole numbers."""
    state = seed
    while True:
        state = (state + 0x6D2B79F5) & MASK
        bits = (state ^ state >> 15) * (state | 1) & MASK
        bits ^= bits + ((bits ^ bits >> 7) * (bits | 61) & MASK) & MASK
        yield ((bits ^ bits >> 14) + 0.5) / 2**32


def drawn(modules, seed, count):
    script = """async ([seed, count]) => {
      const { normals, uniform } = await load("random.js");
      const next = uniform(seed);
      return { uniform: Array.from({ length: count }, next), normals: normals(count, next) };
    }"""
    return modules.run(script, [seed, count])


def test_the_numbers_of_a_seed_are_always_the_same_and_seeds_differ(modules):
    for seed in (0, 1, 12345, MASK):
        found = drawn(modules, seed, 100)
        expected = mulberry32(seed)
        assert found["uniform"] == [next(expected) for _ in range(100)]
        for first, second in zip(found["normals"][::2], found["normals"][1::2], strict=True):
            radius, angle = math.sqrt(-2 * math.log(next(expected))), 2 * math.pi * next(expected)
            # As far as two libraries agree on a cosine near its zeros.
            assert [first, second] == pytest.approx([radius * math.cos(angle), radius * math.sin(angle)], abs=1e-14)
    assert len({drawn(modules, seed, 2)["uniform"][0] for seed in range(20)}) == 20


def test_the_numbers_are_normal(modules):
    found = drawn(modules, 7, 40000)
    uniform, normals = torch.tensor(found["uniform"]), torch.tensor(found["normals"])
    assert uniform.min() > 0
    assert uniform.max() < 1
    # Four standard errors of each moment.
    tolerance = 4 / math.sqrt(len(normals))
    assert abs(float(uniform.mean()) - 0.5) < tolerance * math.sqrt(1 / 12)
    assert abs(float(normals.mean())) < tolerance
    assert abs(float(normals.square().mean()) - 1) < tolerance * math.sqrt(2)
    assert abs(float(normals.pow(3).mean())) < tolerance * math.sqrt(15)
    assert abs(float(normals.pow(4).mean()) - 3) < tolerance * math.sqrt(96)
    assert abs(float((normals[1:] * normals[:-1]).mean())) < tolerance
