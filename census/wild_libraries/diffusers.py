"""diffusers."""

from __future__ import annotations

from wild_libraries.rows import GROUP, L2, LAYER, LAYER_PAPER, PLAIN, RMS, RMS_PAPER, Row, made

PACKAGES = {"diffusers": "diffusers"}
NORMS = "diffusers.models.normalization"
TRANSFORMERS = "diffusers.models.transformers"
AUTOENCODERS = "diffusers.models.autoencoders"
VIDEO = (2, 64, 2, 4, 4)
IMAGE = (2, 64, 5, 5)
CHANNELS = {"axes": (1,)}
WAN = RMS | CHANNELS | {"eps_placement": "clamp", "reduction": "sum", "multiplier": "sqrt_n", "eps": 1e-12}
WAN_SOURCE = "Wan-Video/Wan2.1 wan/modules/vae.py RMS_norm; F.normalize documents its clamp at 1e-12"
CASCADE = "Stability-AI/StableCascade modules/common.py LayerNorm2d"
ADAPTIVE = {"verdict": "adaptive"}
PEEBLES = "Peebles and Xie 2023: scale and shift from the condition"
CENTRED_AT_ONE = RMS | {"weight_offset": 1.0, "eps": 1e-5}
EPS = {"eps": 1e-6}
SHARED = {
    "autoencoder_kl_wan:WanRMS_norm": WAN_SOURCE,
    "autoencoder_kl_qwenimage:QwenImageRMS_norm": WAN_SOURCE,
    "autoencoder_kl_qwenimage21:QwenImage21RMS_norm": WAN_SOURCE,
    "autoencoder_kl_hunyuanvideo15:HunyuanVideo15RMS_norm": WAN_SOURCE,
    "autoencoder_kl_hunyuanimage_refiner:HunyuanImageRefinerRMS_norm": WAN_SOURCE,
    "autoencoder_kandinsky6_sr:Kandinsky6VAERMSNorm": "its docstring: the same idea as Wan's, in float32, no bias",
}

