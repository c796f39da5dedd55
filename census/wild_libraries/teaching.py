"""PyTorch Geometric, fair-esm, and code that teaches: labml and the Annotated Transformer."""

from __future__ import annotations

import torch
from torch import nn

from wild_libraries.rows import (
    BATCH_PAPER,
    GROUP,
    GROUP_PAPER,
    INSTANCE_PAPER,
    LAYER,
    LAYER_PAPER,
    OWN_SOURCE,
    Row,
    made,
)

PACKAGES = {"torch_geometric": "torch-geometric", "esm": "fair-esm", "labml_nn": "labml-nn"}
GRAPH = "torch_geometric.nn.norm"
LABML = "labml_nn.normalization"
IMAGE = (2, 64, 5, 5)
BATCH = {"verdict": "batch"}
# All nodes of one graph are one row: a batch of graphs is a vector that says which node is of which.
OF_GRAPHS = LAYER | {"axes": (-2, -1)}


def graphs(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Graphs of equally many nodes, one after the other, as PyTorch Geometric batches them."""
    which = torch.arange(x.shape[0]).repeat_interleave(x.shape[1])
    return norm(x.flatten(0, 1), which).reshape(x.shape)


def one_graph(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Each graph by itself, without a batch vector."""
    return torch.stack([norm(each) for each in x])


class Annotated(nn.Module):
    """The LayerNorm of the page: gain, bias and torch.std, whose default divides by n - 1."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """gain (x - mean) / (std + 1e-6) + bias."""
        return self.gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.bias


ROWS = [
    Row(
        path=f"{GRAPH}.layer_norm:LayerNorm",
        variant='mode="node"',
        make=made(mode="node"),
        expected=LAYER,
        source=f"{LAYER_PAPER}, named in its docstring",
    ),
    Row(
        path=f"{GRAPH}.layer_norm:LayerNorm",
        variant='mode="graph", with a batch vector',
        make=made(),
        call=graphs,
        shape=(2, 3, 64),
        expected=OF_GRAPHS,
        source="its docstring: (x - E[x]) / sqrt(Var[x] + eps) over all nodes of a graph",
    ),
    Row(
        path=f"{GRAPH}.layer_norm:LayerNorm",
        variant='mode="graph", without a batch vector',
        make=made(),
        call=one_graph,
        shape=(2, 3, 64),
        expected=OF_GRAPHS,
        source="its docstring: (x - E[x]) / sqrt(Var[x] + eps) over all nodes of a graph",
        differs=(OWN_SOURCE, "The same module with a batch vector has eps inside the root, as its docstring."),
    ),
    Row(
        path=f"{GRAPH}.batch_norm:BatchNorm",
        make=made(),
        shape=(8, 64),
        expected=BATCH,
        source=f"{BATCH_PAPER}, named in its docstring",
    ),
    Row(
        path=f"{GRAPH}.instance_norm:InstanceNorm",
        variant="with a batch vector",
        make=made(affine=True),
        call=lambda norm, x: graphs(norm, x.mT).mT,
        shape=(2, 64, 5),
        expected=GROUP | {"groups": 64},
        source=f"{INSTANCE_PAPER}, named in its docstring",
    ),
    Row(
        path=f"{GRAPH}.graph_norm:GraphNorm",
        variant="with a batch vector",
        make=made(),
        call=graphs,
        expected={},
        source="Cai et al. 2021, eq. 3: a learned share of the mean over the nodes is subtracted",
    ),
    Row(
        path=f"{GRAPH}.pair_norm:PairNorm",
        variant="with a batch vector",
        make=lambda kind: kind(),
        call=graphs,
        expected={},
        source="Zhao and Akoglu 2020, eq. 10: one scale for all nodes of a graph, which are centred node by node",
    ),
    Row(
        path=f"{GRAPH}.mean_subtraction_norm:MeanSubtractionNorm",
        variant="with a batch vector",
        make=lambda kind: kind(),
        call=graphs,
        expected={"verdict": "linear"},
        source="its docstring: x - mean, which divides by nothing",
    ),
    Row(
        path=f"{GRAPH}.diff_group_norm:DiffGroupNorm",
        make=made(groups=4),
        shape=(8, 64),
        expected={"verdict": "not a norm"},
        source="Zhou et al. 2020, eq. 3: batch norms of the groups are added to the input",
    ),
    Row(
        path="esm.modules:ESM1LayerNorm",
        make=made(),
        expected=LAYER | {"eps": 1e-12},
        source="its docstring: as in TensorFlow, eps inside the root; BERT's 1e-12",
    ),
    Row(path="esm.modules:ESM1bLayerNorm", make=made(), expected=LAYER, source=f"{LAYER_PAPER}; apex's eps 1e-5"),
    Row(path=f"{LABML}.layer_norm:LayerNorm", make=made(), expected=LAYER, source=f"{LAYER_PAPER}, and its docstring"),
    Row(
        path=f"{LABML}.group_norm:GroupNorm",
        make=lambda kind: made()(lambda width: kind(4, width)),
        shape=IMAGE,
        expected=GROUP | {"groups": 4},
        source=f"{GROUP_PAPER}, named in its docstring",
    ),
    Row(
        path=f"{LABML}.instance_norm:InstanceNorm",
        make=made(),
        shape=IMAGE,
        expected=GROUP | {"groups": 64},
        source=f"{INSTANCE_PAPER}, named in its docstring",
    ),
    Row(
        path=f"{LABML}.batch_channel_norm:ChannelNorm",
        make=made(4),
        shape=IMAGE,
        expected={},
        source="its docstring: group norm with one gain and bias for each group",
    ),
    Row(
        path=f"{LABML}.batch_norm:BatchNorm",
        make=made(),
        shape=IMAGE,
        expected=BATCH,
        source=f"{BATCH_PAPER}, named in its docstring",
    ),
    Row(
        path=f"{LABML}.deep_norm:DeepNorm",
        variant="alpha 2, nothing from the branch",
        make=lambda kind: made()(lambda width: kind(2.0, width)),
        call=lambda norm, x: norm(x, torch.zeros_like(x)),
        expected=LAYER | {"eps": 1e-5 / 4},
        source="Wang et al. 2022, eq. 1 and its docstring: LN(alpha x + G(x)), so that eps is felt a fourth as much",
        differs=(OWN_SOURCE, "It computes LN(x + alpha G(x)): alpha multiplies the branch and not the stream."),
    ),
    Row(
        path="labml_nn.rwkv:LayerNorm",
        make=made(bias=True),
        expected=LAYER,
        source=f"{LAYER_PAPER}; RWKV's eps 1e-5",
    ),
    Row(
        path="labml_nn.diffusion.stable_diffusion.model.unet:GroupNorm32",
        make=lambda kind: made()(lambda width: kind(32, width)),
        shape=IMAGE,
        expected=GROUP | {"groups": 32, "statistics_dtype": "float32"},
        source=f"{GROUP_PAPER}; its docstring: in float32",
    ),
    Row(
        path="the_annotated_transformer.py:325-327 LayerNorm",
        library="annotated-transformer",
        repository="harvardnlp/annotated-transformer@0a91a254735c07532e23733dce8a693e504f3a08",
        make=lambda _: made()(Annotated),
        expected=LAYER | {"eps": 1e-6},
        source=f"{LAYER_PAPER}, which the page cites",
        differs=(
            OWN_SOURCE,
            "It divides by std + eps, with torch.std's n - 1; the paper divides by sqrt of the mean square.",
        ),
    ),
]
