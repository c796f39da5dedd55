"""How fast norms are here, beside what else computes them; every answer is checked before it is timed.

allocation.py     the memory allocator's settings
cases.py          Case: an operation, a shape, a dtype and a pass; the tensors of one
peers.py          who takes part, and how each is called
gpu_peers.py      who takes part on a GPU
checking.py       how far an answer is from float64
timing.py         medians and spreads of interleaved rounds; bytes kept for backward
device_timing.py  the same on a GPU: device time and host time
devices.py        what a run is measured on: the CPU, or a GPU
results.py        what was measured, as frozen values
running.py        cases -> Benchmark
table.py          Benchmark -> tables
"""
