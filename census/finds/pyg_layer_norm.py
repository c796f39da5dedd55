"""PyTorch Geometric: `LayerNorm` adds eps outside the root without `batch` and inside it with `batch`.

    python census/finds/pyg_layer_norm.py

The effect is that on a GCN of the imports of Python's standard library: files are nodes, their words are features,
their folder is the class. The report is docs/wild/reports/pyg_layer_norm.md.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
import torch_geometric.nn.norm.layer_norm as theirs
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GCNConv
from torch_geometric.utils import to_undirected

import normkit as nk
from patching import fixed, versions


class EachGraph(torch.nn.Module):
    """The norm of graphs of one size, (graphs, nodes, features), one call a graph or one call with `batch`."""

    def __init__(self, norm, batched):
        super().__init__()
        self.norm, self.batched = norm, batched

    def forward(self, x):
        if not self.batched:
            return torch.stack([self.norm(graph) for graph in x])
        batch = torch.arange(len(x)).repeat_interleave(x.shape[1])
        return self.norm(x.flatten(0, 1), batch).view_as(x)


def show(layer_norm):
    torch.manual_seed(0)
    norm, one_graph = layer_norm(16), torch.zeros(10, dtype=torch.long)
    for batched in (False, True):
        spec = nk.identify(EachGraph(layer_norm(16), batched), (2, 6, 16)).spec
        print(f"  normkit, {'with batch' if batched else 'without'}: eps {spec.eps:g} is {spec.eps_placement} the root")
    x = torch.randn(10, 16)
    for std in (1, 1e-2, 1e-3):
        print(f"  std {std:g}: without / with batch = {(norm(std * x) / norm(std * x, one_graph)).median():.4f}")


def library(folders=("asyncio", "email", "encodings", "idlelib", "json", "multiprocessing", "unittest"), words=1433):
    """Features (rows of sum 1), edges and classes of the files of folders of the standard library."""
    files = [path for name in folders for path in sorted(Path(sysconfig.get_path("stdlib"), name).rglob("*.py"))]
    files = [path for path in files if "test" not in path.parts]
    texts = [Counter(re.findall(r"[a-z]{3,}", path.read_text(encoding="utf-8").lower())) for path in files]
    common = [word for word, _ in Counter(word for text in texts for word in text).most_common(words)]
    x = torch.tensor([[float(word in text) for word in common] for text in texts])
    imports = [set(re.findall(r"import (\w+)|from \.?(\w+)", path.read_text(encoding="utf-8"))) for path in files]
    named = [{name for pair in pairs for name in pair} for pairs in imports]
    edges = [(i, j) for i, names in enumerate(named) for j, path in enumerate(files) if path.stem in names]
    classes = [next(i for i, name in enumerate(folders) if name in path.parts) for path in files]
    x = x / x.sum(1, keepdim=True).clamp(min=1)
    return x, to_undirected(torch.tensor(edges).t(), num_nodes=len(files)), torch.tensor(classes)


class Network(torch.nn.Module):
    """Two convolutions, a norm before each."""

    def __init__(self, layer_norm, *sizes):
        super().__init__()
        self.norms = torch.nn.ModuleList([layer_norm(size) for size in sizes[:2]])
        self.convolutions = torch.nn.ModuleList([GCNConv(*sizes[:2]), GCNConv(*sizes[1:])])

    def forward(self, x, edges, batch):
        x = self.convolutions[0](self.norms[0](x, batch), edges).relu()
        return self.convolutions[1](self.norms[1](x, batch), edges)


def trained(layer_norm):
    """A network trained with `batch`, as with a DataLoader, and asked without, as of a single graph."""
    x, edges, classes = library()
    torch.manual_seed(0)
    held = torch.rand(len(x)) < 0.5
    model = Network(layer_norm, x.shape[1], 16, int(classes.max()) + 1)
    batch = torch.zeros(len(x), dtype=torch.long)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    answers = {}
    for step in range(201):
        if step in (0, 200):
            with torch.no_grad():
                answers[step] = [model.eval()(x, edges, each) for each in (batch, None)]
        optimizer.zero_grad()
        cross_entropy(model.train()(x, edges, batch)[~held], classes[~held]).backward()
        optimizer.step()
    print(f"  GCN, {len(x)} files, {edges.shape[1]} edges, standard deviation of the features {x.std():.5f}")
    for step, (given, left_out) in answers.items():
        off = (given - left_out).abs().max()
        print(f"  step {step}: largest logit {given.abs().max():.4f}, off without batch by {off:.4f}")
    right = [(y.argmax(1) == classes)[held].double().mean().item() for y in answers[200]]
    print(f"  accuracy on held-out files: with batch {right[0]:.4f}, without {right[1]:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(versions("torch", "torch-geometric"))
    for title, module in (("as installed", theirs), ("with the fix", fixed("pyg_layer_norm", theirs))):
        print(title)
        show(module.LayerNorm)
        trained(module.LayerNorm)
