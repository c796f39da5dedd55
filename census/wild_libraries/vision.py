"""timm and x-transformers."""

from __future__ import annotations

from wild_libraries.rows import (
    BATCH_PAPER,
    CHOICE,
    GROUP,
    GROUP_PAPER,
    LAYER,
    LAYER_PAPER,
    PLAIN,
    RMS,
    RMS_PAPER,
    Row,
    loose,
    made,
)

PACKAGES = {"timm": "timm", "x_transformers": "x-transformers"}
IMAGE = (2, 64, 5, 5)
CHANNELS = {"axes": (1,)}
# timm.layers imports much of timm, and torchvision for one class.
loose("timm.layers")
loose("torchvision.ops")


CONVNEXT = "ConvNeXt, facebookresearch/ConvNeXt models/convnext.py: eps 1e-6"
TIMM_RMS = f"{RMS_PAPER}; eps 1e-6 as in Llama, meta-llama/llama model.py"
TORCH_DEFAULT = "eps 1e-5 as torch.nn documents"
META = "MetaFormer, sail-sg/metaformer metaformer_baselines.py: no bias, eps 1e-6"
SIMPLE = RMS | {"centre_statistics": True, "correction": 1}
SIMPLE_SOURCE = "its docstring, x / std(x), with torch.std's n - 1"
FILTER = "Singh and Krishnan 2019, eq. 1 to 3"
RESPONSE = RMS | {"has_bias": True, "axes": "all_but_batch", "groups": 64, "eps": 1e-5}
PAIR = RMS | {"eps_placement": "clamp", "reduction": "sum", "multiplier": "sqrt_n", "eps": 1e-12}
X_RMS = (
    f"{RMS_PAPER} over the L2 norm, as the readme of x-transformers has it; F.normalize documents its clamp at 1e-12"
)
UNIT = {"weight_offset": 1.0}
BARE = {"apply_act": False}
NORM_ACT = "its name: the norm of the same name in timm.layers.norm, then an activation"

