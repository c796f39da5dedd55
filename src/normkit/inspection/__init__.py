"""From a model and some batches to an `Inspection`: measure, then judge.

result.py       what is found, as frozen values with JSON out: the contract with everything that draws
quantities.py   the numbers it is made of
moments.py      streaming statistics over rows, and how much eps shortens them
spectrum.py     gains and biases: their spread, their outliers, outliers that recur
attention.py    streaming statistics of attention logits
blocks.py       the repeated blocks of a model
observing.py    hooks and one mode that tell a listener of every call of a norm, a block or attention
replaying.py    a block called again on its own arguments, with the stream scaled or a norm altered
fingerprint.py  what a block's answers to two scales say about its norms: the verdict, and each norm's role
placement.py    one run in which every block is replayed
gauges.py       the accumulators of one norm
probing.py      the probe: everything measured while a model runs
intent.py       what the stock class of the model's config computes at each norm
baseline.py     what a model is meant to be: inferred, declared by a file, read and written
trials.py       pairs of small batches that differ in what some rows should not know of
leaks.py        which norms let such a difference in, in evaluation and in training mode
sharing.py      norms that serve several places
walk.py         one token's vector through one norm, stage by stage
running.py      how a model is run to be looked at
pairing.py      which norm of a port stands for which of its reference, and in which conventions they differ
effects.py      how far two formulas are apart on the rows that arrive
divergence.py   where two runs begin to differ
differences.py  what a comparison found, as frozen values with JSON out
contrasts.py    what can be said of two norms before anything is run
comparison.py   `compare`: a model against its reference, composed of the six above
rules/          what is wrong, one file a group
inspecting.py   `inspect`: composes all of the above
"""
