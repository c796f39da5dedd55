"""Record the norms of an ONNX model in onnxruntime; `normkit record --template` writes normkit_recorder.py beside this.

    python record_onnxruntime.py MODEL.onnx IDS.npy FILE.safetensors

IDS holds the token ids, of shape (batch, length). Norms that one operator computes are found; for a norm of several
operators, name the tensors that enter and leave it in PAIRS.
"""

import sys

import numpy
import onnx
import onnxruntime
from normkit_recorder import Recorder
from onnx import numpy_helper

OPERATORS = {"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}
FUSED = {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}  # the second input is added to the first
PAIRS: dict[str, tuple[str, str]] = {}  # path -> (tensor that enters, tensor that leaves)

source, ids, file = sys.argv[1:]
model = onnx.load(source)
stored = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
nodes = [node for node in model.graph.node if node.op_type in OPERATORS | FUSED]
taken = {name for node in nodes for name in (*node.input, node.output[0])}.union(*PAIRS.values())

# Every tensor that enters or leaves a norm becomes an output; their types are left to onnxruntime.
outputs = {each.name for each in model.graph.output}
inputs = {each.name: each for each in model.graph.input}
for name in sorted(taken - outputs - stored.keys() - inputs.keys() - {""}):
    model.graph.output.append(onnx.ValueInfoProto(name=name))
options = onnxruntime.SessionOptions()
# As the file has it: what onnxruntime fuses would be no longer there.
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
ids = numpy.load(ids)
fed = {name: ids if "mask" not in name else numpy.ones_like(ids) for name in inputs if name not in stored}
names = [each.name for each in session.get_outputs()]
values = {**stored, **fed, **dict(zip(names, session.run(names, fed), strict=True))}

recorder = Recorder()
for node in nodes:
    first = 2 if node.op_type in FUSED else 1
    weight, bias = ([values[name] for name in node.input[first:] if name] + [None, None])[:2]
    residual = values[node.input[1]] if node.op_type in FUSED else None
    recorder.add(node.name or node.output[0], values[node.input[0]], values[node.output[0]], weight, bias, residual)
for path, (entering, leaving) in PAIRS.items():
    recorder.add(path, values[entering], values[leaving])
recorder.save(file, tokens=ids, outputs=values.get("logits"), runtime=f"onnxruntime {onnxruntime.__version__}")
print(f"wrote {file}: {len(nodes) + len(PAIRS)} norms")
