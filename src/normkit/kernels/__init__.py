"""The fast kernels; `reference.py` computes everything that they do not support.

signatures.py  the operators that they implement, and which norms any kernel computes
cpu.py         the compiled library: found, loaded once, its instruction set chosen; which norms it can compute
csrc/          its C++, built by setup.py: it registers implementations of the operators that ops/schemas.py defines
triton/        the kernels of a GPU
"""
