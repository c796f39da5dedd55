"""Building blocks of the catalogue: tiny models with trained-looking gains, writers of each format, a numpy decoder.

Nothing here imports normkit.
"""

import json
import os
import struct
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gguf
import ml_dtypes
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Q
from safetensors import safe_open
from safetensors.torch import save_file

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
REAL = Path(os.environ.get("NORMKIT_REAL_MODELS", "real"))  # holds smollm2, gemma3, mpnet, qwen05

# ------------------------------------------------------------------------------------------------ wordings
# Several wordings of each statement: any match counts.
SAY = {
    "plus1": r"(reference|source|ref|gains?|weights?|stored|values?)[^\n]{0,24}\+ ?1\b|\+ ?1\b|plus (1|one)\b|\b1 (is |was )?added|offset (of )?1\b|too (large|high) by 1|one too (much|many)|1 too (large|high|much)",
    "plus2": r"\+ ?2\b|plus (2|two)\b|doubled|added twice|twice added|\b1 (is |was )?added twice|second 1",
    "double1": r"doubled|gains? \+ 1|\+ ?1\b|added twice|shifted twice|plus (1|one)",
    "minus1": r"(?<![\d{,e])[-−–] ?1(?![\d.e])|minus (1|one)\b|\b1 (is |was )?(missing|lost|subtracted|not added)|lacks? the 1|without (its |the )?1\b|zero-cent|not as llama\.cpp",
    "mixed": r"mixed|some .{0,40}others|inconsisten|not all|only (some|in)|disagree|both conventions|\d+ of \d+",
    "swap": r"swap|exchang|interchang|each other'?s|crossed|in place of each other",
    "copy": r"cop(y|ied|ies)|duplicat|identical to (those|that) of|are those of|the gains of",
    "shift": r"shift|of the next layer|of the previous|another('s)?|cop(y|ied)|permut|order|are those of|swap|cycl",
    "order": r"order|sort|permut|are those of|another|swap|lexi|cop(y|ied)|cycl",
    "reinit": r"re-?init|all ones|all (are )?1\b|constant|fresh|untrained|not trained|never loaded|are ones?\b|initiali[sz]",
    "zeros": r"zeros?\b|all 0\b|re-?init|constant|missing|lost",
    "neg": r"negat|opposite sign|times -1|[×x*] ?-1\b|sign (is )?(flipped|wrong|changed)|- ?reference|flipped",
    "times": r"times|×|factor|scaled|multipl|[*] ?\d|fold\b",
    "perm": r"permut|re-?order|shuffl|interleav|other order|rotary",
    "missing": r"missing|absent|lacks?|not (found|present|there)|only in (the )?reference|no counterpart|lost|unpaired",
    "extra": r"extra|only in (the )?port|additional|not in (the )?reference|no counterpart|unpaired|surplus|unexpected",
    "transposed": r"transpos",
    "eps": r"\beps|epsilon",
    "differ": r"differ",
    "values": r"different values|differ|other values|finetun|fine-tun|not equal|unrelated",
    "fold": r"fold",
    "rounding": r"round|bfloat16|bf16|float16|fp16|\bf16|half precision|float8|f8",
    "same": r"\bsame\b|equal|no differences?|agree|identical|match",
    "undecided": r"undecid|ambigu|cannot (be )?(tell|told|decide|say)|not decid|either|more than one|\bor times\b|\bor\b[^\n]{0,20}times|times[^\n]{0,20}\bor\b|not shown|does not show|do not show",
    "nan": r"\bnan\b|not finite|infinit|non-finite",
    "final": r"final norm|last norm|output norm|model\.norm|output_norm|ln_f|before the (head|logits)|\bout_scale\b",
    "notapplied": r"not applied|missing|never called|not called|no norm|skipped|absent|is not run|lacks",
    "twice": r"twice|two times|applied again|called 2|repeated|2 times|idempot",
    "arch": r"architect|gemma|model_type|class",
    "llamacpp": r"llama\.cpp|as (the format|gguf) stores|stores? (it|them)|1 added|\+ ?1\b",
    "draft": r"draft|head|before the (final )?norm|stream",
    "between": r"between|input (of|to|at)|its input|no norm|not (a|in a|the) norm|upstream|attention|\bmlp\b|norms (all )?(agree|compute|are)|all \d+ norms|born",
    "random": r"random|determin|itself|dropout|two runs|repeat",
}


