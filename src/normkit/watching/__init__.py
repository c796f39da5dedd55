"""A model watched while it trains: measured in the step, judged beside it, and explained when it breaks.

tables.py            tables on the device, summed or largest kept; packed into one vector, copied to the host
row_counters.py      how rows and gradients of activations are counted, in plain tensor operations
logits.py            how attention logits are counted
hooks.py             hooks that never end a training, and that no copy of the model holds
layout.py            what is measured where
instruments.py       the hooks in the model, and the switch that turns them on and off
inputs.py            what the model is fed, and its labels
parameters.py        what each parameter is, sums of squares, and how far it moves
loop.py              what the training loop does with complete gradients
step_recorder.py     everything that is measured of one model in its steps
ranks.py             the processes: what they pool, and what each of them holds
rendezvous.py        how they find each other at the start
verification.py      the pooling proved on known numbers
surveying.py         what a model is made of, and which weights a norm makes insensitive
startup.py           how a watch begins: composes the four above
table_reader.py      the tables of a report as statistics
change_tracker.py    updates, changes from outside, norms and blocks that stop
time_series.py       series over the steps, and whether something broke
onset.py             where it began
answers.py           the five questions
build_inspection.py  from all that to an `Inspection`
messages.py          what is said, each thing once, and the files
watcher.py           `watch`: composes all of the above
trainer.py           the watch as a callback of `transformers.Trainer`
lightning.py         the watch as a callback of Lightning
"""
