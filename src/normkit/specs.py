"""Named presets: the conventions of well-known norms, each with the code it was read from.

Sources are module paths of transformers 5.23 and torch 2.13 unless another is named. Where a
model family sets eps in its config, the preset has that family's usual value: use
`specs.LLAMA.replace(eps=...)`. The centred ones come first.
"""

from __future__ import annotations

from normkit.spec import NormSpec

TORCH_LAYER_NORM = NormSpec()
"""`torch.nn.LayerNorm`; also GPT-2, GPT-NeoX, OPT. Ba, Kiros and Hinton 2016, arXiv:1607.06450."""

BERT = NormSpec(eps=1e-12)
"""`torch.nn.LayerNorm(eps=1e-12)`: BERT, ALBERT, XLNet (`layer_norm_eps` of their configs)."""

MODERNBERT = NormSpec(has_bias=False)
"""`torch.nn.LayerNorm(bias=False)`: ModernBERT, DBRX."""

OLMO = NormSpec(has_weight=False, has_bias=False)
"""`models.olmo.modeling_olmo.OlmoLayerNorm`: no parameters, float32, eps 1e-5 hard-coded."""

COHERE = NormSpec(has_bias=False)
"""`models.cohere.modeling_cohere.CohereLayerNorm`: gain only, possibly one row a head."""

NEMOTRON = NormSpec(weight_offset=1.0, offset_dtype="parameter")
"""`models.nemotron.modeling_nemotron.NemotronLayerNorm1P`: 1 + weight, added in the weight's dtype."""

DEBERTA = NormSpec(eps=1e-7, cast="early", output_dtype="promote")
"""`models.deberta.modeling_deberta.DebertaLayerNorm`: rounded before gain and bias."""

CONVNEXT = NormSpec(eps=1e-6, axes=(1,))
"""`models.convnext.modeling_convnext.ConvNextLayerNorm(data_format="channels_first")`."""

POOLFORMER = NormSpec(axes="all_but_batch")
"""`models.poolformer.modeling_poolformer.PoolFormerGroupNorm`: `torch.nn.GroupNorm(1, C)`."""

ANNOTATED_TRANSFORMER = NormSpec(eps=1e-6, eps_placement="outside", correction=1, cast="none", statistics_dtype="input")
"""The Annotated Transformer's LayerNorm: unbiased std, eps outside. github.com/harvardnlp/annotated-transformer

It multiplies by the gain before it divides: in 16 bits the spec is an ulp or two away.
"""

TORCH_RMS_NORM = NormSpec(centre_numerator=False, centre_statistics=False, has_bias=False, eps=None)
"""`torch.nn.RMSNorm`, with its default eps=None. Zhang and Sennrich 2019, arXiv:1910.07467."""

OLMO2 = TORCH_RMS_NORM.replace(eps=1e-6)
"""`models.olmo2.modeling_olmo2.Olmo2RMSNorm`: gain in float32, rounded once; also Olmo3, Gemma 3n and 4."""

LLAMA = OLMO2.replace(cast="early", output_dtype="promote")
"""`models.llama.modeling_llama.LlamaRMSNorm`: rounded before the gain; also Mistral, Qwen 2 and 3, Phi 3."""

GEMMA = OLMO2.replace(weight_offset=1.0)
"""`models.gemma.modeling_gemma.GemmaRMSNorm`: 1 + weight in float32; also Gemma 2 and 3, Qwen3-Next."""

MUSE_SPARK = OLMO2.replace(weight_offset=1.0, offset_dtype="parameter")
"""`models.muse_spark.modeling_muse_spark.MuseSparkTextCenteredRMSNorm`: 1 + weight in the weight's dtype."""

MUSE_SPARK_INPUT_SCALED = MUSE_SPARK.replace(weight_placement="before")
"""`models.muse_spark.modeling_muse_spark.MuseSparkTextInputScaledRMSNorm`: scales, rounds, then normalizes."""

T5 = OLMO2.replace(cast="weight", output_dtype="weight")
"""`models.t5.modeling_t5.T5LayerNorm`: an RMSNorm despite its name; follows the weight's dtype."""

NANOCHAT = OLMO2.replace(has_weight=False)
"""`models.nanochat.modeling_nanochat.NanoChatRMSNorm`: no parameters."""

DEEPSEEK_V4_UNWEIGHTED = NANOCHAT.replace(round_rstd=True)
"""`models.deepseek_v4.modeling_deepseek_v4.DeepseekV4UnweightedRMSNorm`: 1/rms rounded to the input's dtype."""

IMAGEGPT = OLMO2.replace(eps=1e-5, cast="none", statistics_dtype="input", output_dtype="promote")
"""`models.imagegpt.modeling_imagegpt.ImageGPTLayerNorm`: an RMSNorm that never leaves the input's dtype."""

POCKET_TTS = NormSpec(
    centre_numerator=False,
    correction=1,
    has_bias=False,
    statistics_dtype="input",
    round_rstd=True,
    cast="none",
    output_dtype="promote",
)
"""`models.pocket_tts.modeling_pocket_tts.PocketTTSTimestepNorm`: not centred, over an unbiased centred std.

It multiplies gain and 1/std first: on 16-bit input the spec is up to three of its ulps away.
"""

SCALE_NORM = TORCH_RMS_NORM.replace(eps=1e-5, eps_placement="clamp", reduction="sum")
"""ScaleNorm, g x / max(norm(x), eps): Nguyen and Salazar 2019, arXiv:1910.05895; weight is one number."""

L2_NORM = SCALE_NORM.replace(eps=1e-12, has_weight=False, cast="none", statistics_dtype="input")
"""`torch.nn.functional.normalize(x, dim=-1)`: it never leaves the input's dtype."""

X_TRANSFORMERS_RMS = L2_NORM.replace(has_weight=True, multiplier="sqrt_n", output_dtype="promote")
"""x-transformers' RMSNorm: `F.normalize(x) * sqrt(n) * g`, so eps is a clamp on the L2 norm."""
