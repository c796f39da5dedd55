"""transformers: one class of each body of source that census/norm_classes.py knows, and eps of configurations.

The classes are built as that census builds them. The expected formula is not read from them, but from the paper that
names the norm, or from the model's own code.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import transformers
from torch import nn
from transformers import logging

from answers import build, call_of
from configurations import epsilons, families, tiny_configuration
from definitions import Definition, find
from norm_classes import EXPECTED
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
    UNDECIDED,
    Row,
)

PACKAGES = {"transformers": "transformers", "torch": "torch"}
ANY_EPS, LAYER_OF_ANY_EPS = ({name: value for name, value in of.items() if name != "eps"} for of in (RMS, LAYER))
OFFSET = RMS | {"weight_offset": 1.0}
CHANNELS = LAYER | {"axes": (1,), "eps": 1e-6}
GROUPED = RMS | {"groups": 4}
ADAPTIVE, GATED, BATCH = ({"verdict": verdict} for verdict in ("adaptive", "gated", "batch"))
MUSE = "mlx-lm muse_spark norm_gain: 1 + weight"

# By the class that stands for its body: what its source states, where that is, and why it differs.
READ: dict[str, tuple[Any, ...]] = {
    "llama.LlamaRMSNorm": (
        RMS | {"cast": "early"},
        "meta-llama/llama llama/model.py: eps 1e-6, rounded before the gain",
    ),
    "olmoe.OlmoeRMSNorm": (RMS | {"eps": 1e-5}, "allenai/OLMo olmo/model.py RMSLayerNorm, layer_norm_eps 1e-5"),
    "llama4.Llama4TextRMSNorm": (RMS | {"eps": 1e-5}, "meta-llama/llama-models llama4/model.py: norm_eps 1e-5"),
    "cpmant.CpmAntLayerNorm": (
        RMS,
        "OpenBMB/CPM-Live cpm-live/cpm_live/layers/layernorm.py: nothing subtracted",
    ),
    "xlstm.xLSTMRMSNorm": (RMS, "NX-AI/xlstm xlstm/components/ln.py: eps 1e-6"),
    "xlstm.xLSTMRMSNorm use_bias": (RMS | {"has_bias": True}, "NX-AI/xlstm-jax, RMSNorm with use_bias"),
    "xlstm.xLSTMRMSNorm use_weight=False": (RMS | PLAIN, "NX-AI/xlstm, RMSNorm without a weight"),
    "olmo2.Olmo2RMSNorm": (RMS | {"cast": "late"}, "allenai/OLMo-core nn/layer_norm.py: gain in float32, rounded once"),
    "helium.HeliumRMSNorm": (ANY_EPS, RMS_PAPER),
    "moshi.MoshiRMSNorm": (ANY_EPS, "kyutai-labs/moshi moshi/modules/transformer.py _rms_norm: mean of squares"),
    "gemma3n.Gemma3nRMSNorm": (RMS, "google-deepmind/gemma gm/nn/gemma3n: times the scale, nothing added"),
    "gemma3n.Gemma3nRMSNorm with_scale=False": (RMS | PLAIN, "google-deepmind/gemma gm/nn/gemma3n, with_scale=False"),
    "muse_spark.MuseSparkRMSNorm": (ANY_EPS, RMS_PAPER),
    "muse_spark.MuseSparkRMSNorm with_scale=False": (ANY_EPS | PLAIN, RMS_PAPER),
    "gemma.GemmaRMSNorm": (OFFSET | {"offset_dtype": "float32", "cast": "late"}, "google/gemma_pytorch gemma/model.py"),
    "qwen4_exp.Qwen4ExpTextRMSNorm": (OFFSET, "transformers Qwen3NextRMSNorm, whose gain is stored about 0 as well"),
    "qwen4_exp.Qwen4ExpTextRMSNorm group_size=16": (OFFSET | {"groups": 4}, "its argument group_size"),
    "muse_spark.MuseSparkTextCenteredRMSNorm": (OFFSET, MUSE),
    "muse_spark.MuseSparkTextInputScaledRMSNorm": (
        OFFSET | {"weight_placement": "before"},
        "its name and mlx-lm muse_spark InputScaleRMSNorm: the row is scaled, then normalized",
    ),
    "t5.T5LayerNorm": (RMS, "Raffel et al. 2020, 2.1, and google-research/t5x layers.py: eps 1e-6, nothing subtracted"),
    "nanochat.NanoChatRMSNorm": (
        RMS | PLAIN | {"eps": None},
        "karpathy/nanochat nanochat/gpt.py: F.rms_norm without eps, whose default is the machine epsilon",
        (CHOICE, "NanoChatConfig has rms_norm_eps 1e-6 and hands it over."),
    ),
    "falcon_mamba.FalconMambaWeightlessRMSNorm": (
        ANY_EPS | PLAIN,
        "Zuo et al. 2024, Falcon Mamba: RMSNorms without a gain",
    ),
    "deepseek_v4.DeepseekV4UnweightedRMSNorm": (ANY_EPS | PLAIN, RMS_PAPER),
    "imagegpt.ImageGPTLayerNorm": (
        RMS | {"eps": 1e-5},
        "openai/image-gpt src/model.py norm: a root mean square; only its name here says LayerNorm",
    ),
    "gradium_phonon_tts.GradiumPhononTTSTimestepNorm": (ANY_EPS, RMS_PAPER),
    "zaya.ZayaQKNorm queries": (
        {"reduction": "sum", "centre_statistics": False, "eps_placement": "clamp", "multiplier": "sqrt_n"},
        "its comments: L2 norm, times sqrt(n); no source beside its code was found",
    ),
    "zaya.ZayaQKNorm keys": (
        {"reduction": "sum", "centre_statistics": False, "eps_placement": "clamp", "multiplier": "sqrt_n"},
        "its comments: L2 norm, times sqrt(n); no source beside its code was found",
    ),
    "esmc.EsmcLayerNorm": (LAYER, "torch.nn.LayerNorm of evolutionaryscale/esm esm/layers/blocks.py"),
    "esmfold2.EsmFold2LayerNorm": (LAYER, LAYER_PAPER),
    "esm.EsmFoldLayerNorm": (LAYER, "aqlaboratory/openfold openfold/model/primitives.py LayerNorm: eps 1e-5"),
    "patchtsmixer.PatchTSMixerNormLayer": (LAYER, f"{LAYER_PAPER}; norm_eps of its config"),
    "patchtsmixer.PatchTSMixerNormLayer norm_mlp=BatchNorm": (BATCH, BATCH_PAPER),
    "pocket_tts.PocketTTSFlowLayerNorm": (LAYER_OF_ANY_EPS, LAYER_PAPER),
    "deberta.DebertaLayerNorm": (
        LAYER_OF_ANY_EPS,
        "microsoft/DeBERTa DeBERTa/deberta/ops.py; the configuration hands eps over",
    ),
    "olmo.OlmoLayerNorm": (LAYER | PLAIN, "Groeneveld et al. 2024, 2.1: no gain, no bias; eps 1e-5"),
    "cohere.CohereLayerNorm": (
        LAYER | {"has_bias": False},
        "Cohere's Command R config.json: layer_norm_eps 1e-5, no bias",
    ),
    "cohere.CohereLayerNorm a gain a head": (LAYER | {"has_bias": False}, "the same, for heads: use_qk_norm"),
    "chameleon.ChameleonLayerNorm": (
        LAYER,
        "facebookresearch/chameleon inference/transformer.py: LayerNorm of each head",
    ),
    "stablelm.StableLmLayerNormPerHead": (
        LAYER | {"has_bias": False},
        "Stability AI's stablelm-2-12b modeling code: a LayerNorm without bias for each head",
    ),
    "xlstm.xLSTMMultiHeadLayerNorm": (
        LAYER | {"has_bias": False, "groups": 4, "eps": 1e-6},
        "NX-AI/xlstm xlstm/components/ln.py MultiHeadLayerNorm: a group norm of the heads",
    ),
    "nemotron.NemotronLayerNorm1P": (
        LAYER | {"weight_offset": 1.0},
        "NVIDIA/NeMo, normalization layernorm1p: 1 + weight",
    ),
    "videoprism.VideoPrismLayerNorm": (
        LAYER_OF_ANY_EPS | {"weight_offset": 1.0},
        "google-deepmind/videoprism videoprism/layers.py LayerNorm: 1 + scale; the configuration hands eps over",
    ),
    "moonshine_streaming.MoonshineStreamingLayerNorm": (
        LAYER | {"weight_offset": 1.0, "has_bias": False},
        "its argument unit_offset, as in x-transformers",
    ),
    "moonshine_streaming.MoonshineStreamingLayerNorm unit_offset=False": (
        LAYER | {"has_bias": False},
        "its argument unit_offset, as in x-transformers",
    ),
    "pocket_tts.PocketTTSTimestepNorm": (
        RMS | {"eps": 1e-5, "centre_statistics": True, "correction": 1},
        "kyutai-labs/pocket-tts pocket_tts/modules/mlp.py _rms_norm: over x.var(), centred and of n - 1",
    ),
    "convnext.ConvNextLayerNorm channels_last": (LAYER | {"eps": 1e-6}, "facebookresearch/ConvNeXt models/convnext.py"),
    "convnext.ConvNextLayerNorm channels_first": (CHANNELS, "facebookresearch/ConvNeXt models/convnext.py"),
    "dinov3_convnext.DINOv3ConvNextLayerNorm channels_last": (
        LAYER_OF_ANY_EPS,
        "facebookresearch/dinov3 models/convnext.py; the configuration hands eps over",
    ),
    "dinov3_convnext.DINOv3ConvNextLayerNorm channels_first": (
        LAYER_OF_ANY_EPS | {"axes": (1,)},
        "facebookresearch/dinov3 models/convnext.py; the configuration hands eps over",
    ),
    "eomt.EomtLayerNorm2d": (CHANNELS, "facebookresearch/detectron2 layers/batch_norm.py LayerNorm: eps 1e-6"),
    "squeezebert.SqueezeBertLayerNorm": (
        CHANNELS | {"eps": 1e-12},
        "Iandola et al. 2020: BERT's LayerNorm over channels, eps 1e-12",
    ),
    "vitdet.VitDetLayerNorm": (CHANNELS, "facebookresearch/detectron2 layers/batch_norm.py LayerNorm: eps 1e-6"),
    "poolformer.PoolFormerGroupNorm": (GROUP, "sail-sg/poolformer models/poolformer.py: GroupNorm of one group"),
    "emu3.Emu3VQVAEGroupNorm": (GROUP | {"groups": 4}, GROUP_PAPER),
    "pe_audio.PeAudioMaskedGroupNorm": (GROUP | {"groups": 4}, f"{GROUP_PAPER}, without a mask"),
    "bit.BitGroupNormActivation apply_activation=False": (GROUP | {"groups": 4}, GROUP_PAPER),
    "bit.BitGroupNormActivation": ({}, f"{GROUP_PAPER}, and an activation behind it"),
    "patchtst.PatchTSTStdScaler": (
        LAYER | PLAIN | {"axes": (1,)},
        "Kim et al. 2022, RevIN: over time; its docstring",
    ),
    "mamba2.MambaRMSNormGated without its gate": (
        GROUPED,
        "state-spaces/mamba mamba_ssm/modules/mamba2.py: d_ssm // ngroups features a group",
    ),
    "falcon_h1.FalconH1RMSNormGated without its gate": (
        GROUPED,
        "state-spaces/mamba mamba_ssm/modules/mamba2.py: d_ssm // ngroups features a group",
    ),
    "qwen3_next.Qwen3NextRMSNormGated": (GATED, "Yang et al. 2024, gated delta networks: times swish of a gate"),
    "qwen4_exp.Qwen4ExpTextRMSNormGated": (GATED, "Yang et al. 2024, gated delta networks: times swish of a gate"),
    "kimi_linear.KimiLinearRMSNormGated": (GATED, "Kimi Team 2025, Kimi Linear: times the sigmoid of a gate"),
    "axk2.AXK2GatedRMSNorm": ({}, "its name: gated by its own output"),
    "qwen2_5_omni.Qwen2_5_OmniAdaLayerNormZero_Final": (ADAPTIVE, "Peebles and Xie 2023: scale and shift"),
    "qwen2_5_omni.Qwen2_5_OmniAdaLayerNormZero": (ADAPTIVE, "Peebles and Xie 2023: scale and shift"),
    "esmfold2.EsmFold2AdaptiveLayerNorm": (ADAPTIVE, "Abramson et al. 2024, AlphaFold 3, algorithm 26"),
    "emu3.Emu3VQVAESpatialNorm": (ADAPTIVE, "Zheng et al. 2022, MoVQ, eq. 4: scale and shift from the codes"),
    "autoformer.AutoformerLayernorm": ({}, "thuml/Autoformer layers/Autoformer_EncDec.py my_Layernorm"),
    "gemma3n.Gemma3nAudioCumulativeGroupNorm": ({}, "its name: cumulative over time"),
    "patchtst.PatchTSTMeanScaler": ({}, "awslabs/gluonts torch/scaler.py MeanScaler: over the mean magnitude"),
    "patchtst.PatchTSTBatchNorm": (BATCH, BATCH_PAPER),
    "detr.DetrFrozenBatchNorm2d": ({"verdict": "affine"}, "facebookresearch/detr models/backbone.py: fixed statistics"),
    "phi4_multimodal.Phi4MultimodalAudioMeanVarianceNormLayer": (
        {"verdict": "affine"},
        "its name and buffers: mean and variance of the training data",
    ),
    "mobilebert.NoNorm": (
        {"verdict": "affine"},
        "Sun et al. 2020, section 3.3: an elementwise linear map in its place",
    ),
    "voxtral_realtime.VoxtralRealtimeTextAdaRmsNorm": (
        {"verdict": "not a norm"},
        "no norm is in it: it makes the factor for one",
    ),
    "hy_v4.HYV4UnweightedRMSNorm": (
        {"verdict": "not a norm"},
        "it returns the reciprocal of the root mean square alone",
    ),
}


def rows() -> Iterator[Row]:
    """A row for each class that stands for a body, in each of its variants."""
    expected = tomllib.loads(EXPECTED.read_text())
    also = expected.pop("also")
    expected.pop("apart")
    definitions = {str(each): each for each in find(also)}
    for name, entry in expected.items():
        for case in entry["cases"]:
            variant = case.get("as", "")
            stated, source, *differs = READ[f"{name} {variant}".strip()]
            yield Row(
                path=f"{definitions[name].module}:{definitions[name].name}",
                variant=variant,
                make=made_as(definitions[name], case),
                shape=tuple(case["shape"]),
                call=call_of(case) if "call" in case else None,
                expected=stated,
                source=source,
                differs=differs[0] if differs else None,
            )


def made_as(definition: Definition, case: Any) -> Any:
    """How norm_classes.py builds it."""

    def make(_kind: Any) -> nn.Module:
        return build(definition, case)

    return make


MARK = 0.0123
"""An eps that no model has."""


def mark(configuration: Any) -> None:
    """Give every eps of a configuration, and of those inside it, the same value."""
    for name, value in vars(configuration).items():
        if dataclasses.is_dataclass(value):
            mark(value)
        elif isinstance(value, float) and "eps" in name:
            setattr(configuration, name, MARK)


def unconfigured() -> Iterator[Row]:
    """The rows of norms whose eps no field of the configuration reaches, where there is such a field."""
    logging.set_verbosity_error()
    for family in families():
        configuration = tiny_configuration(family)
        stated = {name: value for name, value in epsilons(configuration).items() if isinstance(value, float)}
        if not stated:
            continue
        mark(configuration)
        model = getattr(transformers, family.class_name)(configuration)
        kept: dict[float, dict[str, nn.Module]] = {}
        for path, module in model.named_modules():
            eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
            weight = getattr(module, "weight", None)
            if re.search("(Layer|RMS)Norm$", type(module).__name__) and weight is not None and eps not in (None, MARK):
                kept.setdefault(eps, {}).setdefault(path.rpartition(".")[2], module)
        for eps, norms in kept.items():
            if next(iter(norms.values())).weight.dim() == 1:
                yield unreached(family.name, type(configuration).__name__, stated, eps, norms)


def unreached(
    family: str, configuration: str, stated: dict[str, float], eps: float, norms: dict[str, nn.Module]
) -> Row:
    """The row of norms of one family that keep an eps whatever the configuration says."""
    field = next((name for name, value in stated.items() if value == eps), next(iter(stated)))
    norm = next(iter(norms.values()))
    size = norm.weight.shape[0]
    return Row(
        path=f"{type(norm).__module__}:{type(norm).__name__}",
        library="transformers",
        variant=f"{family}, {', '.join(norms)}: no field of the configuration reaches their eps",
        make=lambda _: copy.deepcopy(norm),
        shape=(2, size, 5, 5) if getattr(norm, "data_format", "") == "channels_first" else (2, 3, size),
        expected={"eps": stated[field]},
        source=f"{configuration}.{field}",
        differs=None
        if stated[field] == eps
        else (UNDECIDED, "The configuration says another eps; which is meant is not said."),
    )


ROWS = [*rows(), *unconfigured()]
