"""From behaviour to a spec.

state.py       what a look at a model puts back: random generators, settings, modes, buffers, attributes
tracing.py     one forward pass recorded: which modules and functions were called, in order
specimen.py    the norm under test: a copy of a module or a function; how finely each dtype shows a formula
other_sizes.py  lengths of rows that change with the sizes of other axes
coupling.py    which outputs move when inputs change: the rows that share statistics, positions in time
formula.py     rows too long to feel eps: what is subtracted, what divides, with any gain and bias
gain_and_bias.py  which parameters gain and bias are
structure.py   the three above in one: everything but eps, the divisor and the casts
eps_and_divisor.py  small inputs: where eps enters, n, n - 1 or none, and which eps was meant
half_precision_calls.py  calls in 16 bits, and how many outputs a program gives bit for bit
cast_program.py  where the norm rounds to 16 bits
conditioning.py  rows that are hard on a norm: large means, constants, zeros, one large element
calling.py     how a norm can be called: its arguments, parameters, arrays of numpy, shapes; one clear line if it cannot
side_effects.py  what a call does beside its result: to the input, to a state, in training mode
other_verdicts.py  the verdict where no spec fits: batch norms, faulty norms, and by way of the next three
maps.py        identity, affine, linear and elementwise maps, softmax
gating.py      norms of two inputs: gated, adaptive, of a sum
direction.py   norms that subtract another direction than all-ones
passport.py    the result: conventions, evidence, confidence
behaviour.py   `identify`: all of it, in order -> Passport
finder.py      which modules of a model are norms: the only finder
sites.py       every norm that one forward pass calls, in order
products.py    products of 16-bit matrices in float32, where the CPU has no instructions for them
sharding.py    parameters that are distributed over processes
offloading.py  parameters that accelerate reads for each call
side_by_side.py  runs beside one another, which read such parameters once for all of them
row_sizes.py   an approximate root; norms of which large rows get something else
row_fits.py    fits of recorded rows, and the scales that their factors may come from
recorded_rows.py  `identify_rows`: from recorded inputs and outputs alone -> Passport
report.py      passports as Sections
book.py        the passports of one model as one JSON file
"""
