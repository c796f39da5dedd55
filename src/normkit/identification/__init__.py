"""From behaviour to a spec.

tracing.py     one forward pass written down: which module and which function was called, in order
specimen.py    what is identified: a copy of a module that may be changed at will, or a function
coupling.py    which elements share statistics: the rows
formula.py     far from eps: what is subtracted, what divides, with whatever gain and bias
affine.py      which parameters gain and bias are
structure.py   the three above in one: everything but eps, the divisor and the casts
response.py    small inputs: where eps enters
divisor.py     n, n - 1 or none, and which eps was meant
program.py     16 bits: where it rounds
behaviour.py   `identify`: all of it, in order -> Passport
sites.py       every norm of a model, in forward order: the only finder of norms
"""
