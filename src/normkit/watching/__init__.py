"""A model watched while it trains: measured in the step, judged beside it, and explained when it breaks.

tables.py        tables on the device, summed or largest kept; packed into one vector
tallies.py       how rows are counted into them, in plain tensor operations
logits.py        how attention logits are counted
taps.py          the gradient of an activation, counted on its way back
hooks.py         hooks that never end a training, and that no copy of the model holds
instruments.py   the hooks in the model, and the switch that turns them on and off
gradients.py     sums of squares of parameters and gradients
updates.py       how far each parameter moves in an optimizer step
parameters.py    what each parameter is, and what the optimizers do with it
gauging.py       everything that is measured of one model in its steps
mailbox.py       numbers on their way to the host, which nobody waits for
ranks.py         the processes: what they pool, and what each of them holds
meeting.py       how they meet at the start
holdings.py      parameters of norms that are split over processes
verification.py  the pooling proved on known numbers
surveying.py     what a model is made of, seen on a small part of a batch
invariance.py    which weights' length makes no difference to the output
subject.py       what is known of the model before its first step
beginning.py     how a watch begins: composes the five above
readings.py      tables read: norms, blocks and attentions as an inspection has them
chronicle.py     series over the steps, and whether something broke
onset.py         where it began
answers.py       the four questions
judgement.py     from all that to an `Inspection`
journal.py       the files that are written
voice.py         what is said, each thing once
watcher.py       `watch`: composes all of the above
trainer.py       the watch as a callback of `transformers.Trainer`
lightning.py     the watch as a callback of Lightning
"""
