"""The measuring engine: what a model's norms, blocks and attention do, seen from hooks.

facts.py, quantities.py, training.py  what is measured, as frozen values
running.py         runs a model on batches in evaluation mode
texts.py           windows of a text, or token ids at random, for a model from a folder
observing.py       hooks and one mode that tell a listener of every call of a norm, a block or attention
probing.py         the probe: one measured step over a text, with a sample of rows
hooks.py, instruments.py  hooks that never end a training and that a compiler traces; measured steps of a run
tables.py          tables on a device, summed or largest kept
row_counters.py    how rows and gradients are counted into tables, and read as statistics
attention.py       how attention logits are counted into tables, and read
layout.py          the line of each norm, block and attention in the tables, and their facts read from there
sampling.py        a sample of the rows of a norm
blocks.py          the repeated blocks of a model
block_response.py, placement.py  a block called again on a scaled stream: what that says about its norms
structure.py       all that one pass shows of how a model is built
effects.py, patches.py  norms in code, norms that nothing reads; patched and shared norms
row_leakage.py     which norms let rows know of others
weights.py         gains and biases: their spread, their outliers, outliers that recur, errors of their gradients
intent.py          what the stock class of the model's config computes at each norm
baseline.py        what a model is declared to be, read and written
history.py         series of a run: what is unusual in them, and the size of updates beside the parameters
"""
