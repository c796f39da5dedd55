"""A port against its reference: which norms differ, in which conventions, and what that does to the rows that arrive.

pairing.py      which norm of a port stands for which of its reference, and in which conventions they differ
effects.py      how far two formulas are apart on the rows that arrive
differences.py  what a comparison found, as frozen values with JSON out
contrasts.py    the norms of one side, and what can be said of two before their runs are compared
recording.py    what entered and left each norm, in memory or in a file that any runtime can write
torch_recorder.py  writes that down for a torch model
rows.py         where the first difference of two recordings is born, how it grows, what explains it
row_places.py   which calls of two recordings stand for each other
row_causes.py   what explains a difference of rows
norm_causes.py  the same at a norm that does not follow the reference's formula
own_rounding.py  how far a model is from itself
normkit_recorder.py  writes that file with numpy alone, for runtimes without normkit
onnx_file.py    an .onnx file: its parameters, its norms, named and identified, a run of it that is recorded
onnx_skeleton.py   reads such a file but for the values of its large tensors, and trusts none of its parts
onnx_tensors.py    those values, a few rows at a time, quantized ones as numbers
onnx_graph.py      where norms may be in a graph, from its structure
onnx_running.py    cuts each out of the graph and runs it
onnx_recording.py  runs the model and keeps the rows of its norms
sides.py        the two sides of a comparison, opened from what the user gave
comparing.py    `compare`: each level that both sides offer
causes.py       why a port differs, one sentence for each cause
report.py       all of it in words

weights.py         parameters as they are stored: of a folder, a file, arrays or a module
gguf_file.py       those of a GGUF file, and what its metadata must say (gguf_header.py reads the header)
quantized.py       matrices that MLX quantized, and the grids of quantized numbers
running_statistics.py  mean and variance of batch norms
parameters.py      which tensors are gains and biases of norms
parameter_pairs.py which norm of one file stands for which of another, by names, by values where these do not tell
relations.py       how one vector follows from another, exactly or after rounding
folded_gains.py    gains that are in the readers of their norm
folded_batch_norms.py  batch norms that are in the map beside them, rightly or not
scaled_maps.py     weights of two models whose channels are multiples of each other
runtimes.py        what a runtime computes from a stored gain (runtimes.toml)
values.py          the relation of every gain and bias, and whether it is right
value_groups.py    many of them, told together; vectors that are another norm's, layers in another order
other_tensors.py   the tensors that are not of norms: names, shapes, and a few rows of each matrix
metadata.py        eps of each norm, as stored and as its class uses it, in words too
stored_gains.py    how one file stores its gains, without a reference, in words too
settings.py        keys of config.json or of a GGUF that differ (settings.toml)
"""