ROWS = [
    Row(path=f"{NORMS}:FP32LayerNorm", make=made(), expected=LAYER, source=f"{LAYER_PAPER}; eps as torch.nn documents"),
    Row(path=f"{NORMS}:RMSNorm", make=made(**EPS), expected=RMS, source=f"{RMS_PAPER}, named in its docstring"),
    Row(
        path=f"{NORMS}:RMSNorm",
        variant="bias=True",
        make=made(**EPS, bias=True),
        expected=RMS | {"has_bias": True},
        source=f"{RMS_PAPER}; bias as in its docstring",
    ),
    Row(
        path=f"{NORMS}:RMSNorm",
        variant="elementwise_affine=False",
        make=made(**EPS, elementwise_affine=False),
        expected=RMS | PLAIN,
        source=RMS_PAPER,
    ),
    Row(path=f"{NORMS}:MochiRMSNorm", make=made(**EPS), expected=RMS, source=RMS_PAPER),
    Row(
        path=f"{NORMS}:LpNorm",
        make=lambda kind: kind(),
        expected=L2,
        source="torch.nn.functional.normalize: x / max(norm, eps)",
    ),
    Row(
        path=f"{NORMS}:GlobalResponseNorm",
        make=made(),
        shape=(2, 5, 5, 64),
        expected={"verdict": "not a norm"},
        source="Woo et al. 2023, algorithm 1: the input is added to its own response",
    ),
    *(
        Row(path=f"{NORMS}:{name}", make=make, shape=shape, expected=ADAPTIVE, source=PEEBLES)
        for name, make, shape in (
            ("AdaLayerNormContinuous", made(64, elementwise_affine=False, eps=1e-6), (2, 3, 64)),
            ("LuminaLayerNormContinuous", made(64, elementwise_affine=False, eps=1e-6), (2, 3, 64)),
            ("AdaGroupNorm", made(64, 4), IMAGE),
        )
    ),
    Row(
        path=f"{TRANSFORMERS}.transformer_krea2:Krea2RMSNorm",
        make=made(),
        expected=CENTRED_AT_ONE,
        source="its docstring: the effective multiplier is 1 + weight",
    ),
    Row(
        path=f"{TRANSFORMERS}.transformer_qwenimage21:QwenImage21ZeroCenterRMSNorm",
        make=made(),
        expected=CENTRED_AT_ONE,
        source="its docstring: the effective scale is weight + 1",
    ),
    Row(
        path=f"{TRANSFORMERS}.transformer_cosmos3:Cosmos3NemotronRMSNorm",
        make=made(**EPS),
        expected=RMS,
        source=RMS_PAPER,
    ),
    Row(
        path=f"{TRANSFORMERS}.transformer_stable_audio3:StableAudio3RMSNorm",
        make=made(),
        expected=RMS | {"cast": "late"},
        source=f"{RMS_PAPER}; its docstring: computed in float32",
    ),
    Row(
        path=f"{TRANSFORMERS}.t5_film_transformer:T5LayerNorm",
        make=made(),
        expected=RMS,
        source="its docstring: T5's, which neither subtracts the mean nor adds a bias",
    ),
    Row(
        path="diffusers.pipelines.kolors.text_encoder:RMSNorm",
        make=made(),
        expected=RMS | {"eps": 1e-5},
        source="THUDM/chatglm3-6b config.json and modeling_chatglm.py: layernorm_epsilon 1e-5",
    ),
    *(
        Row(
            path=f"{AUTOENCODERS}.{name}",
            make=made() if "Kandinsky" in name else made(images=False),
            shape=VIDEO,
            expected=WAN,
            source=source,
        )
        for name, source in SHARED.items()
    ),
    Row(
        path="diffusers.models.latent_upscaler.latent_upscaler_kandinsky6_sr:Kandinsky6SRLatentUpscalerRMSNorm",
        make=made(),
        shape=VIDEO,
        expected=WAN,
        source="its docstring: over channels, learnable gain, float32; F.normalize documents its clamp",
    ),
    Row(
        path=f"{AUTOENCODERS}.autoencoder_kl_ltx2:PerChannelRMSNorm",
        make=lambda kind: kind(),
        shape=VIDEO,
        expected=RMS | PLAIN | CHANNELS | {"eps": 1e-8},
        source="its docstring: x / sqrt(mean(x^2, dim) + eps)",
    ),
    Row(
        path=f"{AUTOENCODERS}.autoencoder_vidtok:VidTokLayerNorm",
        make=made(),
        shape=VIDEO,
        expected=LAYER | CHANNELS | EPS,
        source=f"{LAYER_PAPER}, over the channels",
    ),
    *(
        Row(
            path=path,
            make=made(elementwise_affine=False, eps=1e-6),
            shape=IMAGE,
            expected=LAYER | PLAIN | CHANNELS | EPS,
            source=CASCADE,
        )
        for path in (
            "diffusers.models.unets.unet_stable_cascade:SDCascadeLayerNorm",
            "diffusers.pipelines.deprecated.wuerstchen.modeling_wuerstchen_common:WuerstchenLayerNorm",
        )
    ),
    Row(
        path=f"{AUTOENCODERS}.autoencoder_kl_kvae_video:KVAECachedGroupNorm",
        make=made(),
        shape=VIDEO,
        expected=GROUP | EPS | {"groups": 32},
        source="its docstring: GroupNorm",
    ),
    *(
        Row(
            path=f"{AUTOENCODERS}.{name}",
            variant="one frame",
            make=make,
            shape=IMAGE,
            call=lambda norm, x: norm(x.unsqueeze(2)).squeeze(2),
            expected=GROUP | expected,
            source=source,
        )
        for name, make, expected, source in (
            (
                "autoencoder_kl_mochi:MochiChunkedGroupNorm3D",
                made(4),
                {"groups": 4},
                "its docstring: group normalization of each frame",
            ),
            (
                "autoencoder_kl_minimax_h3:MiniMaxH3VideoGroupNorm",
                lambda kind: made()(lambda width: kind(4, width)),
                {"groups": 4},
                "its docstring: statistics never mix across frames",
            ),
            (
                "autoencoder_kl_cosmos:CosmosCausalGroupNorm",
                made(),
                EPS,
                "NVIDIA/Cosmos-Tokenizer, CausalNormalize: GroupNorm of each frame, eps 1e-6",
            ),
        )
    ),
    Row(
        path="diffusers.models.unets.unet_kandinsky3:Kandinsky3ConditionalGroupNorm",
        make=lambda kind: made()(lambda width: kind(4, width, 64)),
        shape=IMAGE,
        expected=ADAPTIVE,
        source="ai-forever/Kandinsky-3 kandinsky3/model/nn.py ConditionalGroupNorm",
    ),
    Row(
        path=f"{TRANSFORMERS}.transformer_mochi:MochiModulatedRMSNorm",
        variant="without a scale",
        make=lambda kind: kind(eps=1e-6),
        expected=RMS | PLAIN,
        source=RMS_PAPER,
    ),
    Row(
        path=f"{TRANSFORMERS}.transformer_mochi:MochiLayerNormContinuous",
        make=made(64, eps=1e-6),
        expected=ADAPTIVE,
        source="genmoai/mochi src/genmo/mochi_preview/dit/joint_model: RMS, times 1 + scale",
    ),
]
