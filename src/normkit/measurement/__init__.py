"""The measuring engine: what a model's norms, blocks and attention do, seen from hooks, in a text or in a training.

`hooks.Hooks` is hooked into every norm, every block and every module that calls norms or attention as functions, and
tells a listener. The listener of an inspection and that of a watch derive from `instruments.Counts`: each row of what
enters and leaves a norm or a block is one sample, and is counted by `row_counters.RowCounter` into tables on the
device, with the C++ kernel where there is one; padding that the mask tells is left out. Queries and keys come in as
arguments of the attention call, and 16 rows of exact logits a batch element are counted. `sampling.Probe` is that for a
text, with 64 rows a norm looked at beside; `instruments.Instruments` is that for the steps of a training, where the
gradients of what leaves a block come in on their way back. `layout.MeasuredStep` reads the tables of either as facts,
and `rules.Facts` are made of them in one place, `inspection.result.facts_of`.

facts.py, training.py  what is measured, as frozen values
running.py         runs a model on batches in evaluation mode
texts.py           windows of a text, or token ids at random, for a model from a folder
hooks.py           the only hooks: a listener is told of every call of a norm, a block or attention
instruments.py     the listener that counts: rows of norms and blocks, logits, in a training gradients too
sampling.py        the same for a text, with a sample of the rows of each norm
row_counters.py    tables on a device; how rows and gradients are counted into them, and read as statistics
attention.py       how attention logits are counted into tables, and read
layout.py          norms, blocks and attention calls, their lines in the tables, and their facts read from there
block_response.py, placement.py  a block called again on a scaled stream: what that says about its norms
structure.py       all that one pass shows of how a model is built
effects.py, patches.py  norms in code, norms that nothing reads; patched and shared norms
row_leakage.py     which norms let rows know of others
weights.py         gains and biases: their spread, their outliers, outliers that recur, errors of their gradients
intent.py          what the stock class of the model's config computes at each norm
baseline.py        what a model is declared to be, read and written
history.py         series of a run: what is unusual in them, and the size of updates beside the parameters
"""