class Box:
    """One case being built: its folder, its random generator."""

    def __init__(self, folder, seed, name):
        self.dir = Path(folder)
        self.dir.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.seed = seed
        self.rng = np.random.default_rng([seed, *name.encode()])
        self._common = {}

    def pick(self, *options):
        return options[int(self.rng.integers(len(options)))]

    def int(self, low, high):  # both included
        return int(self.rng.integers(low, high + 1))

    def uniform(self, low, high):
        return float(self.rng.uniform(low, high))

    def normal(self, *shape):
        return self.rng.standard_normal(shape).astype(np.float32)

    def path(self, *parts):
        path = self.dir.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def gain(self, n, depth=0.5, level=None):
        """A gain as training leaves it: a level that grows with depth, features that many norms share, outliers."""
        if n not in self._common:
            self._common[n] = 0.2 * self.rng.standard_normal(n)
        level = level or float(np.exp(np.log(0.45 + 1.1 * depth) + 0.2 * self.rng.standard_normal()))
        g = level * np.exp(self._common[n] + 0.18 * self.rng.standard_normal(n))
        loud = self.rng.choice(n, max(1, n // 32), replace=False)
        g[loud] *= self.rng.uniform(1.6, 4.0, loud.size)
        quiet = self.rng.choice(n, max(1, n // 48), replace=False)
        g[quiet] *= 0.1
        return g.astype(np.float32)


# ------------------------------------------------------------------------------------------------ tiny models
OFFSET = {"gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_next"}  # families whose class multiplies by 1 + weight


def tiny_config(b, family, layers=None, hidden=None, vocab=None, **over):
    d = hidden or b.pick(64, 128)
    heads = 4
    L = layers or b.int(2, 4)
    V = vocab or 32 * b.int(9, 12)
    ff = 2 * d
    hd = d // heads
    eps = over.pop("eps", None) or b.pick(1e-5, 1e-6)
    theta = over.pop("theta", None) or b.pick(10000.0, 500000.0)
    rope = {"rope_type": "default", "rope_theta": theta}
    common = dict(vocab_size=V, hidden_size=d, num_hidden_layers=L, num_attention_heads=heads,
                  intermediate_size=ff, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    T = transformers
    kv = b.pick(2, 4)
    if family == "llama":
        c = T.LlamaConfig(**common, num_key_value_heads=kv, rms_norm_eps=eps, rope_parameters=rope, tie_word_embeddings=False)
    elif family == "mistral":
        c = T.MistralConfig(**common, num_key_value_heads=kv, rms_norm_eps=eps, rope_parameters=rope, head_dim=hd, tie_word_embeddings=False, sliding_window=None)
    elif family == "qwen2":
        c = T.Qwen2Config(**common, num_key_value_heads=kv, rms_norm_eps=eps, rope_parameters=rope, tie_word_embeddings=False)
    elif family == "qwen3":
        c = T.Qwen3Config(**common, num_key_value_heads=kv, rms_norm_eps=eps, rope_parameters=rope, head_dim=hd, tie_word_embeddings=False)
    elif family == "gemma":
        c = T.GemmaConfig(**common, num_key_value_heads=kv, head_dim=hd, rms_norm_eps=eps, rope_parameters=rope)
    elif family == "gemma2":
        c = T.Gemma2Config(**common, num_key_value_heads=kv, head_dim=hd, rms_norm_eps=eps, query_pre_attn_scalar=hd, sliding_window=64)
    elif family == "gemma3_text":
        c = T.Gemma3TextConfig(**common, num_key_value_heads=kv, head_dim=hd, rms_norm_eps=eps, query_pre_attn_scalar=hd, sliding_window=64)
    elif family == "olmo2":
        c = T.Olmo2Config(**common, num_key_value_heads=kv, rms_norm_eps=eps, rope_parameters=rope, tie_word_embeddings=False)
    elif family == "gpt2":
        c = T.GPT2Config(vocab_size=V, n_embd=d, n_layer=L, n_head=heads, n_positions=512, layer_norm_epsilon=eps, bos_token_id=1, eos_token_id=2)
    elif family == "bert":
        c = T.BertConfig(**{k: v for k, v in common.items() if k not in ("bos_token_id", "eos_token_id")}, layer_norm_eps=over.pop("ln_eps", 1e-12))
    elif family == "cohere":
        c = T.CohereConfig(**common, num_key_value_heads=kv, layer_norm_eps=eps, rope_parameters=rope, logit_scale=0.0625)
    elif family == "stablelm":
        c = T.StableLmConfig(**common, num_key_value_heads=kv, layer_norm_eps=eps, rope_parameters={**rope, "partial_rotary_factor": 0.25})
    elif family == "phi":
        c = T.PhiConfig(**common, layer_norm_eps=eps, rope_parameters={**rope, "partial_rotary_factor": 0.5})
    elif family == "nemotron":
        c = T.NemotronConfig(**common, num_key_value_heads=kv, head_dim=hd, norm_eps=eps, rope_parameters={**rope, "partial_rotary_factor": 0.5})
    elif family == "gpt_neox":
        c = T.GPTNeoXConfig(**common, layer_norm_eps=eps, rope_parameters={**rope, "partial_rotary_factor": 0.25})
    elif family == "t5":
        c = T.T5Config(vocab_size=V, d_model=d, d_kv=hd, d_ff=ff, num_layers=L, num_heads=heads, layer_norm_epsilon=eps, decoder_start_token_id=0)
    elif family == "qwen3_next":
        c = T.Qwen3NextConfig(**common, num_key_value_heads=kv, head_dim=hd, rms_norm_eps=eps, rope_parameters={**rope, "partial_rotary_factor": 0.5},
                              layer_types=["full_attention"] * L, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, moe_intermediate_size=d,
                              shared_expert_intermediate_size=d, mlp_only_layers=list(range(L)), tie_word_embeddings=False,
                              linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
    else:
        raise KeyError(family)
    if family == "qwen3_next":
        c.full_attention_interval = 1
    for key, value in over.items():
        setattr(c, key, value)
    return c


AUTO = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}


class Model:
    def __init__(self, family, config, sd):
        self.family, self.config, self.sd = family, config, sd

    @property
    def layers(self):
        return getattr(self.config, "num_hidden_layers", None) or self.config.n_layer

    def norms(self, suffix=".weight"):
        return [k for k in self.sd if is_norm(k) and k.endswith(suffix)]

    def copy(self):
        return Model(self.family, self.config, {k: v.copy() for k, v in self.sd.items()})


def is_norm(name):
    low = name.lower()
    return any(s in low for s in ("norm", ".ln_", "ln_f")) and not low.endswith("num_batches_tracked")


def layer_of(name):
    for part in name.split("."):
        if part.isdigit():
            return int(part)
    return None


def tiny(b, family, layers=None, **over):
    """A tiny model of transformers with trained-looking gains; state dict in float32 numpy."""
    config = tiny_config(b, family, layers, **over)
    auto = AUTO.get(family, transformers.AutoModelForCausalLM)
    torch.manual_seed(b.int(0, 2**31 - 1))
    model = auto.from_config(config).eval()
    config = model.config
    config.architectures = [type(model).__name__]
    L = getattr(config, "num_hidden_layers", None) or getattr(config, "n_layer", None) or config.num_layers
    tied = set(getattr(model, "_tied_weights_keys", None) or [])
    sd = {}
    embed_level = b.uniform(0.15, 0.6)
    for name, p in model.state_dict().items():
        if name in tied and getattr(config, "tie_word_embeddings", True):
            continue
        a = p.detach().float().numpy()
        if not p.is_floating_point():
            continue
        if is_norm(name):
            layer = layer_of(name)
            depth = 1.0 if layer is None else (layer + 0.5) / L
            if name.endswith("bias"):
                a = 0.1 * b.normal(*a.shape)
            else:
                a = np.stack([b.gain(a.shape[-1], depth) for _ in range(a.size // a.shape[-1])]).reshape(a.shape)
                if family in OFFSET:
                    a = a - 1
        elif a.ndim >= 2:
            fan = a.shape[-1]
            if family == "gpt2" and "embed" not in name and ".wt" not in name and ".wp" not in name:
                fan = a.shape[0]
            scale = embed_level if ("embed" in name or ".wte" in name or ".wpe" in name or "shared" in name) else b.uniform(0.7, 1.2) / np.sqrt(fan)
            if family.startswith("gemma") and "embed" in name:
                scale = embed_level / np.sqrt(a.shape[-1]) * 3
            a = scale * b.normal(*a.shape)
        else:
            a = 0.05 * b.normal(*a.shape)
        sd[name] = np.ascontiguousarray(a, np.float32)
    return Model(family, config, sd)


def to_torch(a, dtype):
    t = torch.from_numpy(np.ascontiguousarray(a))
    return t.to({"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}[dtype]) if t.is_floating_point() else t


def round_to(sd, dtype):
    return {k: to_torch(v, dtype).float().numpy() if v.dtype.kind == "f" else v for k, v in sd.items()}


def save_folder(path, config, sd, dtype="f32", shards=1, metadata=None, dtypes=None, cfg_edit=None):
    """A folder as transformers writes it."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    cfg = config if isinstance(config, dict) else json.loads(config.to_json_string(use_diff=False))
    cfg = {k: v for k, v in cfg.items() if k not in ("_name_or_path",)}
    cfg["dtype"] = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[dtype]
    if cfg_edit:
        cfg_edit(cfg)
    (path / "config.json").write_text(json.dumps(cfg, indent=2))
    tensors = {k: to_torch(v, (dtypes or {}).get(k, dtype)) if isinstance(v, np.ndarray) else v for k, v in sd.items()}
    metadata = metadata or {"format": "pt"}
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata=metadata)
    else:
        names = list(tensors)
        index = {}
        for s in range(shards):
            file = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
            part = {n: tensors[n] for n in names[s::shards]}
            save_file(part, path / file, metadata=metadata)
            index.update({n: file for n in part})
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": index}))
    return path


# ------------------------------------------------------------------------------------------------ GGUF
ARCH = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gemma": "GEMMA", "gemma2": "GEMMA2", "gemma3_text": "GEMMA3",
        "olmo2": "OLMO2", "gpt2": "GPT2", "bert": "BERT", "nemotron": "NEMOTRON", "stablelm": "STABLELM", "cohere": "COMMAND_R", "phi": "PHI2"}


def permute(w, heads):  # llama.cpp's LlamaModel.permute: half-rotated rows to interleaved ones
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def unpermute(w, heads):
    return w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def gguf_names(model):
    table = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, ARCH[model.family]), model.layers)
    out = {}
    for name in model.sd:
        if model.family == "bert" and (name.startswith("cls.") or "pooler" in name):
            continue
        key = name.removeprefix("bert.")
        new = table.get_name(key, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise KeyError(f"{model.family}: {name}")
        out[name] = new
    return out


def gguf_tensors(model):
    """HF state dict -> what convert_hf_to_gguf.py writes: names, rotary permutation, Gemma's and Nemotron's 1."""
    names, c, out = gguf_names(model), model.config, {}
    for name, a in model.sd.items():
        if name not in names:
            continue
        if model.family in ("llama", "mistral"):
            if name.endswith(("q_proj.weight", "q_proj.bias")):
                a = permute(a, c.num_attention_heads)
            elif name.endswith(("k_proj.weight", "k_proj.bias")):
                a = permute(a, c.num_key_value_heads)
        if model.family == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            a = a.T
        if model.family in OFFSET and name.endswith("norm.weight"):
            a = a + np.float32(1)
        out[names[name]] = np.ascontiguousarray(a, np.float32)
    return out


def config_of(c, *names):
    for n in names:
        v = getattr(c, n, None)
        if v is not None:
            return v
    return None


def save_gguf(path, model, tensors=None, linear="f32", norm_types=None, arch=None, eps="config", meta=None, drop_meta=()):
    """Write with package gguf. linear: f32, f16, bf16, q8_0, q4_0."""
    c = model.config
    tensors = tensors if tensors is not None else gguf_tensors(model)
    arch = arch or gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, ARCH[model.family])]
    w = gguf.GGUFWriter(str(path), arch)
    w.add_name("tiny")
    w.add_context_length(512)
    w.add_embedding_length(config_of(c, "hidden_size", "n_embd"))
    w.add_block_count(model.layers)
    w.add_vocab_size(c.vocab_size)
    w.add_feed_forward_length(config_of(c, "intermediate_size") or 4 * c.n_embd)
    w.add_head_count(config_of(c, "num_attention_heads", "n_head"))
    w.add_head_count_kv(config_of(c, "num_key_value_heads", "num_attention_heads", "n_head"))
    rp = getattr(c, "rope_parameters", None) or {}
    if "rope_theta" in rp or "full_attention" in rp:
        w.add_rope_freq_base(rp["rope_theta"] if "rope_theta" in rp else rp["full_attention"]["rope_theta"])
    if "partial_rotary_factor" in rp:
        w.add_rope_dimension_count(int(c.hidden_size // c.num_attention_heads * rp["partial_rotary_factor"]))
    if model.family in ("gemma2", "gemma3_text"):
        w.add_sliding_window(c.sliding_window)
    if model.family == "gemma2":
        w.add_attn_logit_softcapping(c.attn_logit_softcapping)
        w.add_final_logit_softcapping(c.final_logit_softcapping)
    if model.family == "cohere":
        w.add_logit_scale(c.logit_scale)
    if hasattr(c, "head_dim") and c.head_dim:
        w.add_key_length(c.head_dim)
        w.add_value_length(c.head_dim)
    value = config_of(c, "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps") if eps == "config" else eps
    if value is not None:
        if model.family in ("gpt2", "bert", "nemotron", "stablelm", "cohere", "phi"):
            w.add_layer_norm_eps(value)
        else:
            w.add_layer_norm_rms_eps(value)
    w.add_file_type({"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}[linear])
    for key, (kind, v) in (meta or {}).items():
        getattr(w, "add_" + kind)(key, v)
    qt = {"f32": Q.F32, "f16": Q.F16, "bf16": Q.BF16, "q8_0": Q.Q8_0, "q4_0": Q.Q4_0}[linear]
    for name, a in tensors.items():
        kind = Q.F32 if a.ndim == 1 or a.shape[-1] % 32 else qt
        kind = (norm_types or {}).get(name, kind)
        put(w, name, a, kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return Path(path)


def put(w, name, a, kind):
    if kind == Q.F32:
        w.add_tensor(name, np.ascontiguousarray(a, np.float32))
    elif kind == Q.F16:
        w.add_tensor(name, np.ascontiguousarray(a, np.float16))
    else:
        raw = gguf.quants.quantize(np.ascontiguousarray(a, np.float32), kind)
        w.add_tensor(name, raw, raw_dtype=kind)


def read_gguf(path):
    r = gguf.GGUFReader(str(path))
    tensors = {}
    for t in r.tensors:
        tensors[t.name] = gguf.quants.dequantize(t.data, t.tensor_type).reshape([int(x) for x in t.shape][::-1]).astype(np.float32)
    fields = {}
    for k, f in r.fields.items():
        if len(f.data) <= 1:
            try:
                fields[k] = f.contents()
            except Exception:
                pass
    return fields, tensors


def gguf_to_hf(path, model):
    """What llama.cpp computes from the file, as weights of the reference's class (for the check of the truth only)."""
    fields, tensors = read_gguf(path)
    sd, c = {}, model.config
    for name, new in gguf_names(model).items():
        if new not in tensors:
            raise KeyError(new)
        a = tensors[new]
        if model.family in ("llama", "mistral"):
            if name.endswith(("q_proj.weight", "q_proj.bias")):
                a = unpermute(a, c.num_attention_heads)
            elif name.endswith(("k_proj.weight", "k_proj.bias")):
                a = unpermute(a, c.num_key_value_heads)
        if model.family == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            a = a.T
        if model.family in OFFSET and name.endswith("norm.weight"):
            a = a - 1
        sd[name] = a
    eps = next((v for k, v in fields.items() if "epsilon" in k), None)
    return sd, eps


# ------------------------------------------------------------------------------------------------ MLX
def mlx_quantize(w, group=64, bits=4):
    """mx.quantize, affine: uint32 words, scales, biases; w = scale * q + bias, least significant bits first."""
    rows, n = w.shape
    g = w.reshape(rows, n // group, group).astype(np.float64)
    top, low = g.max(-1), g.min(-1)
    levels = 2**bits - 1
    scale = np.maximum((top - low) / levels, 1e-7)
    side = np.abs(low) > np.abs(top)
    scale = np.where(side, scale, -scale)
    edge = np.where(side, low, top)
    q0 = np.round(edge / scale)
    scale = np.where(q0 != 0, edge / np.where(q0 == 0, 1, q0), scale)
    bias = np.where(q0 == 0, 0, edge)
    q = np.clip(np.round((g - bias[..., None]) / scale[..., None]), 0, levels).astype(np.uint32)
    per = 32 // bits
    q = q.reshape(rows, n // per, per)
    packed = np.zeros((rows, n // per), np.uint32)
    for i in range(per):
        packed |= q[..., i] << np.uint32(bits * i)
    return packed, scale.astype(np.float32), bias.astype(np.float32)


def mlx_dequantize(packed, scales, biases, group=64, bits=4):
    per = 32 // bits
    q = np.stack([(packed >> np.uint32(bits * i)) & np.uint32(2**bits - 1) for i in range(per)], -1).reshape(packed.shape[0], -1)
    g = q.reshape(q.shape[0], -1, group).astype(np.float32)
    return (g * scales[..., None] + biases[..., None]).reshape(q.shape)


def save_mlx(path, model, sd=None, quant=True, group=64, bits=4, dtype="bf16", prefix=None, skip=(), edit=None, cfg_edit=None):
    """A folder as mlx-lm's convert writes it."""
    sd = dict(sd if sd is not None else model.sd)
    out = {}
    for name, a in sd.items():
        new = (prefix(name) if prefix else name)
        if quant and a.ndim == 2 and a.shape[-1] % group == 0 and not is_norm(name) and not any(s in name for s in skip):
            packed, scales, biases = mlx_quantize(a, group, bits)
            base = new.removesuffix(".weight")
            out[base + ".weight"] = torch.from_numpy(packed.view(np.int32)).view(torch.uint32)
            out[base + ".scales"] = to_torch(scales, dtype)
            out[base + ".biases"] = to_torch(biases, dtype)
        else:
            out[new] = to_torch(a, dtype)
    if edit:
        edit(out)
    cfg = json.loads(model.config.to_json_string(use_diff=False))
    for key, value in (cfg.get("rope_parameters") or {}).items():  # mlx-lm reads the flat names, as older configs have them
        if key in ("rope_theta", "partial_rotary_factor"):
            cfg.setdefault(key, value)
    if quant:
        cfg["quantization"] = {"group_size": group, "bits": bits, "mode": "affine"}
        cfg["quantization_config"] = cfg["quantization"]
    if cfg_edit:
        cfg_edit(cfg)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(cfg, indent=4))
    save_file(out, path / "model.safetensors", metadata={"format": "mlx"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": {k: "model.safetensors" for k in out}}))
    return path


def read_mlx(path, group=64, bits=4):
    with safe_open(Path(path) / "model.safetensors", "pt") as f:
        raw = {k: f.get_tensor(k) for k in f.keys()}
    out = {}
    for k, v in raw.items():
        if k.endswith((".scales", ".biases")):
            continue
        base = k.removesuffix(".weight")
        if base + ".scales" in raw:
            out[k] = mlx_dequantize(v.view(torch.int32).numpy().view(np.uint32), raw[base + ".scales"].float().numpy(), raw[base + ".biases"].float().numpy(), group, bits)
        else:
            out[k] = v.float().numpy()
    return out


# ------------------------------------------------------------------------------------------------ running, for truths
def hf_logits(config, sd, ids, family=None, dtype=torch.float64, cls=None):
    auto = cls or AUTO.get(family, transformers.AutoModelForCausalLM)
    model = auto.from_config(config).eval()
    state = {k: torch.from_numpy(np.ascontiguousarray(v, np.float32)) for k, v in sd.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [m for m in missing if "lm_head" not in m and "decoder" not in m and "embed_tokens" not in m and "pooler" not in m and "position_ids" not in m]
    assert not missing and not unexpected, (missing, unexpected)
    model.tie_weights()
    model.to(dtype)
    with torch.no_grad():
        if family == "t5":
            return model(input_ids=ids, decoder_input_ids=ids).logits.double()
        return model(input_ids=ids).logits.double()


def some_ids(vocab, seed=0, length=48, rows=1):
    return torch.from_numpy(np.random.default_rng(seed).integers(3, vocab, (rows, length)))


def gap(a, b):
    """Relative rms difference of two logit tensors, the mean of each row taken off (softmax does not see it)."""
    a = a - a.mean(-1, keepdim=True)
    b = b - b.mean(-1, keepdim=True)
    return float((a - b).norm() / b.norm())


# ------------------------------------------------------------------------------------------------ numpy decoder
class NumpyDecoder:
    """Llama, Qwen3 and Gemma in numpy alone, float64 inside, norm by norm recorded; `fault` changes one thing."""

    def __init__(self, model, fault=None, work=np.float64, rename=None, rows=None):
        self.m, self.fault, self.work = model, dict(fault or {}), work
        self.rename = rename or (lambda path: path)
        self.rec, self.rows = {}, rows

    def norm(self, x, path, weight=None):
        f, c = self.fault, self.m.config
        w = self.m.sd[path + ".weight"] if weight is None else weight
        eps = f.get("eps", c.rms_norm_eps) if f.get("eps_at", path) == path else c.rms_norm_eps
        xin = x.astype(self.work)
        h = xin.astype(np.float64)
        here = f.get("at", path) == path
        n = h.shape[-1]
        if f.get("centre") and here:
            h = h - h.mean(-1, keepdims=True)
        ms = (h * h).sum(-1, keepdims=True) / (n - (1 if f.get("divisor") and here else 0))
        if f.get("eps_outside") and here:
            y = h / (np.sqrt(ms) + eps)
        else:
            y = h / np.sqrt(ms + eps)
        off = 1.0 if (self.m.family in OFFSET) != bool(f.get("offset") and here) else 0.0
        if f.get("round_first"):
            y = y.astype(self.work).astype(np.float64)
        y = y * (off + w.astype(np.float64))
        if f.get("skip") == path:
            y = h
        y = y.astype(self.work)
        flat = lambda a: a.reshape(-1, a.shape[-1])
        self.rec.setdefault(self.rename(path), []).append((flat(xin), flat(y), w))
        return y.astype(np.float64)

    def __call__(self, ids):
        f, c, sd = self.fault, self.m.config, self.m.sd
        gem = self.m.family == "gemma"
        d, H, KV = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
        hd = getattr(c, "head_dim", None) or d // H
        base = f.get("rope_base", c.rope_parameters["rope_theta"])
        T = len(ids)
        x = sd["model.embed_tokens.weight"][ids].astype(np.float64)
        if gem and not f.get("no_embed_scale"):
            x = x * np.sqrt(d)
        inv = base ** (-np.arange(0, hd, 2) / hd)
        ang = np.arange(T)[:, None] * inv
        cos, sin = np.cos(ang), np.sin(ang)

        def rope(v):
            a, b_ = v[..., : hd // 2], v[..., hd // 2:]
            return np.concatenate([a * cos - b_ * sin, b_ * cos + a * sin], -1)

        lin = lambda v, name: (v.astype(self.work).astype(np.float64) @ sd[name + ".weight"].T.astype(np.float64)
                               + (sd[name + ".bias"].astype(np.float64) if name + ".bias" in sd else 0.0))
        mask = np.triu(np.full((T, T), -np.inf), 1)
        scale = f.get("softmax_scale", hd**-0.5)
        for i in range(c.num_hidden_layers):
            p = f"model.layers.{i}."
            a1, a2 = p + "input_layernorm", p + "post_attention_layernorm"
            w1, w2 = (sd[a2 + ".weight"], sd[a1 + ".weight"]) if f.get("swap") == i else (None, None)
            h = self.norm(x, a1, w1)
            q = lin(h, p + "self_attn.q_proj").reshape(T, H, hd)
            k = lin(h, p + "self_attn.k_proj").reshape(T, KV, hd)
            v = lin(h, p + "self_attn.v_proj").reshape(T, KV, hd).transpose(1, 0, 2)
            if p + "self_attn.q_norm.weight" in sd and not f.get("late_qk"):
                q, k = self.norm(q, p + "self_attn.q_norm"), self.norm(k, p + "self_attn.k_norm")
            q, k = rope(q.transpose(1, 0, 2)), rope(k.transpose(1, 0, 2))
            if f.get("late_qk"):
                q, k = (self.norm(t.transpose(1, 0, 2), p + f"self_attn.{n}_norm").transpose(1, 0, 2) for t, n in ((q, "q"), (k, "k")))
            k, v = np.repeat(k, H // KV, 0), np.repeat(v, H // KV, 0)
            s = q @ k.transpose(0, 2, 1) * scale + mask
            s = np.exp(s - s.max(-1, keepdims=True))
            o = (s / s.sum(-1, keepdims=True)) @ v
            x = x + lin(o.transpose(1, 0, 2).reshape(T, H * hd), p + "self_attn.o_proj")
            h = self.norm(x, a2, w2)
            g, u = lin(h, p + "mlp.gate_proj"), lin(h, p + "mlp.up_proj")
            act = f.get("act", "gelu" if gem else "silu")
            g = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) if act == "gelu" else g / (1 + np.exp(-g))
            x = x + lin(g * u, p + "mlp.down_proj")
        if not f.get("no_final"):
            x = self.norm(x, "model.norm")
        head = sd.get("lm_head.weight", sd["model.embed_tokens.weight"])
        return x @ head.T.astype(np.float64)

    def save(self, path, ids, dtype="f32", weights=True, skip=(), metadata=None, tokens=True, rows=None):
        out = {}
        for name, calls in self.rec.items():
            if name in skip:
                continue
            out[name + ".input"] = to_torch(np.concatenate([c[0] for c in calls]).astype(np.float64), dtype)[: rows or None].contiguous()
            out[name + ".output"] = to_torch(np.concatenate([c[1] for c in calls]).astype(np.float64), dtype)[: rows or None].contiguous()
            if weights:
                out[name + ".weight"] = to_torch(calls[0][2], dtype)
        meta = {"format": "normkit-recording", "version": "1"}
        if tokens:
            meta["tokens"] = json.dumps(TOKENS_FORM(ids))
        save_file(out, path, metadata={**meta, **(metadata or {})})
        return path


def TOKENS_FORM(ids):  # one sequence; the form can be changed here if docs/how-to/record-a-run.md says another one
    return [int(t) for t in ids]


# ------------------------------------------------------------------------------------------------ sub-models of real ones
def real_sub(name, layers, vocab=512, ff=512):
    """The first layers of a real trained model, its first rows of the embedding, its MLP cut to ff columns.

    Every norm is as trained; what is cut is cut on both sides of a case, so the truth stays known.
    """
    folder = REAL / name
    config = transformers.AutoConfig.from_pretrained(folder)
    sd = {}
    with safe_open(folder / "model.safetensors", "pt") as f:
        for k in f.keys():
            layer = layer_of(k)
            if layer is not None and layer >= layers:
                continue
            s = f.get_slice(k)
            if "embed_tokens" in k or "word_embeddings" in k or "lm_head.weight" in k:
                t = s[:vocab]
            elif k.endswith(("gate_proj.weight", "up_proj.weight", "intermediate.dense.weight")):
                t = s[:ff]
            elif k.endswith("intermediate.dense.bias"):
                t = s[:ff]
            elif k.endswith("down_proj.weight") or (k.endswith("output.dense.weight") and "attention" not in k):
                t = s[:, :ff]
            else:
                t = f.get_tensor(k)
            if not t.is_floating_point():
                continue
            sd[k] = t.float().numpy().copy()
    config.num_hidden_layers = layers
    config.vocab_size = vocab
    config.intermediate_size = ff
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    if getattr(config, "max_window_layers", None):
        config.max_window_layers = layers
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if hasattr(config, key):
            setattr(config, key, 1)
    family = {"gemma3": "gemma3_text", "smollm2": "llama", "qwen05": "qwen2", "mpnet": "mpnet"}[name]
    return Model(family, config, sd)


def gguf_string(s):
    s = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(s)) + s
