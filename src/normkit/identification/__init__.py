"""From behaviour to a spec.

tracing.py     one forward pass written down: which module and which function was called, in order
adapters.py    functions of given parameters and of numpy arrays, as modules and functions of one tensor
specimen.py    what is identified: a copy of a module that may be changed at will, or a function
coupling.py    which elements share statistics: the rows
formula.py     far from eps: what is subtracted, what divides, with whatever gain and bias
affine.py      which parameters gain and bias are
structure.py   the three above in one: everything but eps, the divisor and the casts
response.py    small inputs: where eps enters
divisor.py     n, n - 1 or none, and which eps was meant
arithmetic.py  a program's outputs in each usual order of operations
runs.py        calls in 16 bits, and how many outputs a program gives bit for bit
program.py     16 bits: where it rounds
precision.py   how finely each dtype shows a formula
conditioning.py  rows that are hard on a norm: large means, constants, zeros, one large element
calling.py     how it can be called, and one clear line where it cannot
conduct.py     what a call does beside its result: to the input, to a state, in training mode
causality.py   over time: which positions reach which
kinds.py       what no spec describes, named in a second look by the following
maps.py        identity, affine, linear, softmax; elementwise.py: the other maps of each input alone
batch.py       batch norms: over which axes, in which mode
gating.py      norms of two inputs: gated, adaptive, of a sum; second_input.py: how that is measured
direction.py   norms that subtract another direction than all-ones
behaviour.py   `identify`: all of it, in order -> Passport
sites.py       every norm of a model, in forward order: the only finder of norms
book.py        the passports of one model as one JSON file
"""
