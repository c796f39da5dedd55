"""How fast norms are here, beside what else computes them; every answer is checked before it is timed.

allocation.py  the memory allocator's settings
cases.py       Case: an operation, a shape, a dtype and a pass; the tensors of one
peers.py       who takes part, on the CPU and on a GPU, and how each is called
timing.py      medians and spreads of interleaved rounds, on the CPU and on a GPU; bytes kept for backward
devices.py     what a run is measured on: the CPU, or a GPU
results.py     what was measured, as frozen values
running.py     cases -> Benchmark: how far each answer is from float64, and its time
table.py       Benchmark -> tables
"""
