"""A model watched while it trains: measured in the step, judged beside it, and explained when it breaks.

inputs.py            statistics of the batches and labels
parameters.py        what each parameter is, sums of squares, and how far it moves
batch_norms.py       what enters batch norms, against their running statistics
modulations.py       what a condition does to the output of adaptive norms
loop.py              checks how the training loop uses complete gradients
step_recorder.py     everything that is measured of one model in its steps
ranks.py             the processes: what they pool, and what each of them holds
rendezvous.py        how they find each other at the start, and test counting and pooling on known numbers
startup.py           how a watch begins: what a model is made of, which weights a norm makes insensitive
change_tracker.py    updates, changes from outside, norms and blocks that stop
time_series.py       series over the steps, and whether something broke
onset.py             where it began
answers.py           the five questions
reporting.py         from all that to an `Inspection`; what is said, each thing once, and the files
watcher.py           `watch`: composes all of the above
callback.py          what the two callbacks share
trainer.py           the watch as a callback of `transformers.Trainer`
lightning.py         the watch as a callback of Lightning
"""