ROWS = [
    *(
        Row(path=f"timm.layers.norm:{name}", make=made(), expected=LAYER | {"eps": 1e-6}, source=source)
        for name, source in (("LayerNorm", CONVNEXT), ("LayerNormFp32", CONVNEXT))
    ),
    *(
        Row(
            path=f"timm.layers.norm:{name}",
            make=made(),
            shape=IMAGE,
            expected=LAYER | CHANNELS | {"eps": 1e-6},
            source=CONVNEXT,
        )
        for name in ("LayerNorm2d", "LayerNorm2dFp32", "LayerNormExp2d")
    ),
    Row(
        path="timm.layers.norm:GroupNorm",
        make=made(num_groups=4),
        shape=IMAGE,
        expected=GROUP | {"groups": 4},
        source=f"{GROUP_PAPER}; {TORCH_DEFAULT}",
    ),
    Row(
        path="timm.layers.norm:GroupNorm1",
        make=made(),
        shape=IMAGE,
        expected=GROUP,
        source="PoolFormer, sail-sg/poolformer models/poolformer.py: GroupNorm of one group",
    ),
    Row(path="timm.layers.norm:RmsNorm", make=made(), expected=RMS, source=TIMM_RMS),
    Row(
        path="timm.layers.norm:RmsNorm",
        variant="affine=False",
        make=made(affine=False),
        expected=RMS | PLAIN,
        source=TIMM_RMS,
    ),
    Row(path="timm.layers.norm:RmsNormFp32", make=made(), expected=RMS, source=TIMM_RMS),
    *(
        Row(path=f"timm.layers.norm:{name}", make=made(), shape=IMAGE, expected=RMS | CHANNELS, source=TIMM_RMS)
        for name in ("RmsNorm2d", "RmsNorm2dFp32")
    ),
    *(
        Row(path=f"timm.layers.norm:{name}", make=made(), expected=SIMPLE, source=SIMPLE_SOURCE)
        for name in ("SimpleNorm", "SimpleNormFp32")
    ),
    *(
        Row(path=f"timm.layers.norm:{name}", make=made(), shape=IMAGE, expected=SIMPLE | CHANNELS, source=SIMPLE_SOURCE)
        for name in ("SimpleNorm2d", "SimpleNorm2dFp32")
    ),
    *(
        Row(
            path=f"timm.layers.norm_act:{name}",
            variant="apply_act=False",
            make=made(**BARE, **arguments),
            shape=shape,
            expected=expected,
            source=NORM_ACT,
        )
        for name, arguments, shape, expected in (
            ("GroupNormAct", {"num_groups": 4}, IMAGE, GROUP | {"groups": 4}),
            ("GroupNorm1Act", {}, IMAGE, GROUP),
            ("LayerNormAct", {}, (2, 3, 64), LAYER),
            ("LayerNormActFp32", {}, (2, 3, 64), LAYER),
            ("LayerNormAct2d", {}, IMAGE, LAYER | CHANNELS),
            ("LayerNormAct2dFp32", {}, IMAGE, LAYER | CHANNELS),
            ("RmsNormAct", {}, (2, 3, 64), RMS),
            ("RmsNormActFp32", {}, (2, 3, 64), RMS),
            ("RmsNormAct2d", {}, IMAGE, RMS | CHANNELS),
            ("RmsNormAct2dFp32", {}, IMAGE, RMS | CHANNELS),
        )
    ),
    Row(
        path="timm.layers.norm_act:BatchNormAct2d",
        variant="apply_act=False",
        make=made(**BARE),
        shape=IMAGE,
        expected={"verdict": "batch"},
        source=BATCH_PAPER,
    ),
    Row(
        path="timm.layers.norm_act:FrozenBatchNormAct2d",
        variant="apply_act=False",
        make=made(**BARE),
        shape=IMAGE,
        expected={"verdict": "affine"},
        source="its docstring: batch statistics and affine parameters are fixed",
    ),
    *(
        Row(
            path=f"timm.layers.filter_response_norm:{name}",
            variant="apply_act=False",
            make=made(**BARE),
            shape=IMAGE,
            expected=RESPONSE,
            source=FILTER,
        )
        for name in ("FilterResponseNormTlu2d", "FilterResponseNormAct2d")
    ),
    Row(
        path="timm.layers.grn:GlobalResponseNorm",
        make=made(channels_last=False),
        shape=IMAGE,
        expected={"verdict": "not a norm"},
        source="Woo et al. 2023, algorithm 1: the input is added to its own response",
    ),
    Row(
        path="x_transformers.x_transformers:LayerNorm",
        make=made(),
        expected=LAYER | {"has_bias": False},
        source=LAYER_PAPER,
    ),
    Row(
        path="x_transformers.x_transformers:LayerNorm",
        variant="unit_offset=True",
        make=made(unit_offset=True),
        expected=LAYER | UNIT | {"has_bias": False},
        source=LAYER_PAPER,
    ),
    Row(path="x_transformers.x_transformers:RMSNorm", make=made(), expected=PAIR, source=X_RMS),
    Row(
        path="x_transformers.x_transformers:RMSNorm",
        variant="unit_offset=True",
        make=made(unit_offset=True),
        expected=PAIR | UNIT,
        source=X_RMS,
    ),
    Row(
        path="x_transformers.x_transformers:SimpleRMSNorm",
        make=made(),
        expected=PAIR | PLAIN,
        source="Qin et al. 2023, SRMSNorm",
    ),
    Row(
        path="x_transformers.x_transformers:MultiheadRMSNorm",
        make=made(heads=4),
        shape=(2, 4, 3, 64),
        expected=PAIR | UNIT,
        source="Dehghani et al. 2023: a norm for each head's queries and keys",
    ),
    Row(
        path="x_transformers.x_transformers:ScaleNorm",
        make=made(),
        expected=PAIR | {"multiplier": "one", "eps": 1e-5},
        source="Nguyen and Salazar 2019, eq. 5, g x / |x|; eps 1e-5 in tnq177/transformers_without_tears layers.py",
        differs=(
            CHOICE,
            "Its code multiplies F.normalize, which documents its clamp, by sqrt(dim): the gain starts at 1.",
        ),
    ),
    *(
        Row(path=f"x_transformers.x_transformers:{name}", make=made(), expected={"verdict": verdict}, source=source)
        for name, verdict, source in (
            ("AdaptiveLayerNorm", "adaptive", "Peebles and Xie 2023, adaptive layer norm"),
            ("AdaptiveRMSNorm", "adaptive", "Peebles and Xie 2023, over an RMSNorm"),
            ("DynamicTanh", "elementwise", "Zhu et al. 2025, eq. 1"),
            ("Derf", "elementwise", "its docstring, arXiv:2512.10938: a point-wise function"),
        )
    ),
]
