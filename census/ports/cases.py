"""The cases: PORT, REFERENCE and the truth, each drawn from one seed. Nothing here imports normkit.

    python cases.py            lists the cases
    build(name, seed, folder)  writes a case's files and gives its truth
"""

import base64
import json
import pickle
import shutil
import struct
import sys

import code_ports
import onnxnet
from code_ports import py_logits
from lib import *
from onnxnet import onnx_logits

CASES = {}


def case(name):
    def add(function):
        assert name not in CASES, name
        CASES[name] = function
        return function

    return add


def truth(group, fault, *, port="port", ref="reference", where=(), say=(), second="", wrong=(), level=2, seen="yes", exit=(1,), healthy=False,
          kind="compare", args=None, check=None, expect=None, note="", batch=False, max_mib=2500, pre=()):
    """One case's truth.

    say: any of these wordings (keys of SAY, or regular expressions) names the fault. wrong: wordings that would be false.
    level: the lowest of the five levels at which it can be seen. seen: yes, undecided (the data cannot tell; saying so is
    right), nobody. expect: differs, rounding, same: what a float64 run of both sides must show; check() gives that figure.
    """
    if args is None and kind == "compare":
        args = ["compare", port, ref] + (["--batch", batch] if batch else [])
    return dict(group=group, fault=fault, args=args, where=list(where), say=[SAY.get(s, s) for s in ([say] if isinstance(say, str) else say)], second=second,
                wrong=[SAY.get(s, s) for s in wrong], level=level, seen=seen, exit=list(exit), healthy=healthy, kind=kind, check=check, expect=expect,
                note=note, max_mib=max_mib, pre=list(pre))


# ------------------------------------------------------------------------------------------------ helpers
def stem(key):
    return key.removesuffix(".weight").removesuffix(".bias")


def a_norm(b, model, contains="", not_last=True, suffix=".weight"):
    options = [k for k in model.norms(suffix) if contains in k and (not not_last or layer_of(k) is not None)]
    return options[int(b.rng.integers(len(options)))]


def gg(model, *keys):
    """Both names of tensors: the reference's and GGUF's."""
    table = gguf_names(model)
    return [n for k in keys for n in (stem(k), stem(table[k]))]


def folder_logits(path, family, ids):
    auto = AUTO.get(family, transformers.AutoModelForCausalLM)
    model = auto.from_pretrained(path, dtype=torch.float64).eval()
    with torch.no_grad():
        return (model(input_ids=ids, decoder_input_ids=ids) if family == "t5" else model(input_ids=ids)).logits.double()


def folders(b, m, port_sd=None, dtype="f32", ref_dtype=None, port_config=None, shards=1, cfg_edit=None, ref_shards=1, dtypes=None, family=None):
    """Two folders, and the check that runs both in float64."""
    save_folder(b.dir / "reference", m.config, m.sd, ref_dtype or dtype, ref_shards)
    save_folder(b.dir / "port", port_config or m.config, port_sd if port_sd is not None else m.sd, dtype, shards, cfg_edit=cfg_edit, dtypes=dtypes)
    ids = some_ids(m.config.vocab_size, b.seed)
    return lambda: gap(folder_logits(b.dir / "port", m.family, ids), folder_logits(b.dir / "reference", m.family, ids))


def gguf_check(b, m, file="port.gguf"):
    import copy

    ids = some_ids(m.config.vocab_size, b.seed)

    def check():
        sd, eps = gguf_to_hf(b.dir / file, m)
        c = copy.deepcopy(m.config)
        for k in ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps"):
            if hasattr(c, k) and eps:
                setattr(c, k, eps)
        return gap(hf_logits(c, sd, ids, m.family), hf_logits(m.config, m.sd, ids, m.family))

    return check


def gguf_case(b, family, edit=None, layers=None, real=None, **write):
    """A reference folder and PORT.gguf; edit(tensors, model, table) changes what is stored. bf16 or f32 source."""
    m = real or tiny(b, family, layers)
    dtype = b.pick("bf16", "f32") if not real else "bf16"
    m.sd = round_to(m.sd, dtype)
    save_folder(b.dir / "reference", m.config, m.sd, dtype)
    tensors = gguf_tensors(m)
    got = edit(tensors, m, gguf_names(m)) if edit else None
    linear = write.pop("linear", None) or b.pick("f32", "f16", "q8_0")
    save_gguf(b.dir / "port.gguf", m, tensors, linear=linear, **write)
    return m, got, linear


def tolerance(linear):
    return {"f32": "same", "q4_0": "quantized"}.get(linear, "rounding")


# ================================================================================================ GGUF
def gguf_healthy(name, family, **kw):
    @case(name)
    def build(b):
        m, _, lin = gguf_case(b, family, **kw)
        one = m.family in OFFSET
        return truth("gguf", f"healthy: {family} as llama.cpp's converter writes it, linears {lin}", port="port.gguf", healthy=True, exit=(0,), level=2,
                     say=("llamacpp", "same") if one else ("same",), second="as llama.cpp stores it" if one else "quantized linears are no fault of a norm",
                     wrong=(r"doubled", "swap") if one else ("plus1", "swap"), check=gguf_check(b, m), expect=tolerance(lin))


gguf_healthy("gguf-healthy-gemma3", "gemma3_text")
gguf_healthy("gguf-healthy-llama-permuted", "llama")
gguf_healthy("gguf-healthy-gpt2", "gpt2")
gguf_healthy("gguf-healthy-nemotron", "nemotron")
gguf_healthy("gguf-healthy-cohere-q4", "cohere", linear="q4_0")
gguf_healthy("gguf-healthy-qwen3-bf16", "qwen3", linear="bf16")


@case("gguf-gemma-raw")
def _(b):
    family = b.pick("gemma", "gemma2", "gemma3_text")
    m, _, _ = gguf_case(b, family, lambda t, m, n: [t.__setitem__(n[k], m.sd[k].copy()) for k in m.norms()])
    return truth("gguf", f"{family}: every gain stored without llama.cpp's 1", port="port.gguf", where=gg(m, *m.norms()), say=("minus1", "1 missing"),
                 second="llama.cpp multiplies by the stored gain: zero-centred gains give garbage", wrong=("doubled",), check=gguf_check(b, m), expect="differs",
                 note="stored values equal the folder's: a tool that knows no format says 'equal'")


@case("gguf-gemma-doubled")
def _(b):
    family = b.pick("gemma2", "gemma3_text")
    m, _, _ = gguf_case(b, family, lambda t, m, n: [t.__setitem__(n[k], t[n[k]] + 1) for k in m.norms()])
    return truth("gguf", f"{family}: every gain stored as source + 2", port="port.gguf", where=gg(m, *m.norms()), say=("plus2",), second="the 1 was added twice",
                 check=gguf_check(b, m), expect="differs")


@case("gguf-llama-plus1")
def _(b):
    family = b.pick("llama", "qwen3", "qwen2")
    m, _, _ = gguf_case(b, family, lambda t, m, n: [t.__setitem__(n[k], t[n[k]] + 1) for k in m.norms()])
    return truth("gguf", f"{family}: the converter added Gemma's 1", port="port.gguf", where=gg(m, *m.norms()), say=("plus1",), check=gguf_check(b, m), expect="differs")


@case("gguf-gemma-mixed")
def _(b):
    kind = b.pick("input_layernorm", "post_feedforward_layernorm", "q_norm")

    def edit(t, m, n):
        for k in m.norms():
            if kind in k:
                t[n[k]] = m.sd[k].copy()

    m, _, _ = gguf_case(b, "gemma3_text", edit)
    hit = [k for k in m.norms() if kind in k]
    return truth("gguf", f"gemma3: the 1 is missing at {kind} only", port="port.gguf", where=gg(m, *hit), say=("minus1", "mixed"),
                 second="the others are as llama.cpp stores them", check=gguf_check(b, m), expect="differs")


@case("gguf-one-doubled")
def _(b):
    pick = {}

    def edit(t, m, n):
        k = pick["k"] = a_norm(b, m)
        t[n[k]] = t[n[k]] + 1

    m, _, _ = gguf_case(b, "gemma2", edit)
    return truth("gguf", "gemma2: one gain stored as source + 2 (a grafted layer)", port="port.gguf", where=gg(m, pick["k"]), say=("plus2",), check=gguf_check(b, m), expect="differs")


@case("gguf-nemotron-doubled")
def _(b):
    m, _, _ = gguf_case(b, "nemotron", lambda t, m, n: [t.__setitem__(n[k], t[n[k]] + 1) for k in m.norms()])
    return truth("gguf", "Nemotron LayerNorm1P: the second + 1", port="port.gguf", where=gg(m, *m.norms()), say=("plus2",), check=gguf_check(b, m), expect="differs")


@case("gguf-swapped-in-layer")
def _(b):
    family = b.pick("llama", "qwen3", "qwen2")
    at = {}

    def edit(t, m, n):
        i = at["i"] = b.int(0, m.layers - 1)
        x, y = f"blk.{i}.attn_norm.weight", f"blk.{i}.ffn_norm.weight"
        t[x], t[y] = t[y], t[x]

    m, _, _ = gguf_case(b, family, edit)
    p = f"model.layers.{at['i']}."
    return truth("gguf", f"{family}: attention's and MLP's gains of one layer swapped", port="port.gguf", where=gg(m, p + "input_layernorm.weight", p + "post_attention_layernorm.weight"),
                 say=("swap",), check=gguf_check(b, m), expect="differs")


@case("gguf-gemma2-prefeed-swapped")
def _(b):
    def edit(t, m, n):
        for i in range(m.layers):
            x, y = n[f"model.layers.{i}.post_attention_layernorm.weight"], n[f"model.layers.{i}.pre_feedforward_layernorm.weight"]
            t[x], t[y] = t[y], t[x]

    m, _, _ = gguf_case(b, "gemma2", edit)
    hit = [k for k in m.norms() if "post_attention" in k or "pre_feed" in k]
    return truth("gguf", "gemma2: post_attention and pre_feedforward gains swapped in every layer (NeMo #11951's map)", port="port.gguf", where=gg(m, *hit), say=("swap",),
                 check=gguf_check(b, m), expect="differs")


@case("gguf-eps")
def _(b):
    family = b.pick("llama", "gemma3_text", "gpt2", "qwen2")
    wrong = b.pick(1e-3, 1e-4, 1e-8)
    m, _, _ = gguf_case(b, family, eps=wrong)
    return truth("gguf", f"{family}: eps {wrong:g} in the metadata", port="port.gguf", level=1, say=("eps",), where=["epsilon", "eps"], check=gguf_check(b, m),
                 expect="differs" if wrong > 1e-5 else "rounding")


@case("gguf-eps-absent")
def _(b):
    family = b.pick("llama", "qwen3")
    m, _, _ = gguf_case(b, family, eps=None)
    return truth("gguf", f"{family}: the key of eps is missing (llama.cpp refuses the file)", port="port.gguf", level=1, say=(r"eps[^\n]{0,60}(missing|absent|not (stored|given|there|in))|(missing|absent|no)[^\n]{0,40}eps",),
                 where=["epsilon", "eps"], exit=(1,), note="values are the same; the file cannot be loaded")


@case("gguf-copied")
def _(b):
    at = {}

    def edit(t, m, n):
        kind = b.pick("input_layernorm", "post_attention_layernorm")
        i = b.int(1, m.layers - 1)
        at["to"], at["from"] = f"model.layers.{i}.{kind}.weight", f"model.layers.{i - 1}.{kind}.weight"
        t[n[at["to"]]] = t[n[at["from"]]].copy()

    m, _, _ = gguf_case(b, b.pick("llama", "gemma"), edit, layers=4)
    return truth("gguf", f"{stem(at['to'])} holds the gains of {stem(at['from'])}", port="port.gguf", where=gg(m, at["to"]), say=("copy",), check=gguf_check(b, m), expect="differs")


@case("gguf-negated")
def _(b):
    at = {}

    def edit(t, m, n):
        at["k"] = a_norm(b, m, not_last=False)
        t[n[at["k"]]] = -t[n[at["k"]]]

    m, _, _ = gguf_case(b, "qwen2", edit)
    return truth("gguf", "one gain negated", port="port.gguf", where=gg(m, at["k"]), say=("neg",), check=gguf_check(b, m), expect="differs")


@case("gguf-times-sqrt-n")
def _(b):
    def edit(t, m, n):
        k = n["model.norm.weight"]
        t[k] = (t[k] * np.float32(np.sqrt(t[k].size))).astype(np.float32)

    m, _, _ = gguf_case(b, "llama", edit)
    k = np.sqrt(m.config.hidden_size)
    return truth("gguf", f"final gain times sqrt(n) = {k:.4g}", port="port.gguf", where=gg(m, "model.norm.weight"), say=(rf"times|×|factor|{k:.3g}",), check=gguf_check(b, m), expect="differs")


@case("gguf-missing-qk-norm")
def _(b):
    at = {}

    def edit(t, m, n):
        at["k"] = a_norm(b, m, b.pick("q_norm", "k_norm"))
        del t[n[at["k"]]]

    m, _, _ = gguf_case(b, "qwen3", edit)
    return truth("gguf", "one q or k norm is not in the file", port="port.gguf", where=gg(m, at["k"]), say=("missing",))


@case("gguf-all-qk-norms-lost")
def _(b):
    m, _, _ = gguf_case(b, b.pick("qwen3", "gemma3_text"), lambda t, m, n: [t.pop(n[k]) for k in m.norms() if "q_norm" in k or "k_norm" in k])
    hit = [k for k in m.norms() if "q_norm" in k or "k_norm" in k]
    return truth("gguf", "a merge lost all q and k norms", port="port.gguf", where=gg(m, *hit), say=("missing",))


@case("gguf-final-norm-missing")
def _(b):
    m, _, _ = gguf_case(b, b.pick("llama", "gemma2", "gpt2"), lambda t, m, n: [t.pop(k) for k in list(t) if k.startswith("output_norm")])
    return truth("gguf", "the final norm's tensor is missing", port="port.gguf", where=gg(m, *[k for k in m.norms() if layer_of(k) is None]), say=("missing",))


@case("gguf-extra-norm")
def _(b):
    at = {}

    def edit(t, m, n):
        i = at["i"] = b.int(0, m.layers - 1)
        t[f"blk.{i}.post_attention_norm.weight"] = b.gain(m.config.hidden_size)

    m, _, _ = gguf_case(b, "llama", edit)
    return truth("gguf", "a norm that the reference lacks", port="port.gguf", where=[f"blk.{at['i']}.post_attention_norm"], say=("extra",))


@case("gguf-qk-norm-permuted")
def _(b):
    def edit(t, m, n):
        for k in m.norms():
            if "q_norm" in k or "k_norm" in k:
                t[n[k]] = permute(t[n[k]][:, None], 1)[:, 0].copy()

    m, _, _ = gguf_case(b, "qwen3", edit)
    hit = [k for k in m.norms() if "q_norm" in k or "k_norm" in k]
    return truth("gguf", "q and k norms' gains in the order of the interleaved rotary; the projections are not", port="port.gguf", where=gg(m, *hit), say=("perm",),
                 check=gguf_check(b, m), expect="differs")


@case("gguf-reinit")
def _(b):
    at = {}

    def edit(t, m, n):
        at["k"] = a_norm(b, m, not_last=False)
        t[n[at["k"]]] = np.ones_like(t[n[at["k"]]])

    m, _, _ = gguf_case(b, b.pick("llama", "gemma3_text"), edit)
    return truth("gguf", "one norm's gains are all 1 (as initialised)", port="port.gguf", where=gg(m, at["k"]), say=("reinit",), check=gguf_check(b, m), expect="differs")


@case("gguf-norm-f16")
def _(b):
    m = tiny(b, "llama")
    save_folder(b.dir / "reference", m.config, m.sd, "f32")
    t = gguf_tensors(m)
    save_gguf(b.dir / "port.gguf", m, t, linear="f16", norm_types={k: Q.F16 for k in t if "norm" in k})
    return truth("gguf", "healthy: gains rounded to float16", port="port.gguf", healthy=True, exit=(0,), say=("rounding",), second="equal after rounding to float16",
                 wrong=("plus1", "swap", "perm"), check=gguf_check(b, m), expect="rounding")


@case("gguf-norm-q8")
def _(b):
    m = tiny(b, "qwen2")
    save_folder(b.dir / "reference", m.config, m.sd, "f32")
    t = gguf_tensors(m)
    save_gguf(b.dir / "port.gguf", m, t, linear="q8_0", norm_types={k: Q.Q8_0 for k in t if "norm" in k})
    return truth("gguf", "gains quantized to Q8_0 (llama.cpp never does)", port="port.gguf", exit=(0, 1), say=(r"q8_0|quanti[sz]|round",), where=gg(m, *m.norms()),
                 second="equal after quantization to Q8_0", wrong=("plus1", "swap", "perm", "reinit"), check=gguf_check(b, m), expect="rounding")


@case("gguf-wrong-arch")
def _(b):
    m = tiny(b, "gemma")
    save_folder(b.dir / "reference", m.config, m.sd, "bf16")
    save_gguf(b.dir / "port.gguf", m, linear="q8_0", arch="llama")
    return truth("gguf", "Gemma's tensors under general.architecture = llama: no embedding scale, another activation", port="port.gguf", level=1, say=(r"architect|llama[^\n]*gemma|gemma[^\n]*llama",),
                 where=["general.architecture", "architecture"], exit=(1,))


@case("gguf-bias-swapped")
def _(b):
    at = {}

    def edit(t, m, n):
        i = at["i"] = b.int(0, m.layers - 1)
        x, y = n[f"transformer.h.{i}.ln_1.bias"], n[f"transformer.h.{i}.ln_2.bias"]
        t[x], t[y] = t[y], t[x]

    m, _, _ = gguf_case(b, "gpt2", edit)
    i = at["i"]
    return truth("gguf", "biases of the two norms of a layer swapped, gains right", port="port.gguf", where=gg(m, f"transformer.h.{i}.ln_1.bias", f"transformer.h.{i}.ln_2.bias"),
                 say=("swap",), check=gguf_check(b, m), expect="differs")


@case("gguf-square-transposed")
def _(b):
    at = {}

    def edit(t, m, n):
        i = at["i"] = b.int(0, m.layers - 1)
        k = n[f"transformer.h.{i}.attn.c_proj.weight"]
        t[k] = np.ascontiguousarray(t[k].T)

    m, _, _ = gguf_case(b, "gpt2", edit, linear=b.pick("f32", "f16"))
    return truth("gguf", "attention's square output matrix not transposed; every norm right", port="port.gguf", where=[f"blk.{at['i']}.attn_output", f"transformer.h.{at['i']}.attn.c_proj"],
                 say=("transposed",), second="no norm is at fault", wrong=("swap", "plus1", "eps"), check=gguf_check(b, m), expect="differs")


@case("gguf-lexicographic-layers")
def _(b):
    L = 12
    order = [int(s) for s in sorted(str(i) for i in range(L))]

    def edit(t, m, n):
        old = dict(t)
        for i, j in enumerate(order):
            for kind in ("attn_norm", "ffn_norm"):
                t[f"blk.{i}.{kind}.weight"] = old[f"blk.{j}.{kind}.weight"]

    m, _, _ = gguf_case(b, "llama", edit, layers=L, linear="q8_0")
    hit = [f"model.layers.{i}.{k}.weight" for i, j in enumerate(order) if i != j for k in ("input_layernorm", "post_attention_layernorm")]
    return truth("gguf", "norms of 12 layers in the order 0, 1, 10, 11, 2, ...", port="port.gguf", where=gg(m, *hit), say=("order",), second="layer i holds the gains of layer order[i]",
                 check=gguf_check(b, m), expect="differs")


@case("gguf-finetuned")
def _(b):
    m = tiny(b, "llama")
    save_folder(b.dir / "reference", m.config, m.sd, "bf16")
    f = m.copy()
    for k, a in f.sd.items():
        f.sd[k] = (a * (1 + 0.03 * b.normal(*a.shape))).astype(np.float32)
    save_gguf(b.dir / "port.gguf", f, linear="f16")
    return truth("gguf", "another training state: all values differ by 3 % at random", port="port.gguf", say=("values",), wrong=("plus1", r"- ?1\b(?! ?of)", "swap", "perm", "neg"),
                 where=gg(m, *m.norms()), second="no offset, no factor", check=gguf_check(b, m), expect="differs")


@case("gguf-bert-layernorm-map")
def _(b):
    def edit(t, m, n):
        for i in range(m.layers):
            for kind in ("weight", "bias"):
                x, y = f"blk.{i}.attn_output_norm.{kind}", f"blk.{i}.layer_output_norm.{kind}"
                t[x], t[y] = t[y], t[x]

    m, _, _ = gguf_case(b, "bert", edit, linear="f16")
    hit = [k for k in m.norms() if "encoder" in k]
    return truth("gguf", "BERT: attention's and the layer's output norm swapped in every layer", port="port.gguf", where=gg(m, *hit), say=("swap",))


@case("gguf-plus1-rounded-in-bf16")
def _(b):
    def edit(t, m, n):
        for k in m.norms():
            t[n[k]] = to_torch(t[n[k]], "bf16").float().numpy()

    m, _, _ = gguf_case(b, "gemma", edit, linear="f32")
    return truth("gguf", "the 1 was added in bfloat16: gains are the right ones, rounded to bfloat16", port="port.gguf", say=("rounding",), exit=(0, 1), healthy=False,
                 second="reference + 1, rounded to bfloat16", wrong=(r"doubled", "swap", "re-?init"), check=gguf_check(b, m), expect="rounding",
                 note="a loss of precision; exit 0 or 1 both defensible")


# ================================================================================================ folders of safetensors
def st(name, family, fault, edit, **kw):
    """A case of two folders where edit(b, m, sd) changes the port's state and gives (where, extra truth)."""

    @case(name)
    def build(b):
        fam = b.pick(*family) if isinstance(family, tuple) else family
        m = tiny(b, fam, kw.get("layers"))
        dtype = kw.get("dtype") or b.pick("f32", "bf16")
        m.sd = round_to(m.sd, dtype)
        sd = dict(m.sd)
        where = edit(b, m, sd)
        check = folders(b, m, sd, dtype="f32" if kw.get("port32") else dtype, ref_dtype=dtype, shards=kw.get("shards", 1))
        options = {k: v for k, v in kw.items() if k not in ("layers", "dtype", "shards", "port32", "nocheck")}
        options.setdefault("expect", "differs")
        if kw.get("nocheck"):
            options["expect"], check = None, None
        return truth("safetensors", f"{fam}: {fault}", where=[stem(w) for w in where], check=check, **options)


def _all_plus1(b, m, sd):
    for k in m.norms():
        sd[k] = sd[k] + 1
    return m.norms()


st("st-gemma-converted-plus1", ("gemma", "gemma2", "gemma3_text"), "gains stored with the 1 added; the class adds it again", _all_plus1, say=("plus1", "double1"), port32=True)


def _all_minus1(b, m, sd):
    for k in m.norms():
        sd[k] = sd[k] - 1
    return m.norms()


st("st-llama-minus1", ("llama", "mistral", "qwen2"), "the converter took 1 off, as for a Gemma", _all_minus1, say=("minus1",), port32=True)


def _one_plus1(b, m, sd):
    k = a_norm(b, m, not_last=False)
    sd[k] = sd[k] + 1
    return [k]


st("st-one-plus1", ("qwen3", "olmo2", "stablelm"), "one gain + 1", _one_plus1, say=("plus1",), port32=True)


def _swap_layer(b, m, sd):
    i = b.int(0, m.layers - 1)
    hit = [k for k in m.norms() if layer_of(k) == i and sd[k].shape == (config_of(m.config, "hidden_size", "n_embd"),)][:2]
    for s in (".weight", ".bias"):
        x, y = (stem(h) + s for h in hit)
        if x in sd:
            sd[x], sd[y] = sd[y], sd[x]
    return hit


st("st-swapped-llama", ("llama", "gemma", "mistral"), "two norms of a layer swapped", _swap_layer, say=("swap",))
st("st-swapped-gpt2", ("gpt2", "gpt_neox"), "two norms of a layer swapped, gains and biases", _swap_layer, say=("swap",))


def _swap_qk(b, m, sd):
    i = b.int(0, m.layers - 1)
    x, y = (f"model.layers.{i}.self_attn.{n}_norm.weight" for n in "qk")
    sd[x], sd[y] = sd[y], sd[x]
    return [x, y]


st("st-swapped-qk", ("qwen3", "gemma3_text"), "q and k norms of a layer swapped", _swap_qk, say=("swap",), expect=None,
   note="plain q.k with RMS norms: swapping the gains leaves g_q * g_k per channel; only rotary pairs with unequal gains see it")


def _swap_across(b, m, sd):
    kind = b.pick("input_layernorm", "post_attention_layernorm")
    i, j = sorted(int(v) for v in b.rng.choice(m.layers, 2, replace=False))
    x, y = f"model.layers.{i}.{kind}.weight", f"model.layers.{j}.{kind}.weight"
    sd[x], sd[y] = sd[y], sd[x]
    return [x, y]


st("st-swapped-across-layers", ("llama", "qwen2"), "the same norm of two layers swapped", _swap_across, say=("swap",), layers=4)


def _shifted(b, m, sd):
    keys = [f"model.layers.{i}.input_layernorm.weight" for i in range(m.layers)]
    values = [sd[k] for k in keys]
    for k, v in zip(keys, values[1:] + values[:1]):
        sd[k] = v
    return keys


st("st-shifted-by-one-layer", "llama", "layer i holds the gains of layer i + 1, the last those of the first", _shifted, say=("shift",), layers=4)


def _copied(b, m, sd):
    keys = [k for k in m.norms() if sd[k].shape == sd[m.norms()[-1]].shape]
    i, j = (int(v) for v in b.rng.choice(len(keys), 2, replace=False))
    for s in (".weight", ".bias"):
        if stem(keys[i]) + s in sd:
            sd[stem(keys[i]) + s] = sd[stem(keys[j]) + s].copy()
    return [keys[i]]


st("st-copied", ("gpt2", "qwen3", "phi"), "one norm holds another's values", _copied, say=("copy",))


def _reinit(b, m, sd):
    k = a_norm(b, m, not_last=False)
    sd[k] = np.full_like(sd[k], 0.0 if m.family in OFFSET else 1.0)
    if stem(k) + ".bias" in sd:
        sd[stem(k) + ".bias"] = np.zeros_like(sd[k])
    return [k]


st("st-reinit-one", ("llama", "gpt2", "gemma2"), "one norm as initialised", _reinit, say=("reinit", "zeros"))


def _reinit_all(b, m, sd):
    for k in m.norms():
        sd[k] = np.full_like(sd[k], 0.0 if m.family in OFFSET else 1.0)
    return m.norms()


st("st-reinit-all", ("llama", "gemma"), "all norms as initialised: never loaded", _reinit_all, say=("reinit", "zeros"))


def _noisy_init(b, m, sd):
    k = a_norm(b, m, not_last=False)
    sd[k] = (1 + 0.02 * b.normal(*sd[k].shape)).astype(np.float32)
    return [k]


st("st-reinit-noise", "llama", "one gain drawn anew as 1 + 0.02 noise", _noisy_init, say=("reinit", "values", "unrelated"), wrong=("plus1", "perm"))


def _neg(b, m, sd):
    k = a_norm(b, m)
    sd[k] = -sd[k]
    return [k]


st("st-negated", ("llama", "gpt2", "olmo2"), "one gain negated", _neg, say=("neg",))


def _neg_bias(b, m, sd):
    k = a_norm(b, m, suffix=".bias")
    sd[k] = -sd[k]
    return [k]


st("st-bias-negated", ("gpt2", "phi", "bert"), "one norm's bias negated", _neg_bias, say=("neg",))


def _times(b, m, sd):
    k = a_norm(b, m, not_last=False)
    sd[k] = (sd[k] * np.float32(b.pick(0.5, 1.7, 8.0, 0.125))).astype(np.float32)
    return [k]


st("st-times-k", ("llama", "gpt2", "stablelm"), "one gain times k", _times, say=("times",), wrong=("plus1", "swap"), port32=True)


def _scaled_embed(b, m, sd):
    k = b.uniform(1.02, 1.45)
    for n in m.norms():
        sd[n] = (sd[n] * np.float32(k)).astype(np.float32)
    return m.norms()


st("st-times-k-all", "llama", "all gains times one k (llama.cpp #22565's alarm)", _scaled_embed, say=("times",), wrong=("plus1",), port32=True)


def _perm_qk(b, m, sd):
    hit = [k for k in m.norms() if "q_norm" in k or "k_norm" in k]
    for k in hit:
        sd[k] = (permute if b.seed % 2 else unpermute)(sd[k][:, None], 1)[:, 0].copy()
    return hit


st("st-qk-norm-permuted", "qwen3", "q and k gains in interleaved order", _perm_qk, say=("perm",))


def _reversed(b, m, sd):
    k = a_norm(b, m)
    sd[k] = sd[k][::-1].copy()
    return [k]


st("st-reversed", ("llama", "gpt2"), "one gain reversed, features n-1 ... 0", _reversed, say=("perm", "revers"))


def _bias_lost(b, m, sd):
    for k in m.norms(".bias"):
        sd[k] = np.zeros_like(sd[k])
    return m.norms(".bias")


st("st-biases-zero", ("gpt2", "gpt_neox", "bert"), "all biases of norms are zeros (a converter that skipped them)", _bias_lost, say=("zeros", "bias"))


def _missing(b, m, sd):
    k = a_norm(b, m, not_last=False)
    del sd[k]
    return [k]


st("st-missing-key", ("llama", "gpt2", "olmo2"), "one gain is not in the file; transformers initialises it anew", _missing, say=("missing",), nocheck=True, level=1)


def _merge(b, m, sd):
    hit = [k for k in m.norms() if "q_norm" in k or "k_norm" in k]
    for k in hit:
        del sd[k]
    return hit


st("st-merge-lost-qk-norms", ("olmo2", "qwen3"), "a merge lost the q and k norms (mergekit PR 699)", _merge, say=("missing",), nocheck=True, level=1)


def _extra(b, m, sd):
    i = b.int(0, m.layers - 1)
    k = f"model.layers.{i}.self_attn.q_norm.weight"
    sd[k] = b.gain(16)
    return [k]


st("st-extra-norm", "llama", "a q norm that the reference and the class lack", _extra, say=("extra",), nocheck=True, level=1)


def _nan(b, m, sd):
    k = a_norm(b, m)
    sd[k] = sd[k].copy()
    sd[k][b.int(0, sd[k].size - 1)] = b.pick(np.nan, np.inf)
    return [k]


st("st-nan-gain", "llama", "one number of one gain is NaN or infinite", _nan, say=("nan",), expect=None)


def _zero_gain(b, m, sd):
    k = a_norm(b, m)
    sd[k] = np.zeros_like(sd[k])
    return [k]


st("st-zero-gains", ("llama", "qwen2"), "one gain is all zeros: the block's branch is dead", _zero_gain, say=("zeros",))


def _f8(b, m, sd):
    for k in m.norms():
        sd[k] = torch.from_numpy(sd[k]).to(torch.float8_e4m3fn).float().numpy()
    return m.norms()


st("st-gains-float8", "llama", "gains rounded to float8 e4m3 (stored wider): up to 6 % off", _f8, say=("rounding", "float8", "e4m3", "3 bits"), exit=(0, 1), port32=True,
   wrong=("plus1", "swap", "perm"), expect="rounding", note="equal after rounding to float8; exit 0 or 1 defensible")


def _fold(exact):
    def edit(b, m, sd):
        i = b.int(0, m.layers - 1)
        p = f"model.layers.{i}."
        k = p + "input_layernorm.weight"
        readers = [p + f"self_attn.{n}_proj.weight" for n in ("q", "k", "v")]
        for r in readers if exact else readers[:2]:
            sd[r] = (sd[r] * sd[k][None]).astype(np.float32)
        sd[k] = np.ones_like(sd[k])
        return [k]

    return edit


st("st-folded-into-readers", "llama", "healthy: one gain folded into the q, k and v projections", _fold(True), say=("fold",), healthy=True, exit=(0, 1), port32=True,
   expect="same", wrong=("never loaded",), note="the function is the same; exit 0 or 1 defensible, but 're-initialised' alone is a false accusation")
st("st-folded-one-reader-forgotten", "llama", "one gain folded into q and k, forgotten in v", _fold(False), say=("fold", "reinit"), port32=True,
   second="v_proj was not scaled")


def _gate_up(b, m, sd):
    i = b.int(0, m.layers - 1)
    x, y = (f"model.layers.{i}.mlp.{n}_proj.weight" for n in ("gate", "up"))
    sd[x], sd[y] = sd[y], sd[x]
    return [x, y, f"model.layers.{i}.mlp", f"model.layers.{i}.post_attention_layernorm", f"model.layers.{min(i + 1, m.layers - 1)}.input_layernorm"]


st("st-gate-up-swapped", "llama", "gate and up of one MLP swapped: no norm's fault", _gate_up, say=("swap", "between"), level=4, wrong=(r"eps \S+ instead", "gains? (is|are|was) (negat|copied)"),
   second="norms are all equal; the difference is born between two norms")


def _rot_qproj(b, m, sd):
    i = b.int(0, m.layers - 1)
    for n, h in (("q", m.config.num_attention_heads), ("k", m.config.num_key_value_heads)):
        k = f"model.layers.{i}.self_attn.{n}_proj.weight"
        sd[k] = permute(sd[k], h).copy()
    return [f"model.layers.{i}.self_attn.q_proj", f"model.layers.{i}.self_attn.k_proj", f"model.layers.{i}.self_attn", f"model.layers.{i}.input_layernorm", f"model.layers.{i}.post_attention_layernorm"]


st("st-projections-permuted", "llama", "q and k projections of one layer in GGUF's rotary order: no norm's fault", _rot_qproj, say=("perm", "between"), level=4,
   second="norms equal; born in attention", wrong=(r"eps \S+ instead",))


# --- constants and ambiguity
@case("st-constant-ambiguous")
def _(b):
    m = tiny(b, "llama")
    k = a_norm(b, m)
    m.sd[k] = np.ones_like(m.sd[k])
    sd = dict(m.sd)
    sd[k] = np.full_like(sd[k], 2.0)
    check = folders(b, m, sd)
    return truth("safetensors", "reference all 1, port all 2: + 1 and times 2 cannot be told apart", where=[stem(k)], say=("undecided",), seen="undecided", check=check, expect="differs",
                 second="either is right if the other is named too; 'constant' is right")


@case("st-constants-agree-offset")
def _(b):
    m = tiny(b, "gemma")
    for k in m.norms():
        m.sd[k] = np.zeros_like(m.sd[k])
    sd = {k: v.copy() for k, v in m.sd.items()}
    for k in m.norms():
        sd[k] = sd[k] + 1
    check = folders(b, m, sd)
    return truth("safetensors", "untrained gains: reference all 0, port all 1 (class adds 1)", where=[stem(k) for k in m.norms()], say=("plus1", "undecided", "constant"),
                 check=check, expect="differs", wrong=("times",), note="0 to 1 is + 1, or re-initialised by another class; both tell the truth")


@case("st-all-ones-both")
def _(b):
    m = tiny(b, "llama")
    for k in m.norms():
        m.sd[k] = np.ones_like(m.sd[k])
    check = folders(b, m)
    return truth("safetensors", "healthy: untrained on both sides, all gains 1", healthy=True, exit=(0,), say=("same",), wrong=("swap", "plus1"), check=check, expect="same")


@case("st-equal-gains-cannot-place")
def _(b):
    m = tiny(b, "llama", 3)
    keys = [k for k in m.norms() if layer_of(k) is not None]
    x, y = keys[1], keys[2]
    m.sd[y] = m.sd[x].copy()
    sd = dict(m.sd)
    sd[x], sd[y] = sd[y], sd[x]
    check = folders(b, m, sd)
    return truth("safetensors", "healthy: two norms with equal gains 'swapped': nothing changes", healthy=True, exit=(0,), say=("same",), wrong=("swap",), check=check, expect="same", seen="yes")


# --- healthy oddities
@case("st-healthy-dtype-chain")
def _(b):
    m = tiny(b, b.pick("llama", "gemma2", "gpt2"))
    m.sd = round_to(m.sd, "bf16")
    sd = round_to(m.sd, "f16")
    check = folders(b, m, sd, dtype="f32", ref_dtype="bf16")
    return truth("safetensors", "healthy: bf16 to f16 to f32", healthy=True, exit=(0,), say=("same", "rounding"), wrong=("swap", "plus1", "reinit"), check=check, expect="rounding")


@case("st-healthy-f32-to-bf16")
def _(b):
    m = tiny(b, b.pick("llama", "olmo2", "qwen3"))
    check = folders(b, m, m.sd, dtype="bf16", ref_dtype="f32")
    return truth("safetensors", "healthy: the port is the reference rounded to bf16", healthy=True, exit=(0,), say=("rounding",), wrong=("swap", "plus1", "times"), check=check, expect="rounding")


@case("st-healthy-f32-to-f16")
def _(b):
    m = tiny(b, b.pick("bert", "phi", "stablelm"))
    check = folders(b, m, m.sd, dtype="f16", ref_dtype="f32")
    return truth("safetensors", "healthy: the port is the reference rounded to f16", healthy=True, exit=(0,), say=("rounding",), wrong=("swap", "plus1", "times"), check=check, expect="rounding")


@case("st-healthy-sharded")
def _(b):
    m = tiny(b, b.pick("llama", "cohere", "t5"))
    check = folders(b, m, shards=b.int(2, 4), dtype=b.pick("f32", "bf16"))
    return truth("safetensors", "healthy: shards against one file", healthy=True, exit=(0,), say=("same",), check=check, expect="same")


@case("st-healthy-index-file-named")
def _(b):
    m = tiny(b, "llama")
    check = folders(b, m, shards=3)
    return truth("safetensors", "healthy: the index named itself, against a folder", port="port/model.safetensors.index.json", healthy=True, exit=(0,), say=("same",), check=check, expect="same")


@case("st-healthy-tied-head")
def _(b):
    m = tiny(b, "gemma")
    sd = dict(m.sd)
    sd["lm_head.weight"] = sd["model.embed_tokens.weight"].copy()
    check = folders(b, m, sd, dtype="bf16")
    return truth("safetensors", "healthy: the tied head stored once more", healthy=True, exit=(0,), say=("same",), check=check, expect="same", wrong=("swap",))


@case("st-healthy-prefix")
def _(b):
    m = tiny(b, b.pick("llama", "qwen3"))
    save_folder(b.dir / "reference", m.config, m.sd)
    prefix = b.pick("language_model.", "module.", "_orig_mod.", "base_model.model.")
    save_file({prefix + k: to_torch(v, "f32") for k, v in m.sd.items()}, b.path("port.safetensors"))
    return truth("safetensors", f"healthy: every key has the prefix {prefix}", port="port.safetensors", ref="reference/model.safetensors", healthy=True, exit=(0,), say=("same",))


@case("st-healthy-renamed")
def _(b):
    m = tiny(b, "llama", 3)
    save_folder(b.dir / "reference", m.config, m.sd)
    new = code_ports.decoder_weights(m)
    if b.pick(True, False):
        new = {k.replace("n1.g", "ln_attn.scale").replace("n2.g", "ln_mlp.scale").replace("out_scale.g", "final_scale").replace("stack", "h"): v for k, v in new.items()}
    save_file({k: to_torch(v, "f32").clone() for k, v in new.items()}, b.path("port.safetensors"))
    return truth("safetensors", "healthy: other names, fused projections; norms paired by values", port="port.safetensors", healthy=True, exit=(0,), say=("same",), level=2,
                 note="names say little: 'stack.0.n1.g'; the values pair them")


@case("st-renamed-with-swap")
def _(b):
    m = tiny(b, "llama", 3)
    save_folder(b.dir / "reference", m.config, m.sd)
    i = b.int(0, 2)
    new = code_ports.decoder_weights(m)
    new = {k.replace("n1.g", "ln_attn.scale").replace("n2.g", "ln_mlp.scale").replace("out_scale.g", "final_scale").replace("stack", "h"): v for k, v in new.items()}
    x, y = f"h.{i}.ln_attn.scale", f"h.{i}.ln_mlp.scale"
    new[x], new[y] = new[y], new[x]
    save_file({k: to_torch(v, "f32").clone() for k, v in new.items()}, b.path("port.safetensors"))
    p = f"model.layers.{i}."
    return truth("safetensors", "other names, and the two norms of one layer swapped", port="port.safetensors", where=[f"h.{i}.ln_attn", f"h.{i}.ln_mlp", p + "input_layernorm", p + "post_attention_layernorm"],
                 say=("swap",), second="values alone would pair them crosswise and call all well; names (attn, mlp) and the order tell", level=5)


@case("st-finetuned")
def _(b):
    m = tiny(b, b.pick("llama", "gemma", "gpt2"))
    sd = {k: (v + 0.02 * np.abs(v).mean() * b.normal(*v.shape)).astype(np.float32) for k, v in m.sd.items()}
    check = folders(b, m, sd, dtype="f32")
    return truth("safetensors", "a fine-tuned model: every value differs by about 2 %", where=[stem(k) for k in m.norms()], say=("values",), wrong=("plus1", "swap", "perm", "neg", "re-?init", r"times [\d.]+"),
                 check=check, expect="differs", second="different values: no conversion fault")


@case("st-finetuned-gains-grew")
def _(b):
    m = tiny(b, "qwen2")
    sd = {k: (v * (1 + 0.01 * b.normal(*v.shape)) + (0.05 if k in m.norms() else 0)).astype(np.float32) for k, v in m.sd.items()}
    check = folders(b, m, sd)
    return truth("safetensors", "fine-tuned, the gains grew by 0.05 on the mean: still no offset of 1", where=[stem(k) for k in m.norms()], say=("values",), wrong=("plus1", "swap", "perm"),
                 check=check, expect="differs")


@case("st-healthy-t5")
def _(b):
    m = tiny(b, "t5", 2)
    check = folders(b, m, dtype="bf16", ref_dtype="f32")
    return truth("safetensors", "healthy: T5, bf16 against f32", healthy=True, exit=(0,), say=("same", "rounding"), check=check, expect="rounding")


@case("st-healthy-bert-gamma-beta")
def _(b):
    m = tiny(b, "bert")
    sd = {k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v for k, v in m.sd.items()}
    check = folders(b, m, sd)
    return truth("safetensors", "healthy: BERT's old names, LayerNorm.gamma and .beta, which transformers still loads", healthy=True, exit=(0,), say=("same",), check=check, expect="same", wrong=("swap",))


@case("st-healthy-inv-freq")
def _(b):
    m = tiny(b, "llama")
    hd = m.config.hidden_size // 4
    sd = dict(m.sd)
    for i in range(m.layers):
        sd[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = (10000.0 ** (-np.arange(0, hd, 2) / hd)).astype(np.float32)
    check = folders(b, m, sd)
    return truth("safetensors", "healthy: an old Llama checkpoint that stores inv_freq in each layer", healthy=True, exit=(0,), say=("same",), check=check, expect="same", note="extra one-dimensional tensors that are no norms")


@case("st-healthy-gpt2-hub-names")
def _(b):
    m = tiny(b, "gpt2")
    sd = {k.removeprefix("transformer."): v for k, v in m.sd.items()}
    for i in range(m.layers):
        sd[f"h.{i}.attn.bias"] = np.tril(np.ones((512, 512), np.float32))[None, None]
    check = folders(b, m, sd)
    return truth("safetensors", "healthy: GPT-2 as on the hub, no prefix, the mask stored as attn.bias", healthy=True, exit=(0,), say=("same",), check=check, expect="same")


def permute_heads(b, m, sd):
    """Query groups in another order, consistently: the function stays."""
    c = m.config
    kv, H = c.num_key_value_heads, c.num_attention_heads
    hd = getattr(c, "head_dim", None) or c.hidden_size // H
    order = np.roll(np.arange(kv), 1)
    for i in range(m.layers):
        p = f"model.layers.{i}.self_attn."
        for n, groups in (("q", H // kv), ("k", 1), ("v", 1)):
            w = sd[p + n + "_proj.weight"]
            sd[p + n + "_proj.weight"] = w.reshape(kv, groups * hd, -1)[order].reshape(w.shape)
        w = sd[p + "o_proj.weight"]
        sd[p + "o_proj.weight"] = np.ascontiguousarray(w.reshape(w.shape[0], kv, -1)[:, order].reshape(w.shape))
    return []


st("st-healthy-heads-permuted", ("llama", "qwen3"), "healthy: heads in another order, consistently in q, k, v and o", permute_heads, say=("same", "perm"), healthy=True, exit=(0, 1), expect="same",
   wrong=("plus1", r"eps \S+ instead"), note="norms are equal; the function is the same; linears differ by a permutation of heads")


def permute_stream(b, m, sd):
    order = b.rng.permutation(m.config.hidden_size)
    for k, a in list(sd.items()):
        if "o_proj" in k or "down_proj" in k:
            sd[k] = np.ascontiguousarray(a[order])
        elif a.ndim == 2:
            sd[k] = np.ascontiguousarray(a[:, order])
        elif is_norm(k):
            sd[k] = a[order].copy()
    return m.norms()


st("st-healthy-stream-permuted", "llama", "healthy: the features of the residual stream in another order, consistently everywhere", permute_stream, say=("perm",), healthy=True, exit=(0, 1), expect="same",
   wrong=("re-?init", "plus1"), note="every gain is permuted, by one permutation; the function is the same")


@case("gguf-healthy-rope-freqs")
def _(b):
    m, _, lin = gguf_case(b, "llama", lambda t, m, n: t.__setitem__("rope_freqs.weight", np.ones(m.config.hidden_size // 8, np.float32)))
    return truth("gguf", "healthy: rope_freqs.weight of ones, as llama.cpp writes for Llama 3", port="port.gguf", healthy=True, exit=(0,), say=("same",), wrong=("swap", "re-?init"), check=gguf_check(b, m), expect=tolerance(lin),
                 note="a one-dimensional tensor that is no norm")


# --- what nobody can see in the files given
def blind(name, fault, make, **kw):
    @case(name)
    def build(b):
        port, ref = make(b)
        return truth("blind", fault, port=port, ref=ref, seen="nobody", exit=(0,), healthy=True, level=4, say=(r"not (checked|compared|run|looked)|cannot be run|values only|only (the )?(values|tensors|weights)|no (rows|run|code)|without running|level",),
                     note="right: the same, with what was not looked at said", **kw)


def _blind_st(b):
    m = tiny(b, "llama")
    save_folder(b.dir / "reference", m.config, m.sd)
    shutil.copy(b.dir / "reference/model.safetensors", b.path("port.safetensors"))
    return "port.safetensors", "reference/model.safetensors"


blind("blind-weights-only", "the port's code scales attention wrongly; only its weights are given, which are the reference's", _blind_st)


def _blind_gguf(b):
    m = tiny(b, "gemma")
    save_gguf(b.dir / "port.gguf", m, linear="f16")
    save_gguf(b.dir / "reference.gguf", m, linear="q8_0")
    return "port.gguf", "reference.gguf"


blind("blind-gguf-runtime", "the runtime rounds before the gain; both GGUFs hold the same gains", _blind_gguf)


def _blind_map(b):
    m = tiny(b, "qwen3")
    save_file({k: to_torch(v, "f32").clone() for k, v in code_ports.decoder_weights(m).items()}, b.path("port.safetensors"))
    save_folder(b.dir / "reference", m.config, m.sd)
    return "port.safetensors", "reference"


blind("blind-port-code-missing", "the port's code normalizes q and k after the rotary; only its file of other names is given", _blind_map)


@case("blind-code-without-batch")
def _(b):
    m = tiny(b, "llama", 2)
    port = code_ports.write(b, m, [("* HEAD_DIM**-0.5", "* WIDTH**-0.5")])
    save_folder(b.dir / "reference", m.config, m.sd)
    return truth("blind", "FILE.py with a wrong softmax scale, and no --batch: values and formulas agree", port=port, seen="nobody", exit=(0, 1, 2), healthy=True, level=4,
                 say=(r"--batch|not (checked|compared|run|looked)|no (rows|run|inputs|batch)|differ",), note="says that rows were not compared for want of inputs (or makes token inputs of its own and sees the fault, exit 1)")


# --- passports as a side
def passports(name, fault, cfg_edit, healthy, say, **kw):
    @case(name)
    def build(b):
        m = tiny(b, b.pick("llama", "gemma"), 2)
        check = folders(b, m, cfg_edit=cfg_edit)
        return truth("passports", fault, ref="made/reference/passports.json", pre=[["identify", "reference", "--out", "made"]], healthy=healthy, exit=(0,) if healthy else (1,), say=say, level=3,
                     where=[] if healthy else [stem(k) for k in m.norms()], check=check, expect="same" if healthy else "differs", **kw)


passports("passports-healthy", "healthy: a folder against the passports of its source", None, True, ("same",))
passports("passports-eps", "eps 1e-3 in config.json, against the source's passports", lambda c: c.__setitem__("rms_norm_eps", 1e-3), False, ("eps",))


# --- metadata of folders
def cfg_case(name, family, fault, cfg_edit, say, expect="differs", **kw):
    @case(name)
    def build(b):
        fam = b.pick(*family) if isinstance(family, tuple) else family
        m = tiny(b, fam)
        note = {}
        check = folders(b, m, cfg_edit=lambda c: note.setdefault("x", cfg_edit(b, c)), dtype=b.pick("f32", "bf16"))
        options = dict(level=1, where=["eps", "epsilon"])
        options.update(kw)
        return truth("metadata", f"{fam}: {fault} ({note.get('x')})", say=say, check=check, expect=expect, **options)


def _set(key, *values):
    def edit(b, c):
        assert key in c, key
        old = c[key]
        c[key] = b.pick(*[v for v in values if v != old])
        return f"{key} {old} -> {c[key]}"

    return edit


cfg_case("meta-eps-large", ("llama", "qwen3", "olmo2"), "eps in config.json", _set("rms_norm_eps", 1e-3, 1e-4), ("eps",))
cfg_case("meta-eps-gpt2", "gpt2", "eps in config.json", _set("layer_norm_epsilon", 1e-3, 1e-2), ("eps",))
cfg_case("meta-eps-tiny", "llama", "eps too small", _set("rms_norm_eps", 1e-8, 1e-12), ("eps",), expect="rounding")


def _rename(old, new):
    def edit(b, c):
        c[new] = c.pop(old)
        return f"{old} renamed {new}"

    return edit


@case("meta-eps-key-of-another-family")
def _(b):
    m = tiny(b, "llama", eps=1e-3)
    check = folders(b, m, cfg_edit=lambda c: _rename("rms_norm_eps", "layer_norm_epsilon")(b, c))
    return truth("metadata", "llama trained at eps 1e-3, its key named as GPT-2 names it: the class uses its default 1e-6", level=1, say=("eps",), where=["eps", "epsilon", "rms_norm_eps"], check=check, expect="differs",
                 second="stored 1e-3 but not as the class reads it")


@case("meta-healthy-eps-float32")
def _(b):
    m = tiny(b, b.pick("llama", "gemma"), eps=1e-6)
    check = folders(b, m, cfg_edit=lambda c: c.__setitem__("rms_norm_eps", float(np.float32(1e-6))))
    return truth("metadata", "healthy: eps 9.999999974752427e-07, 1e-6 through float32", healthy=True, exit=(0,), say=("same",), wrong=(r"eps[^\n]*instead",), check=check, expect="same")


@case("meta-rope-theta")
def _(b):
    m = tiny(b, "llama", theta=10000.0)
    check = folders(b, m, cfg_edit=lambda c: c["rope_parameters"].__setitem__("rope_theta", b.pick(500000.0, 1000000.0)))
    return truth("metadata", "rope_theta in config.json: no norm's fault", level=1, say=("rope", "theta"), where=["rope_theta", "rope"], check=check, expect="differs", wrong=(r"eps \S+ instead", "swap"),
                 second="born in attention of layer 0, between input_layernorm and post_attention_layernorm")


@case("meta-gemma-labelled-llama")
def _(b):
    m = tiny(b, "gemma")
    c = transformers.LlamaConfig(vocab_size=m.config.vocab_size, hidden_size=m.config.hidden_size, num_hidden_layers=m.layers, num_attention_heads=4,
                                 num_key_value_heads=m.config.num_key_value_heads, intermediate_size=m.config.intermediate_size, rms_norm_eps=m.config.rms_norm_eps,
                                 rope_parameters=m.config.rope_parameters, tie_word_embeddings=True, head_dim=m.config.head_dim, bos_token_id=1, eos_token_id=2, architectures=["LlamaForCausalLM"])
    check = folders(b, m, port_config=c)
    return truth("metadata", "Gemma's weights under a Llama config: the 1 is not added, the embedding not scaled, another activation", level=1, say=("arch", "offset", r"1 \+"),
                 where=["architect", "model_type", "LlamaForCausalLM", "model.layers.0.input_layernorm"], check=check, expect="differs")


@case("meta-activation")
def _(b):
    m = tiny(b, "gpt2")
    check = folders(b, m, cfg_edit=lambda c: c.__setitem__("activation_function", b.pick("relu", "silu")))
    return truth("metadata", "another activation in config.json: no norm's fault", level=4, say=("activation", "between", "mlp"), where=["activation", "transformer.h.0.mlp", "transformer.h.0.ln_2", "transformer.h.1.ln_1"],
                 check=check, expect="differs", wrong=(r"eps \S+ instead", "swap"))


@case("meta-fewer-layers")
def _(b):
    m = tiny(b, "llama", 4)
    sd = {k: v for k, v in m.sd.items() if layer_of(k) != 3}
    check = folders(b, m, sd, cfg_edit=lambda c: c.__setitem__("num_hidden_layers", 3))
    return truth("metadata", "the port has 3 layers of 4", level=1, say=("missing", "layers"), where=["model.layers.3", "num_hidden_layers", "layers.3"], check=check, expect="differs")


@case("meta-eps-latent-norm")
def _(b):
    """GLM-4 MoE lite's latent norms ignore the config's eps in transformers; a port that obeys the config differs there."""
    d, n = 64, 48
    ref = '''import torch, torch.nn as nn


class Norm(nn.Module):
    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x):
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Latent(nn.Module):
    def __init__(self, width=%d, rank=%d, eps=%s):
        super().__init__()
        self.norm = Norm(width, 1e-3)
        self.q_a_proj, self.q_a_layernorm, self.q_b_proj = nn.Linear(width, rank, bias=False), %s, nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return x + self.q_b_proj(self.q_a_layernorm(self.q_a_proj(self.norm(x))))


def load():
    torch.manual_seed(%d)
    m = Latent()
    for p in m.parameters():
        torch.nn.init.normal_(p, 1 if p.ndim == 1 else 0, 0.3 if p.ndim == 1 else p.shape[-1] ** -0.5 * 0.2)
    return m.eval()


def batch():
    torch.manual_seed(%d)
    return torch.randn(2, 24, %d) * 0.3
'''
    s1, s2 = b.int(0, 9999), b.int(0, 9999)
    b.path("reference.py").write_text(ref % (d, n, 1e-3, "Norm(rank)", s1, s2, d))
    b.path("port.py").write_text(ref % (d, n, 1e-3, "Norm(rank, eps)", s1, s2, d))

    def check():
        from code_ports import load_py
        (p, x), (r, _) = load_py(b.dir / "port.py:load"), load_py(b.dir / "reference.py:load")
        with torch.no_grad():
            return float((p.double()(x.double()) - r.double()(x.double())).norm() / r.double()(x.double()).norm())

    return truth("metadata", "the latent norm has eps 1e-6 in the reference, the config's 1e-3 in the port", port="port.py:load", ref="reference.py:load", batch="reference.py:batch", level=3, say=("eps",),
                 where=["q_a_layernorm"], check=check, expect="differs")


# ================================================================================================ MLX
def mlx_case(name, family, fault, edit=None, *, sd_edit=None, healthy=False, say=("same",), exit=None, **kw):
    @case(name)
    def build(b):
        fam = b.pick(*family) if isinstance(family, tuple) else family
        m = tiny(b, fam, kw.get("layers"), hidden=128)
        m.sd = round_to(m.sd, "bf16")
        save_folder(b.dir / "reference", m.config, m.sd, "bf16")
        sd = dict(m.sd)
        where = sd_edit(b, m, sd) if sd_edit else []
        bits, group = kw.get("bits") or b.pick(4, 8), kw.get("group") or b.pick(32, 64)
        found = {}
        save_mlx(b.dir / "port", m, sd, quant=kw.get("quant", True), bits=bits, group=group, prefix=kw.get("prefix"), skip=kw.get("skip", ()), dtype=kw.get("dtype", "bf16"),
                 edit=(lambda out: found.setdefault("w", edit(b, m, out))) if edit else None, cfg_edit=kw.get("cfg_edit"))
        where = list(where) + list(found.get("w") or [])
        ids = some_ids(m.config.vocab_size, b.seed)
        shift = kw.get("shift", 0)

        def check():
            got = read_mlx(b.dir / "port", group, bits)
            if kw.get("unprefix"):
                got = {kw["unprefix"](k): v for k, v in got.items()}
            if shift:
                got = {k: v - shift if k in m.norms() else v for k, v in got.items()}
            dt = torch.float32 if fam == "qwen3_next" else torch.float64
            return gap(hf_logits(m.config, got, ids, fam, dt), hf_logits(m.config, m.sd, ids, fam, dt))

        options = {k: v for k, v in kw.items() if k not in ("layers", "bits", "group", "quant", "prefix", "skip", "dtype", "cfg_edit", "shift", "unprefix", "nocheck")}
        return truth("mlx", f"{fam}: {fault}" + (f" ({bits} bits, groups of {group})" if kw.get("quant", True) else ""), where=[stem(w) for w in where], say=say, healthy=healthy,
                     exit=exit or ((0,) if healthy else (1,)), check=None if kw.get("nocheck") else check,
                     expect=None if kw.get("nocheck") else ("quantized" if healthy else "differs"), **options)


mlx_case("mlx-healthy-quantized", ("llama", "qwen3", "gemma"), "healthy: quantized linears, intact norms", healthy=True, wrong=("plus1", "swap"))
mlx_case("mlx-healthy-prefixed", "qwen3", "healthy: as mlx-vlm names it, language_model.", healthy=True, prefix=lambda k: "language_model." + k, unprefix=lambda k: k.removeprefix("language_model."))
mlx_case("mlx-healthy-skipped-layers", "llama", "healthy: embedding and head not quantized, a block's own bits in the config", healthy=True, skip=("embed", "lm_head"),
         cfg_edit=lambda c: c["quantization"].update({"model.layers.0.mlp.down_proj": {"group_size": 64, "bits": 8}}) if False else None)


def _plus(k):
    def edit(b, m, sd):
        for n in m.norms():
            sd[n] = to_torch(sd[n] + np.float32(k), "bf16").float().numpy()
        return m.norms()

    return edit


mlx_case("mlx-qwen3next-healthy-shifted", "qwen3_next", "healthy: gains stored as source + 1, as mlx-lm's sanitize stores them", sd_edit=_plus(1), healthy=True, shift=1, say=("plus1", "same", "mlx"),
         wrong=("doubled", "plus2"), layers=2, exit=(0,), note="mlx-lm adds the 1 while loading an HF folder and writes it so: right in that format, source + 1 elsewhere")
mlx_case("mlx-qwen3next-shifted-twice", "qwen3_next", "gains stored as source + 2 (mlx-lm PR 1623, mlx-vlm PR 2114)", sd_edit=_plus(2), say=("plus2",), shift=1, layers=2)
mlx_case("mlx-gemma-plus1", ("gemma", "gemma2", "gemma3_text"), "gains stored with the 1; mlx-lm adds it when it runs", sd_edit=_plus(1), say=("plus1", "double1"))
mlx_case("mlx-swapped", ("llama", "qwen2"), "two norms of a layer swapped", sd_edit=_swap_layer, say=("swap",))
mlx_case("mlx-missing-k-norm", "qwen3", "a k norm is missing", edit=lambda b, m, out: [k for k in [a_norm(b, m, "k_norm")] if out.pop(k) is not None], say=("missing",), nocheck=True)


def _scales_wrong(b, m, out):
    k = f"model.layers.{b.int(0, m.layers - 1)}.self_attn.{b.pick('q', 'v', 'o')}_proj"
    out[k + ".scales"] = out[k + ".scales"].roll(1, 0).contiguous()
    return [k]


mlx_case("mlx-scales-rolled", "llama", "one linear's scales shifted by a row; every norm right", edit=_scales_wrong, say=("differ", "scales", "quanti"), level=4, wrong=(r"gains[^\n]*(swap|copied)", "plus1"),
         bits=8, second="no norm is at fault; that linear's values are not the reference's", exit=(0, 1), seen="yes", note="values of linears are not asked for at level 2; level 4 needs a dequantizing loader")


@case("mlx-mixed-mtp")
def _(b):
    m = tiny(b, "qwen3_next", 3, hidden=128)
    m.sd = round_to(m.sd, "bf16")
    save_folder(b.dir / "reference", m.config, m.sd, "bf16")
    sd = dict(m.sd)
    trunk = [k for k in m.norms() if layer_of(k) in (0, 1)]
    for k in trunk:
        sd[k] = to_torch(sd[k] + np.float32(2), "bf16").float().numpy()
    for k in m.norms():
        if k not in trunk:
            sd[k] = to_torch(sd[k] + np.float32(1), "bf16").float().numpy()
    save_mlx(b.dir / "port", m, sd, quant=False)
    return truth("mlx", "qwen3_next: trunk norms at source + 2, the rest at source + 1 (unsloth-zoo PR 1095)", where=[stem(k) for k in trunk], say=("plus2", "mixed"), level=2)


# ================================================================================================ ONNX
def onnx_case(name, family, fault, *, edits=None, fault_args=None, sd_edit=None, style=None, half=False, say=("same",), healthy=False, expect="differs", exit=None, ref="folder", external=None, **kw):
    @case(name)
    def build(b):
        fam = b.pick(*family) if isinstance(family, tuple) else family
        m = tiny(b, fam, kw.get("layers"), ln_eps=1e-5) if fam == "bert" else tiny(b, fam, kw.get("layers"))
        how = style or b.pick("fused", "decomposed")
        h = b.pick(True, False) if half == "either" else half
        writer = onnxnet.gpt if fam in ("gpt2", "bert") else onnxnet.decoder
        where, e, fa, p = [], {}, {}, m
        if edits:
            where, e = edits(b, m)
        if fault_args:
            fa, where = fault_args(b, m)
        if sd_edit:
            p = m.copy()
            where = sd_edit(b, p, p.sd)
        writer(b.path("port.onnx"), p, how, h, e, fa, external)
        if ref == "folder":
            save_folder(b.dir / "reference", m.config, m.sd, "f32")
            r = "reference"
        else:
            writer(b.path("reference.onnx"), m, kw.get("ref_style", how), False)
            r = "reference.onnx"
        ids = some_ids(m.config.vocab_size, b.seed)
        options = {k: v for k, v in kw.items() if k not in ("layers", "ref_style")}
        options.setdefault("level", 2)
        return truth("onnx", f"{fam}, {how}{', float16' if h else ''}: {fault}", port="port.onnx", ref=r, where=[stem(w) for w in where], say=say, healthy=healthy,
                     exit=exit or ((0,) if healthy else (1,)), check=lambda: gap(onnx_logits(b.dir / "port.onnx", ids), hf_logits(m.config, m.sd, ids, fam)), expect=expect, **options)


def at_norm(contains="", last=False, **change):
    def edits(b, m):
        k = stem(a_norm(b, m, contains)) if not last else stem([k for k in m.norms() if layer_of(k) is None][-1])
        return [k], {k: {n: v(b) if callable(v) else v for n, v in change.items()}}

    return edits


def everywhere(**change):
    def edits(b, m):
        return m.norms(), {stem(k): dict(change) for k in m.norms()}

    return edits


onnx_case("onnx-healthy-decomposed", ("llama", "gpt2", "bert"), "healthy: norms decomposed", style="decomposed", healthy=True, expect="same")
onnx_case("onnx-healthy-fused", ("qwen3", "gpt2", "bert"), "healthy: fused norms", style="fused", healthy=True, expect="same")
onnx_case("onnx-healthy-gemma-folded-1", "gemma", "healthy: the exporter stored 1 + weight", style="fused", healthy=True, expect="same", say=("same", "plus1"), wrong=("doubled",),
          note="a fused norm multiplies by what it stores: gains + 1 are right here")
onnx_case("onnx-healthy-half", ("llama", "gpt2"), "healthy: float16 with the statistics in float32", style="decomposed", half=True, healthy=True, expect="rounding", say=("same", "rounding"))
onnx_case("onnx-healthy-simplified", "llama", "healthy: onnxruntime's SimplifiedLayerNormalization", style="simplified", healthy=True, expect="same")
onnx_case("onnx-healthy-styles-differ", ("bert", "llama"), "healthy: decomposed against fused, both ONNX", style="decomposed", ref="onnx", ref_style="fused", healthy=True, expect="same")
onnx_case("onnx-healthy-external-data", "llama", "healthy: external data in its own folder", healthy=True, expect="same", external="port.onnx.data")
onnx_case("onnx-eps-one", ("llama", "gpt2"), "eps of one norm", edits=at_norm(eps=lambda b: b.pick(1e-2, 1e-3)), say=("eps",), level=3)
onnx_case("onnx-eps-all", ("qwen3", "bert"), "eps of all norms is 1e-3", edits=everywhere(eps=1e-3), say=("eps",), level=3, half="either")
onnx_case("onnx-eps-outside", "llama", "eps outside the root, decomposed", edits=everywhere(outside=True, style="decomposed", eps=3e-3), style="decomposed", say=("eps", "outside"), level=3,
          note="eps 3e-3 outside, the reference's inside")
onnx_case("onnx-divisor", ("gpt2", "bert"), "variance divided by n - 1", edits=everywhere(divisor=True), style="decomposed", say=(r"n ?- ?1|divisor|unbiased|correction|Bessel",), level=3)
onnx_case("onnx-swapped", ("llama", "gpt2"), "two norms of a layer swapped", sd_edit=_swap_layer, say=("swap",))
onnx_case("onnx-reinit", ("gpt2", "llama"), "one norm as initialised", sd_edit=_reinit, say=("reinit",))
onnx_case("onnx-norm-missing", ("llama", "gpt2"), "one norm is not in the graph", edits=at_norm(skip=True), say=("missing", "notapplied"), level=5)
onnx_case("onnx-final-norm-missing", ("llama", "gpt2"), "the final norm is not in the graph", edits=at_norm(last=True, skip=True), say=("missing", "notapplied"), level=5)
onnx_case("onnx-ln-for-rms", "llama", "one norm is a LayerNormalization", edits=at_norm(wrong="layernorm", style="fused"), style="fused", say=(r"centr|mean|LayerNorm",), level=3)
onnx_case("onnx-rms-for-ln", "gpt2", "one LayerNorm became an RMSNormalization with a bias", edits=at_norm(wrong="rms"), style="fused", say=(r"centr|mean|RMS",), level=3)
onnx_case("onnx-gemma-offset-lost", "gemma", "the 1 of 1 + weight is missing", fault_args=lambda b, m: ({"no_offset": True}, m.norms()), say=("minus1", "offset", r"1 \+"), level=2)
onnx_case("onnx-rope-base", ("llama", "qwen3"), "rope base: no norm's fault", fault_args=lambda b, m: ({"rope_base": 777.0}, ["model.layers.0.post_attention_layernorm", "model.layers.0.self_attn", "model.layers.0"]),
          say=("between", "rope"), level=4, wrong=(r"eps \S+ instead", "swap", "plus1"))
onnx_case("onnx-softmax-scale", ("llama", "bert"), "softmax scale: no norm's fault", fault_args=lambda b, m: ({"scale": 1 / 16.0 if m.config.hidden_size == 128 else 1 / 8.0}, ["model.layers.0.post_attention_layernorm", "model.layers.0", "bert.encoder.layer.0.attention.output.LayerNorm", "bert.encoder.layer.0"]),
          say=("between", "attention"), level=4, wrong=(r"eps \S+ instead", "swap", "plus1"))


# ================================================================================================ recordings
def rec_case(name, family, fault, fault_args, *, say, ref="folder", expect="differs", healthy=False, exit=None, work=np.float64, dtype="f32", rows=None, length=None, weights=True, skip=None, names=None,
             other_tokens=False, tokens=True, **kw):
    @case(name)
    def build(b):
        fam = b.pick(*family) if isinstance(family, tuple) else family
        m = tiny(b, fam)
        m.sd = round_to(m.sd, dtype if dtype != "f32" else "f32")
        fa, where = fault_args(b, m)
        T = length or b.int(40, 64)
        ids = np.random.default_rng(b.seed + 1).integers(3, m.config.vocab_size, T)
        ids2 = np.random.default_rng(b.seed + 2).integers(3, m.config.vocab_size, T) if other_tokens else ids
        rename = (lambda p: names(p)) if names else None
        p = NumpyDecoder(m, fa, work, rename)
        lp = p(ids2)
        p.save(b.path("port.safetensors"), ids2, dtype, weights, skip=skip(m) if skip else (), tokens=tokens, rows=rows)
        q = NumpyDecoder(m, None, work)
        lr = q(ids2)
        if ref == "folder":
            save_folder(b.dir / "reference", m.config, m.sd, "f32" if dtype == "f32" else dtype)
            r = "reference"
        else:
            q2 = NumpyDecoder(m, None, work)
            q2(ids)
            r = str(q2.save(b.path("reference.safetensors"), ids, dtype, weights, tokens=tokens, rows=rows).name)
        options = dict(level=3)
        options.update(kw)
        return truth("recording", f"{fam}: {fault}", port="port.safetensors", ref=r, where=[stem(w) for w in where], say=say, healthy=healthy, exit=exit or ((0,) if healthy else (1,)),
                     check=lambda: gap(torch.from_numpy(lp), torch.from_numpy(lr)), expect=expect, **options)


none = lambda b, m: ({}, [])
REC = ("llama", "qwen3", "gemma")
rec_case("rec-healthy", REC, "healthy: numpy in float64 against the folder", none, say=("same",), healthy=True, expect="same")
rec_case("rec-healthy-two-recordings", ("llama", "qwen3"), "healthy: two recordings of one run", none, say=("same",), healthy=True, expect="same", ref="rec")
rec_case("rec-healthy-bf16", ("llama", "qwen3"), "healthy: a bf16 runtime with the family's own rounding order against the folder in bf16", lambda b, m: ({"round_first": True}, []), say=("same", "rounding"), healthy=True, work=ml_dtypes.bfloat16, dtype="bf16", expect="rounding", level=4,
         note="rows of another runtime in bf16 differ from the reference's as it differs from itself")
rec_case("rec-eps", REC, "eps 1e-3 at all norms", lambda b, m: ({"eps": 1e-3}, m.norms()), say=("eps",))
rec_case("rec-eps-one", ("llama", "qwen3"), "eps 2e-3 at one norm", lambda b, m: (lambda k: ({"eps": 2e-3, "eps_at": k}, [k]))(stem(a_norm(b, m))), say=("eps",))
rec_case("rec-eps-outside", "llama", "eps outside the root, 1e-2", lambda b, m: ({"eps_outside": True, "eps": 1e-2}, m.norms()), say=("eps", "outside"))
rec_case("rec-divisor", ("llama", "gemma"), "squares divided by n - 1", lambda b, m: ({"divisor": True}, m.norms()), say=(r"n ?- ?1|divisor|unbiased|correction|times|factor",))
rec_case("rec-centred", "llama", "the mean is taken off at one norm", lambda b, m: (lambda k: ({"centre": True, "at": k}, [k]))(stem(a_norm(b, m))), say=(r"centr|mean|LayerNorm",))
rec_case("rec-offset-lost", "gemma", "the runtime multiplies by weight, not 1 + weight", lambda b, m: ({"offset": True}, m.norms()), say=("minus1", "offset", r"1 \+"))
rec_case("rec-offset-added", ("llama", "qwen3"), "the runtime multiplies by 1 + weight", lambda b, m: ({"offset": True}, m.norms()), say=("plus1", "offset", r"1 \+"))
rec_case("rec-swapped", ("llama", "gemma"), "the two norms of a layer swapped", lambda b, m: (lambda i: ({"swap": i}, [f"model.layers.{i}.input_layernorm", f"model.layers.{i}.post_attention_layernorm"]))(b.int(0, m.layers - 1)), say=("swap",), level=2)
rec_case("rec-norm-skipped", ("llama", "qwen3"), "one norm returns its input", lambda b, m: (lambda k: ({"skip": k}, [k]))(stem(a_norm(b, m))), say=("notapplied", "identity", "input"))
rec_case("rec-rope-base", ("llama", "qwen3"), "rope base: no norm's fault", lambda b, m: ({"rope_base": 333.0}, ["model.layers.0.post_attention_layernorm", "model.layers.0.self_attn", "model.layers.0"]), say=("between", "rope"), level=4,
         wrong=(r"eps \S+ instead", "swap", "plus1"), second="all norms compute the reference's formula; born after layer 0's input norm (after q/k norms where there are any)")
rec_case("rec-softmax-scale", "llama", "softmax scale: no norm's fault", lambda b, m: ({"softmax_scale": 0.5}, ["model.layers.0.post_attention_layernorm", "model.layers.0.self_attn", "model.layers.0"]), say=("between", "attention"), level=4,
         wrong=(r"eps \S+ instead", "swap", "plus1"))
rec_case("rec-embed-scale", "gemma", "the embedding is not scaled: born before the first norm", lambda b, m: ({"no_embed_scale": True}, ["model.layers.0.input_layernorm", "embed"]), say=("input", "before", "embed"), level=4,
         second="the input of the first norm is the reference's / sqrt(n)", wrong=(r"eps \S+ instead", "swap"))
rec_case("rec-late-qk-norm", "qwen3", "q and k normalized after the rotary", lambda b, m: ({"late_qk": True}, [k for k in m.norms() if "q_norm" in k or "k_norm" in k]), say=("rot", "after", "input", "order"), level=4)
rec_case("rec-final-norm-absent", ("llama", "gemma"), "the final norm was never called, so it is not in the recording", lambda b, m: ({"no_final": True}, ["model.norm"]), say=("missing", "notapplied", "not recorded", "not in"), level=5)
rec_case("rec-activation", "llama", "GELU for SiLU: no norm's fault", lambda b, m: ({"act": "gelu"}, ["model.layers.1.input_layernorm", "model.layers.0.mlp", "model.layers.0"]), say=("between", "mlp", "activation"), level=4, wrong=(r"eps \S+ instead", "swap"))
rec_case("rec-few-rows", "llama", "eps 1e-3, only 6 rows recorded", lambda b, m: ({"eps": 1e-3}, m.norms()), say=("undecided", "few", "rows", "eps"), rows=6, seen="undecided", exit=(0, 1, 2),
         note="8 rows are the least for a reading; rows against the reference's own still differ")
rec_case("rec-other-tokens", ("llama", "qwen3"), "healthy: two recordings of other tokens", none, say=(r"tokens|same formula|not compar|other text",), ref="rec", other_tokens=True, healthy=True, exit=(0, 1, 2), expect="same", level=3,
         wrong=("swap", "plus1", "re-?init"), note="rows cannot be compared; the formulas can, and agree")
rec_case("rec-no-tokens", "llama", "healthy: no tokens in the metadata", none, say=("tokens", "same", "formula"), tokens=False, healthy=True, exit=(0,), expect="same", level=3, wrong=("swap", "plus1"))
rec_case("rec-no-weights", "llama", "eps 1e-2, weights not recorded", lambda b, m: ({"eps": 1e-2}, m.norms()), say=("eps",), weights=False)
rec_case("rec-other-names", ("llama", "qwen3"), "eps 3e-3 at all norms, other names", lambda b, m: ({"eps": 3e-3}, []), say=("eps",),
         names=lambda p: p.replace("model.layers.", "blocks_").replace(".input_layernorm", "/attn_ln").replace(".post_attention_layernorm", "/mlp_ln").replace("model.norm", "head_ln").replace(".self_attn.", "/"))
rec_case("rec-cast-order-bf16", "llama", "bf16: the gain multiplies before the rounding, reference rounds first", lambda b, m: ({}, m.norms()), say=("round", "cast"), work=ml_dtypes.bfloat16, dtype="bf16", expect="same", exit=(1,), level=3,
         second="gain in float32, then one rounding", ref="folder", note="transformers' Llama rounds to bf16, then multiplies; this runtime multiplies in float64, then rounds")


@case("rec-healthy-gemma-bf16")
def _(b):
    m = tiny(b, "gemma", hidden=64)
    m.sd = round_to(m.sd, "bf16")
    ids = np.random.default_rng(b.seed + 1).integers(3, m.config.vocab_size, 56)
    p = NumpyDecoder(m, {}, ml_dtypes.bfloat16)
    lp = p(ids)
    p.save(b.path("port.safetensors"), ids, "bf16")
    save_folder(b.dir / "reference", m.config, m.sd, "bf16")
    lr = NumpyDecoder(m)(ids)
    return truth("recording", "healthy: bf16 with Gemma's own rounding order (gain in float32, one rounding)", port="port.safetensors", healthy=True, exit=(0,), say=("same", "rounding"), level=4, wrong=("swap", r"eps \S+ instead"),
                 check=lambda: gap(torch.from_numpy(lp), torch.from_numpy(lr)), expect="rounding")


@case("rec-partial")
def _(b):
    m = tiny(b, "llama", 3)
    k = stem(a_norm(b, m))
    ids = np.random.default_rng(b.seed + 1).integers(3, m.config.vocab_size, 56)
    p = NumpyDecoder(m, {"eps": 1e-2, "eps_at": k})
    lp = p(ids)
    p.save(b.path("port.safetensors"), ids, skip=[k])
    save_folder(b.dir / "reference", m.config, m.sd)
    lr = NumpyDecoder(m)(ids)
    return truth("recording", f"eps 1e-2 at {k}, which was not recorded: rows downstream differ, the norm itself cannot be seen", port="port.safetensors", where=[k], say=(r"not (in|recorded|compared|checked)|missing|between|absent|not called",), level=4,
                 second="born between the norm before and the norm after it", wrong=(r"eps \S+ instead",), check=lambda: gap(torch.from_numpy(lp), torch.from_numpy(lr)), expect="differs")


# ================================================================================================ ports in code
def code_case(name, family, fault, edits, *, say, where=(), healthy=False, expect="differs", exit=None, dtype="float32", weights=None, ref="folder", ref_edits=(), model_edit=None, ref_dtype="f32", level=4, layers=3, **kw):
    """edits(b, m) gives the pieces of source to change; weights(b, m, tensors) may change the weights."""

    @case(name)
    def build(b):
        fam = b.pick(*family) if isinstance(family, tuple) else family
        m = tiny(b, fam, layers, ln_eps=1e-5) if fam == "bert" else tiny(b, fam, layers)
        if dtype != "float32" or ref_dtype != "f32":
            m.sd = round_to(m.sd, "bf16")
        if model_edit:
            model_edit(b, m)
        tensors = (code_ports.gpt_weights if fam in ("gpt2", "bert") else code_ports.decoder_weights)(m)
        hit = list(where(b, m) if callable(where) else where)
        if weights:
            hit += list(weights(b, m, tensors) or [])
        port = code_ports.write(b, m, edits(b, m), tensors, dtype)
        if ref == "folder":
            save_folder(b.dir / "reference", m.config, m.sd, ref_dtype)
            r = "reference"
        else:
            r = code_ports.write(b, m, ref_edits(b, m), None, dtype, file="original")

        def check():
            torch.manual_seed(0)
            lp, ids = py_logits(b.dir / port)
            lr = py_logits(b.dir / r)[0] if ref != "folder" else hf_logits(m.config, m.sd, ids, fam)
            if lp.shape != lr.shape:
                return float("inf")
            return gap(lp, lr)

        return truth("code", f"{fam}: {fault}", port=port, ref=r, batch="port.py:batch", where=hit, say=say, healthy=healthy, exit=exit or ((0,) if healthy else (1,)), check=check, expect=expect, level=level, **kw)


nothing = lambda b, m: []
HF1, HF2 = "input_layernorm", "post_attention_layernorm"


def both(m, i, which=(1, 2)):
    """Names of a layer's norms in the port and in the reference."""
    if m.family == "gpt2":
        ref = {1: f"transformer.h.{i}.ln_1", 2: f"transformer.h.{i}.ln_2"}
    elif m.family == "bert":
        ref = {1: f"bert.encoder.layer.{i}.attention.output.LayerNorm", 2: f"bert.encoder.layer.{i}.output.LayerNorm"}
    elif m.family == "olmo2":
        ref = {1: f"model.layers.{i}.post_attention_layernorm", 2: f"model.layers.{i}.post_feedforward_layernorm"}
    else:
        ref = {1: f"model.layers.{i}.{HF1}", 2: f"model.layers.{i}.{HF2}"}
    return [n for w in which for n in (f"stack.{i}.n{w}", ref[w])]


def every(b, m):
    return [n for i in range(m.layers) for n in both(m, i)]


FINAL = lambda b, m: ["out_scale", "model.norm", "last", "transformer.ln_f"]
NEXT2 = lambda b, m: both(m, 0, (2,)) + ["stack.0.mix", "model.layers.0.self_attn", "transformer.h.0.attn"]
WRONG = (r"eps \S+ instead", "swap", "plus1")

code_case("code-healthy-renamed", ("llama", "qwen3", "gemma", "olmo2"), "healthy: own code, other names, fused projections", nothing, say=("same",), healthy=True, expect="same")
code_case("code-healthy-gpt2", ("gpt2", "bert"), "healthy: own code, other names", nothing, say=("same",), healthy=True, expect="same")
code_case("code-healthy-torch-rmsnorm", "llama", "healthy: torch's rms_norm inside", lambda b, m: [("h = x.float()\n        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)\n        return self.g * h.type_as(x)", "return F.rms_norm(x, x.shape[-1:], self.g, self.eps)")],
          say=("same",), healthy=True, expect="same")
code_case("code-healthy-positions-from-1", "llama", "healthy: rotary positions begin at 1; only differences count", lambda b, m: [("torch.arange(T).float()", "torch.arange(1, T + 1).float()")], say=("same", "rounding"), healthy=True, expect="same")
code_case("code-healthy-sdpa-bf16", "llama", "healthy: bf16, PyTorch's fused attention", lambda b, m: [("score = (q @ k.transpose(-1, -2)) * HEAD_DIM**-0.5\n        score = score.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)\n        y = score.float().softmax(-1).to(v.dtype) @ v", "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)")],
          say=("same", "rounding"), healthy=True, expect="same", dtype="bfloat16", ref_dtype="bf16")
code_case("code-healthy-folded", "llama", "healthy: all gains folded into the matrices, gains are 1", nothing, say=("fold", "same"), healthy=True, exit=(0, 1), expect="same",
          weights=lambda b, m, t: [fold_all(m, t)] and [], wrong=("never loaded",))
code_case("code-healthy-f32-of-bf16", "qwen3", "healthy: port in float32, the folder in bf16", nothing, say=("same", "rounding"), healthy=True, expect="same", ref_dtype="bf16")


def fold_all(m, t):
    for i in range(m.layers):
        s = f"stack.{i}."
        for g, w in (("n1.g", "mix.qkv.weight"), ("n2.g", "mlp.up.weight")):
            t[s + w] = (t[s + w] * t[s + g][None]).astype(np.float32)
            t[s + g] = np.ones_like(t[s + g])
    t["vocab.weight"] = (t["vocab.weight"] * t["out_scale.g"][None]).astype(np.float32)
    t["out_scale.g"] = np.ones_like(t["out_scale.g"])


code_case("code-rope-base", ("llama", "qwen3"), "rope base: no norm's fault", lambda b, m: [(f"base={m.config.rope_parameters['rope_theta']}", f"base={b.pick(1000.0, 77777.0)}")], say=("between", "rope"), where=NEXT2, wrong=WRONG)
code_case("code-rope-interleaved", "llama", "rotary on pairs (0, 1), not halves: no norm's fault", lambda b, m: [("a, b = x.float().chunk(2, -1)\n    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)", "a, b = x.float()[..., ::2], x.float()[..., 1::2]\n    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)")],
          say=("between", "rot"), where=NEXT2, wrong=WRONG)
code_case("code-softmax-scale", ("llama", "gemma", "gpt2"), "softmax scale: no norm's fault", lambda b, m: [("math.sqrt(WIDTH // HEADS)", "math.sqrt(WIDTH)")] if m.family == "gpt2" else [("* HEAD_DIM**-0.5", b.pick("* WIDTH**-0.5", "/ HEAD_DIM"))], say=("between", "attention"), where=NEXT2, wrong=WRONG)
code_case("code-gqa-tile", "llama", "keys and values tiled instead of repeated: no norm's fault", lambda b, m: [("k = k.repeat_interleave(HEADS // KV_HEADS, 1)", "k = k.repeat(1, HEADS // KV_HEADS, 1, 1)"), ("v = v.repeat_interleave(HEADS // KV_HEADS, 1)", "v = v.repeat(1, HEADS // KV_HEADS, 1, 1)")],
          model_edit=lambda b, m: force_kv(b, m), say=("between", "attention"), where=NEXT2, wrong=WRONG)


def force_kv(b, m):
    if m.config.num_key_value_heads == 4:
        m.config.num_key_value_heads = 2
        hd = m.config.hidden_size // 4
        for k in m.sd:
            if k.endswith(("k_proj.weight", "v_proj.weight")):
                m.sd[k] = m.sd[k][: 2 * hd].copy()


code_case("code-mask-off-by-one", ("llama", "gpt2"), "each token sees the next: no norm's fault", lambda b, m: [(".triu(1)", ".triu(2)")], say=("between", "attention"), where=NEXT2, wrong=WRONG)
code_case("code-activation-exact-gelu", ("gpt2", "gemma"), "erf GELU for tanh GELU: small, no norm's fault", lambda b, m: [(', approximate="tanh")', ")")], say=("between", "mlp", "activation", "rounding"), expect="rounding",
          where=lambda b, m: both(m, 1, (1,)) + ["stack.0.mlp", "stack.0.down", "model.layers.0.mlp", "transformer.h.0.mlp"], wrong=WRONG, second="small but many times the reference's own rounding")
code_case("code-activation-relu", ("llama", "bert"), "ReLU: no norm's fault", lambda b, m: [("F.silu(gate)", "F.relu(gate)")] if m.family == "llama" else [("F.gelu(self.up(x))", "F.relu(self.up(x))")], say=("between", "mlp", "activation"),
          where=lambda b, m: (both(m, 1, (1,)) + ["stack.0.mlp", "model.layers.0.mlp"]) if m.family == "llama" else both(m, 0, (2,)) + ["stack.0.down", "bert.encoder.layer.0.intermediate"], wrong=WRONG)
code_case("code-embed-scale", "gemma", "the embedding is not scaled by sqrt(n)", lambda b, m: [(" * WIDTH**0.5", "")], say=("embed", "input", "before"), where=lambda b, m: both(m, 0, (1,)) + ["tokens", "embed_tokens"], wrong=WRONG)
code_case("code-eps", ("llama", "qwen3", "gpt2"), "eps of all norms", lambda b, m: [(f"EPS = {config_of(m.config, 'rms_norm_eps', 'layer_norm_epsilon')}", f"EPS = {b.pick(1e-3, 3e-4)}")], say=("eps",), where=every, level=3)
code_case("code-eps-one", "llama", "eps of the final norm only", lambda b, m: [("self.out_scale = Scale(WIDTH)", "self.out_scale = Scale(WIDTH)\n        self.out_scale.eps = 1e-2")], say=("eps",), where=FINAL, level=3)
code_case("code-eps-outside", ("llama", "gpt2"), "eps outside the root", lambda b, m: [("torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)", "(1 / (h.pow(2).mean(-1, keepdim=True).sqrt() + self.eps))")] if m.family == "llama" else [("torch.sqrt(var + self.eps)", "(torch.sqrt(var) + self.eps)")],
          say=("eps", "outside"), where=every, level=3, expect="rounding", second="outside the root; here it changes little")
code_case("code-eps-max", "llama", "clamp(min=eps) in place of + eps", lambda b, m: [("h.pow(2).mean(-1, keepdim=True) + self.eps", "h.pow(2).mean(-1, keepdim=True).clamp(min=self.eps)")], say=("eps", "clamp", "max"), where=every, level=3, expect="rounding",
          note="on rows of this text hardly any difference: seen by calling the norm")
code_case("code-divisor", ("gpt2", "bert"), "unbiased variance", lambda b, m: [(", unbiased=False", "")], say=(r"n ?- ?1|divisor|unbiased|correction",), where=every, level=3)
code_case("code-rms-for-ln", ("gpt2", "bert"), "the mean is not subtracted, var about the mean: y = x / std", lambda b, m: [("return (x - mu) /", "return x /")], say=(r"centr|mean",), where=every, level=3)
code_case("code-ln-for-rms", ("llama", "olmo2"), "the mean is subtracted", lambda b, m: [("h = x.float()\n        h = h *", "h = x.float()\n        h = h - h.mean(-1, keepdim=True)\n        h = h *")], say=(r"centr|mean",), where=every, level=3)
code_case("code-wrong-axis", "llama", "statistics over the positions, not the features", lambda b, m: [("h.pow(2).mean(-1, keepdim=True) + self.eps", "h.pow(2).mean(-2, keepdim=True) + self.eps")], say=(r"ax[ie]s|dimension|row|not (a|the) norm|positions",), where=every, level=3)
code_case("code-offset-lost", "gemma", "weight in place of 1 + weight", lambda b, m: [("(h * (1 + self.g.float())).type_as(x)", "(h * self.g.float()).type_as(x)")], say=("minus1", "offset", r"1 \+"), where=every, level=3)
code_case("code-offset-added", ("llama", "qwen3"), "1 + weight in place of weight", lambda b, m: [("return self.g * h.type_as(x)", "return (1 + self.g) * h.type_as(x)")], say=("plus1", "offset", r"1 \+"), where=every, level=3)
code_case("code-weights-prepared-plus1", "gemma", "healthy: the loader stored 1 + weight, the class multiplies by it", lambda b, m: [("(h * (1 + self.g.float())).type_as(x)", "(h * self.g.float()).type_as(x)")], say=("same", "plus1"), healthy=True, expect="same",
          weights=lambda b, m, t: [t.__setitem__(k, t[k] + 1) for k in list(t) if k.endswith(".g")] and [], wrong=("doubled", "twice"), note="two conventions that cancel: the same function", exit=(0,))
code_case("code-gains-swapped", ("llama", "gpt2", "qwen3"), "one layer's gains swapped by the loader", nothing, say=("swap",), weights=lambda b, m, t: swap_code(b, m, t), level=2)


def swap_code(b, m, t):
    i = b.int(0, m.layers - 1)
    for s in (".g", ".b"):
        x, y = f"stack.{i}.n1{s}", f"stack.{i}.n2{s}"
        if x in t:
            t[x], t[y] = t[y], t[x]
    return both(m, i)


code_case("code-k-norm-gets-q", ("qwen3", "olmo2"), "the k norm holds the q norm's gains", nothing, say=("copy",), level=2, weights=lambda b, m, t: kq(b, m, t), layers=3, model_edit=lambda b, m: full_kv(b, m))


def full_kv(b, m):
    """As many key heads as query heads, so that both norms have one size in OLMo 2."""
    if m.family == "olmo2" and m.config.num_key_value_heads != 4:
        m.config.num_key_value_heads = 4
        d = m.config.hidden_size
        for k in list(m.sd):
            if k.endswith(("k_proj.weight", "v_proj.weight")):
                m.sd[k] = np.concatenate([m.sd[k]] * (d // m.sd[k].shape[0]) ).astype(np.float32) * 0 + b.normal(d, d) / np.float32(np.sqrt(d))
            if k.endswith("k_norm.weight"):
                m.sd[k] = b.gain(d)


def kq(b, m, t):
    i = b.int(0, m.layers - 1)
    t[f"stack.{i}.mix.kn.g"] = t[f"stack.{i}.mix.qn.g"].copy()
    return [f"stack.{i}.mix.kn", f"model.layers.{i}.self_attn.k_norm"]


code_case("code-norm-missing", ("llama", "gpt2"), "one block does without its second norm", lambda b, m: ([("self.mlp(self.n2(x))", "self.mlp(self.n2(x) if self is not SKIPPED[0] else x)"), ("        for block in self.stack:\n            x = block(", "        SKIPPED[0] = self.stack[1]\n        for block in self.stack:\n            x = block("), ("class Block(nn.Module):", "SKIPPED = [None]\n\n\nclass Block(nn.Module):")] if m.family == "llama" else
          [("self.up(self.n2(x))", "self.up(self.n2(x) if self is not SKIPPED[0] else x)"), ("        for block in self.stack:\n            x = block(", "        SKIPPED[0] = self.stack[1]\n        for block in self.stack:\n            x = block("), ("class Block(nn.Module):", "SKIPPED = [None]\n\n\nclass Block(nn.Module):")]),
          say=("notapplied", "missing"), where=lambda b, m: both(m, 1, (2,)), level=5)
code_case("code-final-norm-missing", ("llama", "gpt2", "gemma"), "the final norm is not applied", lambda b, m: [("        x = self.last(x)\n", "")] if m.family == "gpt2" else [("        x = self.out_scale(x)\n", "")], say=("notapplied", "missing"), where=FINAL, level=5)
code_case("code-final-norm-twice", ("llama", "qwen3"), "the final norm is applied twice", lambda b, m: [("x = self.out_scale(x)", "x = self.out_scale(self.out_scale(x))")], say=("twice",), where=FINAL, level=5)
code_case("code-pre-for-post", ("llama", "gpt2"), "post-norm order: the sum is normalized, not the branch's input", lambda b, m: [("x = x + self.mix(self.n1(x), cos, sin)\n        x = x + self.mlp(self.n2(x))", "x = self.n1(x + self.mix(x, cos, sin))\n        x = self.n2(x + self.mlp(x))")] if m.family == "llama" else
          [('x = x + self.mix(self.n1(x))\n        x = x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))', 'x = self.n1(x + self.mix(x))\n        x = self.n2(x + self.down(F.gelu(self.up(x), approximate="tanh")))')],
          say=("pre|post|placement|residual|stream|input|order|takes"), where=lambda b, m: both(m, 0, (1,)), level=5)
code_case("code-residual-normalized", "llama", "the residual takes the normalized stream", lambda b, m: [("x = x + self.mlp(self.n2(x))", "x = self.n2(x)\n        x = x + self.mlp(x)")], say=(r"residual|placement|stream|between|input",), where=lambda b, m: both(m, 1, (1,)) + both(m, 0, (2,)), level=5, wrong=WRONG)
code_case("code-parallel-blocks", ("llama", "gpt2"), "attention and MLP in parallel, both read the block's input", lambda b, m: [("x = x + self.mix(self.n1(x), cos, sin)\n        x = x + self.mlp(self.n2(x))", "x = x + self.mix(self.n1(x), cos, sin) + self.mlp(self.n2(x))")] if m.family == "llama" else
          [('x = x + self.mix(self.n1(x))\n        x = x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))', 'x = x + self.mix(self.n1(x)) + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))')],
          say=(r"parallel|placement|input|stream|between|takes",), where=lambda b, m: both(m, 0, (2,)), level=5, wrong=WRONG)
code_case("code-one-norm-for-both", "llama", "the MLP reads through the attention's norm", lambda b, m: [("self.mlp(self.n2(x))", "self.mlp(self.n1(x))")], say=("notapplied", "twice", "never", "shared", r"called 2|two calls"), where=every, level=5)
code_case("code-qk-norm-late", "qwen3", "q and k normalized after the rotary", lambda b, m: [("q, k = self.qn(q), self.kn(k)\n        q, k = rotate(q, cos, sin), rotate(k, cos, sin)", "q, k = rotate(q, cos, sin), rotate(k, cos, sin)\n        q, k = self.qn(q), self.kn(k)")],
          say=(r"rot|after|input|order|before",), where=lambda b, m: ["stack.0.mix.qn", "stack.0.mix.kn", "model.layers.0.self_attn.q_norm", "model.layers.0.self_attn.k_norm"], level=4)
code_case("code-qk-norm-per-head", "olmo2", "all-heads q and k norm computed head by head", lambda b, m: [("q, k = self.qn(q), self.kn(k)", "q, k = (F.rms_norm(t.view(B, T, -1, HEAD_DIM), (HEAD_DIM,), None, EPS).flatten(-2) * n.g for t, n in ((q, self.qn), (k, self.kn)))")],
          say=(r"head|group|not called|missing|notapplied|formula|never|between|absent",), where=lambda b, m: ["stack.0.mix.qn", "stack.0.mix.kn", "model.layers.0.self_attn.q_norm", "model.layers.0.self_attn.k_norm"], level=4)
code_case("code-qk-norm-unused", "qwen3", "q and k norms loaded, never applied", lambda b, m: [("q, k = self.qn(q), self.kn(k)\n", "pass\n")], say=("notapplied", "missing"), where=lambda b, m: ["stack.0.mix.qn", "stack.0.mix.kn", "model.layers.0.self_attn.q_norm", "model.layers.0.self_attn.k_norm"], level=5)
code_case("code-cast-order", "llama", "bf16: gain in float32, then rounding", lambda b, m: [("return self.g * h.type_as(x)", "return (self.g.float() * h).type_as(x)")], say=("round", "cast", "order"), where=every, dtype="bfloat16", ref_dtype="bf16", expect="same", level=3,
          note="in float64 the same; only bf16 shows it, and only by calling the norm or comparing rows to the bit")
code_case("code-stats-in-bf16", "llama", "bf16: statistics in bf16", lambda b, m: [("h = x.float()", "h = x")], say=("bfloat16", "bf16", "cast", "statistic", "round"), where=every, dtype="bfloat16", ref_dtype="bf16", expect="same", level=3)
code_case("code-dropout-on", "llama", "dropout in evaluation: the port differs from itself", lambda b, m: [("return self.down(", "return F.dropout(self.down("), (" * value)", " * value), 0.1, True)")], say=("random", "between"), where=lambda b, m: ["stack.0.mlp", "model.layers.0.mlp"] + both(m, 1, (1,)), wrong=WRONG, level=4)
code_case("code-logit-scale", "llama", "logits halved: after the last norm, no norm's fault", lambda b, m: [("return self.vocab(x)", "return 0.5 * self.vocab(x)")], say=(r"logit|output|after|head|last",), where=lambda b, m: ["vocab", "lm_head", "logits", "output"] + FINAL(b, m), wrong=WRONG)
code_case("code-head-from-embedding", "llama", "the head is tied to the embedding, the reference's is its own", lambda b, m: [("return self.vocab(x)", "return x @ self.tokens.weight.T")], say=(r"logit|output|after|head|last",), where=lambda b, m: ["vocab", "lm_head", "logits", "output"] + FINAL(b, m), wrong=WRONG)
code_case("code-start-norm-missing", "bert", "the embedding's norm is missing", lambda b, m: [("self.start(x + self.kinds.weight[0])", "x + self.kinds.weight[0]")], say=("notapplied", "missing"), where=["start", "bert.embeddings.LayerNorm"], level=5)
code_case("code-l2-norm", "llama", "F.normalize times sqrt(n): no eps but a clamp", lambda b, m: [("h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)", "h = F.normalize(h, dim=-1) * h.shape[-1] ** 0.5")], say=("eps",), where=every, expect="rounding", level=3, exit=(1,),
          note="eps is lost; on rows of this size it changes little")
code_case("code-draft-head", "llama", "a draft head that reads the stream before the final norm", lambda b, m: [("return self.vocab(x)", "return torch.cat((self.vocab(x), self.vocab(torch.tanh(self.draft(raw)))), -1)"), ("        x = self.out_scale(x)\n", "        raw = x\n        x = self.out_scale(x)\n"), ("self.vocab = nn.Linear(WIDTH, VOCAB, bias=False)", "self.vocab, self.draft = nn.Linear(WIDTH, VOCAB, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)"), ("net.load_state_dict(weights)", "net.load_state_dict(weights, strict=False)\n    torch.nn.init.eye_(net.draft.weight)")],
          ref="py", ref_edits=lambda b, m: [("return self.vocab(x)", "return torch.cat((self.vocab(x), self.vocab(torch.tanh(self.draft(x)))), -1)"), ("self.vocab = nn.Linear(WIDTH, VOCAB, bias=False)", "self.vocab, self.draft = nn.Linear(WIDTH, VOCAB, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)"), ("net.load_state_dict(weights)", "net.load_state_dict(weights, strict=False)\n    torch.nn.init.eye_(net.draft.weight)")],
          say=("draft",), where=["draft", "out_scale"], level=5, second="the draft head takes the stream before the norm")


# ================================================================================================ Python API
PY = '''import json, pathlib, sys
import numpy as np
import torch
import normkit as nk
{body}
print("RESULT BEGINS")
print(result)
for name in ("to_json", "as_dict", "to_dict"):
    if hasattr(result, name):
        print("JSON", getattr(result, name)())
        break
print("VERDICT", {{n: getattr(result, n) for n in ("exit_code", "same", "different", "verdict", "findings") if hasattr(result, n)}})
'''


def py_case(b, body, fault, **kw):
    b.path("driver.py").write_text(PY.format(body=body))
    kw.setdefault("exit", [0])
    return truth(kw.pop("group", "python"), fault, kind="python", args=["driver.py"], **kw)


@case("py-modules-eps")
def _(b):
    e = b.pick(1e-3, 1e-4)
    body = f'''torch.manual_seed({b.int(0, 9999)})
def make(eps):
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.LayerNorm(48, eps=eps), torch.nn.GELU(), torch.nn.Linear(48, 32), torch.nn.LayerNorm(32))
    for p in net.parameters():
        torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.2)
    return net.eval()
result = nk.compare(make({e}), make(1e-5), [torch.randn(64, 32)])'''
    return py_case(b, body, f"two modules, eps {e} at '1'", where=["1"], say=("eps",), level=3)


@case("py-mapping-plus1")
def _(b):
    body = f'''r = np.random.default_rng({b.int(0, 9999)})
ref = {{f"layers.{{i}}.{{n}}.weight": r.normal(0.3, 0.4, 64).astype("float32") for i in range(3) for n in ("attention_norm", "ffn_norm")}}
port = {{k: v + 1 for k, v in ref.items()}}
result = nk.compare(port, ref)'''
    return py_case(b, body, "mappings of arrays: + 1 everywhere", where=["layers.0.attention_norm"], say=("plus1",))


@case("py-mapping-mixed-torch-numpy")
def _(b):
    body = f'''r = np.random.default_rng({b.int(0, 9999)})
ref = {{f"layers.{{i}}.{{n}}.weight": r.normal(1, 0.3, 64).astype("float32") for i in range(3) for n in ("attention_norm", "ffn_norm")}}
port = {{k: torch.from_numpy(v).bfloat16() for k, v in ref.items()}}
result = nk.compare(port, ref)'''
    return py_case(b, body, "healthy: torch bf16 against numpy float32", healthy=True, say=("rounding", "same"), wrong=("plus1", "swap"))


@case("py-module-against-folder")
def _(b):
    m = tiny(b, "llama")
    save_folder(b.dir / "reference", m.config, m.sd)
    i = b.int(0, m.layers - 1)
    body = f'''import transformers
here = pathlib.Path(__file__).parent
port = transformers.AutoModelForCausalLM.from_pretrained(here / "reference").eval()
layer = port.model.layers[{i}]
layer.input_layernorm, layer.post_attention_layernorm = layer.post_attention_layernorm, layer.input_layernorm
result = nk.compare(port, here / "reference", [{{"input_ids": torch.randint(3, 250, (2, 32))}}])'''
    return py_case(b, body, "a module against its folder: two norms of a layer swapped", where=[f"model.layers.{i}.input_layernorm", f"model.layers.{i}.post_attention_layernorm"], say=("swap",))


@case("py-module-deepcopy-healthy")
def _(b):
    body = f'''import copy
torch.manual_seed({b.int(0, 9999)})
net = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True), 2, torch.nn.LayerNorm(32)).eval()
result = nk.compare(copy.deepcopy(net), net, [torch.randn(2, 16, 32)])'''
    return py_case(b, body, "healthy: a module and its copy", healthy=True, say=("same",))


@case("py-mapping-against-gguf")
def _(b):
    m = tiny(b, "gemma")
    save_gguf(b.dir / "reference.gguf", m, linear="q8_0")
    np.savez(b.path("port.npz"), **{k: m.sd[k] + 2 for k in m.norms()})
    body = '''here = pathlib.Path(__file__).parent
result = nk.compare(dict(np.load(here / "port.npz")), here / "reference.gguf")'''
    return py_case(b, body, "gains as a loader holds them (source + 2) against the GGUF (source + 1)", where=[stem(k) for k in m.norms()], say=("plus1", "double1"),
                   note="one more than the file; the file has the 1 already")


# ================================================================================================ identify, one side
def ident(name, fault, say, *, exit=(0, 1), group="identify", **kw):
    def deco(f):
        @case(name)
        def build(b):
            target, where, extra = f(b)
            options = dict(kw)
            options.update(extra)
            return truth(group, options.pop("fault", fault), kind="compare", args=["identify", target], where=where, say=say, exit=exit, **options)

        return f

    return deco


@ident("id-gemma-gguf-right", "Gemma GGUF as llama.cpp stores it", ("llamacpp", "one-cent"), healthy=True, wrong=("doubled",), exit=(0,))
def _(b):
    m = tiny(b, "gemma3_text", 4)
    save_gguf(b.dir / "port.gguf", m, linear="q8_0")
    return "port.gguf", [], {}


@ident("id-gemma-gguf-raw", "Gemma GGUF without the 1: zero-centred gains", ("zero-cent", "minus1"), exit=(1, 0))
def _(b):
    m = tiny(b, "gemma2", 4)
    for k in m.norms():
        m.sd[k] = (0.35 * b.normal(*m.sd[k].shape) + b.uniform(-0.1, 0.2)).astype(np.float32)
    t, n = gguf_tensors(m), gguf_names(m)
    for k in m.norms():
        t[n[k]] = m.sd[k]
    save_gguf(b.dir / "port.gguf", m, t, linear="f16")
    return "port.gguf", gg(m, *m.norms()), {"note": "half of the gains are negative: no one-centred norm looks so"}


@ident("id-gemma-folder", "Gemma folder: zero-centred, as the class expects", ("zero-cent",), healthy=True, exit=(0,))
def _(b):
    m = tiny(b, "gemma", 4)
    for k in m.norms():
        m.sd[k] = (0.3 * b.normal(*m.sd[k].shape) + 0.05).astype(np.float32)
    save_folder(b.dir / "port", m.config, m.sd, "bf16")
    return "port/model.safetensors", [], {}


@ident("id-llama-folder", "Llama file: one-centred", ("one-cent",), healthy=True, exit=(0,), wrong=("zero-cent",))
def _(b):
    m = tiny(b, "llama", 4)
    for k in m.norms():
        m.sd[k] = (1 + 0.15 * b.normal(*m.sd[k].shape)).astype(np.float32)
    save_folder(b.dir / "port", m.config, m.sd, "bf16")
    return "port/model.safetensors", [], {}


@ident("id-mixed", "one kind of norm zero-centred, the others one-centred", ("mixed",), exit=(0, 1))
def _(b):
    m = tiny(b, "qwen3", 4)
    kind = b.pick("input_layernorm", "post_attention_layernorm")
    for k in m.norms():
        m.sd[k] = (1 + 0.12 * b.normal(*m.sd[k].shape) - (1 if kind in k else 0)).astype(np.float32)
    save_file({k: to_torch(v, "bf16") for k, v in m.sd.items()}, b.path("port.safetensors"), metadata={"format": "pt"})
    return "port.safetensors", [stem(k) for k in m.norms() if kind in k], {}


@ident("id-untrained", "all gains 1: not trained", ("reinit", "not trained", "untrained"))
def _(b):
    m = tiny(b, "llama", 3)
    for k in m.norms():
        m.sd[k] = np.ones_like(m.sd[k])
    save_file({k: to_torch(v, "bf16") for k, v in m.sd.items()}, b.path("port.safetensors"), metadata={"format": "pt"})
    return "port.safetensors", [stem(k) for k in m.norms()], {}


@ident("id-undecidable-half", "gains around 0.5: neither zero- nor one-centred", ("undecid", "cannot", "neither"), seen="undecided", wrong=())
def _(b):
    m = tiny(b, "llama", 3)
    for k in m.norms():
        m.sd[k] = (0.5 + 0.2 * b.normal(*m.sd[k].shape)).astype(np.float32)
    save_file({f"t{i}.weight" if "norm" not in k else k: to_torch(v, "f32") for i, (k, v) in enumerate(m.sd.items())}, b.path("port.safetensors"))
    return "port.safetensors", [], {}


@ident("id-one-norm-untrained", "one norm of many is all ones", ("reinit", "untrained", "not trained"))
def _(b):
    m = tiny(b, "llama", 4)
    k = a_norm(b, m)
    m.sd[k] = np.ones_like(m.sd[k])
    save_gguf(b.dir / "port.gguf", m, linear="q8_0")
    return "port.gguf", gg(m, k), {}


# --- recorded rows in Python
def rows_case(name, fault, make, say, wrong=(), **kw):
    @case(name)
    def build(b):
        n, r = b.int(24, 96), kw.get("rows") or b.int(48, 200)
        x = (b.uniform(0.05, 2) * b.normal(r, n) * np.exp(0.4 * b.normal(r, 1)) + b.uniform(-0.3, 0.3)).astype(np.float32)
        x, y, w, bias = make(b, x, n)
        np.savez(b.path("rows.npz"), **{k: v.view(np.uint16) if v.dtype == ml_dtypes.bfloat16 else v for k, v in dict(x=x, y=y, w=w, b=bias).items() if v is not None})
        bf = x.dtype == ml_dtypes.bfloat16
        body = f'''here = pathlib.Path(__file__).parent
d = dict(np.load(here / "rows.npz"))
if {bf}:
    d = {{k: torch.from_numpy(v.view(np.int16)).view(torch.bfloat16) for k, v in d.items()}}
result = nk.identify_rows(d["x"], d["y"], d.get("w"), d.get("b"))
print("SPEC", result.spec)
print("UNDECIDED", sorted(result.undecidable))'''
        return py_case(b, body, fault, group="rows", say=say, wrong=wrong, level=3, **{k: v for k, v in kw.items() if k != "rows"})


def rms_(x, eps=0.0, d=0):
    return np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) / (x.shape[-1] - d) + eps)


def gb(b, n):
    return b.gain(n), (0.2 * b.normal(n)).astype(np.float32)


def _r_ln(b, x, n):
    w, bias = gb(b, n)
    c = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
    return x, (c / rms_(c, 1e-3) * w + bias).astype(np.float32), w, bias


rows_case("rows-layernorm", "LayerNorm, eps 1e-3", _r_ln, (r"mean\(x\)",), wrong=(r"correction=1",))


def _r_n1(b, x, n):
    w, bias = gb(b, n)
    c = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
    return x, (c / rms_(c, 1e-3, 1) * w + bias).astype(np.float32), w, bias


rows_case("rows-unbiased", "LayerNorm divided by n - 1", _r_n1, (r"correction=1|n - 1",))


def _r_gemma(b, x, n):
    w = b.gain(n) - 1
    return x, (x / rms_(x, 1e-5) * (1 + w.astype(np.float64))).astype(np.float32), w, None


rows_case("rows-offset", "RMSNorm, 1 + weight", _r_gemma, (r"1 \+ weight|weight \+ 1|\(1 \+",))


def _r_out(b, x, n):
    w = b.gain(n)
    return x, (x / (rms_(x) + 1e-2) * w).astype(np.float32), w, None


rows_case("rows-eps-outside", "RMSNorm, eps outside the root", _r_out, (r"sqrt\(mean\(x\^2\)\) \+|outside",))


def _r_const(b, x, n):
    w = np.full(n, 2.0, np.float32)
    return x, (x / rms_(x, 1e-5) * 2).astype(np.float32), w, None


rows_case("rows-constant-weight", "all weights 2, output twice the normalized row: weight acts, or (1 + w) with another factor cannot be told", _r_const, (r"UNDECIDED \[[^\]]*(gain|offset|weight)", r"weight \*|2 \*|\* 2"), seen="undecided")


def _r_noweight(b, x, n):
    w = b.gain(n)
    return x, (x / rms_(x, 1e-5) * w).astype(np.float32), None, None


rows_case("rows-no-weight", "RMSNorm without its weight: offset not shown", _r_noweight, (r"UNDECIDED \[[^\]]*offset|UNDECIDED",), seen="undecided")


def _r_tanh(b, x, n):
    return x, np.tanh(x * 0.5).astype(np.float32), b.gain(n), None


rows_case("rows-dynamic-tanh", "no norm: tanh(0.5 x)", _r_tanh, (r"SPEC None|no norm|no spec",), wrong=(r"SPEC y =",))


def _r_bf16(b, x, n):
    x = x.astype(ml_dtypes.bfloat16)
    w = b.gain(n).astype(ml_dtypes.bfloat16)
    h = (x.astype(np.float32) / rms_(x.astype(np.float32), 1e-6)).astype(ml_dtypes.bfloat16)
    return x, (h.astype(np.float32) * w.astype(np.float32)).astype(ml_dtypes.bfloat16), w, None


rows_case("rows-bf16-llama-order", "bf16 rows, rounded before the gain (Llama)", _r_bf16, (r"mean\(x\^2\)",), wrong=(r"mean\(x\)\)",))


def _r_group(b, x, n):
    n = n // 4 * 4
    x = np.ascontiguousarray(x[:, :n])
    g = x.reshape(len(x), 4, -1).astype(np.float64)
    w = b.gain(n)
    return x, ((g / np.sqrt((g**2).mean(-1, keepdims=True) + 1e-5)).reshape(len(x), n) * w).astype(np.float32), w, None


rows_case("rows-grouped", "RMSNorm over 4 groups of the row", _r_group, (r"group|SPEC None|\b4\b",), wrong=(r"SPEC y = weight \* x / sqrt\(mean\(x\^2\) \+ \S+\)\s*$",))


def _r_one_scale(b, x, n):
    x = np.repeat(x[:1], len(x), 0) * np.exp(0.3 * b.normal(len(x), 1)).astype(np.float32)
    w = b.gain(n)
    return x.astype(np.float32), (x / rms_(x, 0) * w).astype(np.float32), w, None


rows_case("rows-one-direction", "all rows are multiples of one: the rows show next to nothing", _r_one_scale, (r"UNDECIDED \[.+\]",), seen="undecided", exit=[0, 1, 2], note="centring and divisor cannot be told from one direction")


# ================================================================================================ real trained models
def real_case(name, which, fault, make, **kw):
    @case(name)
    def build(b):
        layers = b.int(2, 3)
        m = real_sub(which, layers)
        out = make(b, m)
        options = dict(kw)
        options.update(out or {})
        return truth("real", f"{which}, {layers} layers: {options.pop('fault', fault)}", **options)


def real_gguf(edit=None, linear=None, **w):
    def make(b, m):
        at = {}
        mm, _, lin = gguf_case(b, m.family, (lambda t, m, n: at.setdefault("w", edit(b, t, m, n))) if edit else None, real=m, linear=linear or b.pick("f16", "q8_0", "q4_0"), **w)
        return {"where": gg(m, *(at.get("w") or [])), "check": gguf_check(b, m)}

    return make


def _keep(keys):
    return [k for k in keys]


real_case("real-gemma3-gguf-right", "gemma3", "healthy: as llama.cpp stores it", real_gguf(), port="port.gguf", healthy=True, exit=(0,), say=("llamacpp", "same"), wrong=("doubled", "swap"), expect="rounding")
real_case("real-gemma3-gguf-raw", "gemma3", "gains stored without the 1", real_gguf(lambda b, t, m, n: [t.__setitem__(n[k], m.sd[k].copy()) or k for k in m.norms()]), port="port.gguf", say=("minus1",), expect="differs")
real_case("real-gemma3-gguf-doubled", "gemma3", "gains stored as source + 2", real_gguf(lambda b, t, m, n: [t.__setitem__(n[k], t[n[k]] + 1) or k for k in m.norms()]), port="port.gguf", say=("plus2",), expect="differs",
          note="real gains reach 50 and more: mean or spread alone say little")


def _real_one(b, t, m, n):
    k = a_norm(b, m, b.pick("q_norm", "post_attention", "pre_feed"))
    t[n[k]] = m.sd[k].copy()
    return [k]


real_case("real-gemma3-gguf-one-raw", "gemma3", "one gain stored without the 1", real_gguf(_real_one), port="port.gguf", say=("minus1", "mixed"), expect="differs")


def _real_swap(b, t, m, n):
    i = b.int(0, m.layers - 1)
    x, y = f"model.layers.{i}.input_layernorm.weight", f"model.layers.{i}.post_attention_layernorm.weight"
    t[n[x]], t[n[y]] = t[n[y]], t[n[x]]
    return [x, y]


real_case("real-smollm2-gguf-right", "smollm2", "healthy", real_gguf(), port="port.gguf", healthy=True, exit=(0,), say=("same",), wrong=("plus1", "swap"), expect="rounding")
real_case("real-smollm2-gguf-swapped", "smollm2", "two norms of a layer swapped", real_gguf(_real_swap), port="port.gguf", say=("swap",), expect="differs")
real_case("real-smollm2-gguf-plus1", "smollm2", "Gemma's 1 added", real_gguf(lambda b, t, m, n: [t.__setitem__(n[k], t[n[k]] + 1) or k for k in m.norms()]), port="port.gguf", say=("plus1",), expect="differs")


def _real_folders(edit, ref_dtype="bf16", dtype="bf16", cfg_edit=None):
    def make(b, m):
        sd = dict(m.sd)
        where = edit(b, m, sd) if edit else []
        ce = (lambda c: cfg_edit(b, c)) if cfg_edit else None
        check = folders(b, m, sd, dtype=dtype, ref_dtype=ref_dtype, cfg_edit=ce)
        return {"where": [stem(w) for w in where], "check": check}

    return make


real_case("real-qwen-copied", "qwen05", "one norm holds another's gains", _real_folders(lambda b, m, sd: _copied(b, m, sd)), say=("copy",), expect="differs")
real_case("real-qwen-eps", "qwen05", "eps 1e-3 in config.json", _real_folders(None, cfg_edit=_set("rms_norm_eps", 1e-3)), say=("eps",), where=["eps"], level=1, expect="differs")
real_case("real-gemma3-folder-plus1", "gemma3", "gains + 1 in bf16", _real_folders(_plus(1)), say=("plus1", "double1"), expect="differs")
real_case("real-gemma3-finetuned", "gemma3", "a fine-tuned state: 1 % noise", _real_folders(lambda b, m, sd: [sd.__setitem__(k, (v * (1 + 0.01 * b.normal(*v.shape))).astype(np.float32)) for k, v in list(sd.items())] and m.norms(), dtype="f32"), say=("values",), wrong=("plus1", "swap", "perm", "neg"), expect="differs")
real_case("real-smollm2-f16-chain", "smollm2", "healthy: bf16 to f16", _real_folders(None, dtype="f16"), say=("same", "rounding"), healthy=True, exit=(0,), wrong=("plus1", "swap"), expect="rounding")
real_case("real-smollm2-rope", "smollm2", "rope_theta: no norm's fault", _real_folders(None, cfg_edit=lambda b, c: c["rope_parameters"].__setitem__("rope_theta", 1000.0)), say=("rope", "theta"), level=1, where=["rope_theta", "rope", "theta"], expect="differs", wrong=("swap",))


@case("real-mpnet-biases")
def _(b):
    m = real_sub("mpnet", 2)
    sd = dict(m.sd)
    i = b.int(0, 1)
    x, y = f"encoder.layer.{i}.attention.LayerNorm", f"encoder.layer.{i}.output.LayerNorm"
    for s in (".weight", ".bias"):
        sd[x + s], sd[y + s] = sd[y + s], sd[x + s]
    save_folder(b.dir / "reference", m.config, m.sd, "f32")
    save_folder(b.dir / "port", m.config, sd, "f32")
    ids = some_ids(512, b.seed)

    def run(folder):
        model = transformers.AutoModel.from_pretrained(b.dir / folder, dtype=torch.float64).eval()
        with torch.no_grad():
            return model(input_ids=ids).last_hidden_state

    return truth("real", "mpnet, 2 layers: both norms of a layer swapped, gains and biases", where=[x, y], say=("swap",), check=lambda: gap(run("port"), run("reference")), expect="differs")


@case("real-mpnet-healthy-bf16")
def _(b):
    m = real_sub("mpnet", 2)
    save_folder(b.dir / "reference", m.config, m.sd, "f32")
    save_folder(b.dir / "port", m.config, m.sd, b.pick("bf16", "f16"))
    return truth("real", "mpnet, 2 layers: healthy, rounded", healthy=True, exit=(0,), say=("rounding", "same"), wrong=("swap", "plus1"))


@case("real-whole-gemma3-gguf")
def _(b):
    return truth("real", "healthy: the whole Gemma 3 270M GGUF against the folder read from it", port=str(REAL / "gemma3.gguf"), ref=str(REAL / "gemma3"), healthy=True, exit=(0,), say=("llamacpp", "same"), wrong=("doubled", "swap"), max_mib=6000)


@case("real-whole-smollm2-gguf")
def _(b):
    return truth("real", "healthy: the whole SmolLM2 GGUF against the folder read from it", port=str(REAL / "smollm2.gguf"), ref=str(REAL / "smollm2"), healthy=True, exit=(0,), say=("same",), wrong=("plus1", "swap"), max_mib=6000)


@case("real-gemma3-identify")
def _(b):
    m = real_sub("gemma3", 3)
    save_folder(b.dir / "port", m.config, m.sd, "bf16")
    return truth("real", "gemma3, one side: stored zero-centred (with large values)", kind="compare", args=["identify", "port/model.safetensors"], healthy=True, exit=(0,), say=("zero-cent", "undecid"), wrong=("one-cent",), where=[],
                 note="undecided is right as well: real Gemma 3 gains lie far from 0")


@case("real-smollm2-recording")
def _(b):
    m = real_sub("smollm2", 2)
    ids = np.random.default_rng(b.seed).integers(3, 512, 48)
    p = NumpyDecoder(m, {"eps": 1e-3})
    lp = p(ids)
    p.save(b.path("port.safetensors"), ids)
    save_folder(b.dir / "reference", m.config, m.sd, "f32")
    lr = NumpyDecoder(m)(ids)
    return truth("real", "smollm2: recording with eps 1e-3", port="port.safetensors", where=[stem(k) for k in m.norms()], say=("eps",), level=3, check=lambda: gap(torch.from_numpy(lp), torch.from_numpy(lr)), expect="differs")


@case("real-smollm2-mlx")
def _(b):
    m = real_sub("smollm2", 2)
    save_folder(b.dir / "reference", m.config, m.sd, "bf16")
    sd = dict(m.sd)
    where = _swap_across_real(b, m, sd)
    save_mlx(b.dir / "port", m, sd, bits=4, group=64)
    return truth("real", "smollm2, MLX 4 bits: the same norm of two layers swapped", where=[stem(w) for w in where], say=("swap",))


def _swap_across_real(b, m, sd):
    x, y = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    sd[x], sd[y] = sd[y], sd[x]
    return [x, y]


# ================================================================================================ norms of images
IMAGE = '''"""A small image network."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of (B, C, H, W)."""

    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n)), eps

    def forward(self, x):
        mu = x.mean(1, keepdim=True)
        var = (x - mu).pow(2).mean(1, keepdim=True)
        return (x - mu) / torch.sqrt(var + self.eps) * self.weight[:, None, None] + self.bias[:, None, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32, eps=1e-3)
        self.mid, self.mid_norm = nn.Conv2d(32, 48, 3, padding=1), nn.GroupNorm(8, 48, eps=1e-5)
        self.top, self.top_norm = nn.Conv2d(48, 64, 1), ChannelNorm(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.stem_norm(self.stem(x)))
        x = F.silu(self.mid_norm(self.mid(x)))
        x = F.gelu(self.top_norm(self.top(x)))
        return self.head(x.mean((2, 3)))


def load():
    torch.manual_seed(@SEED@)
    net = Net()
    for name, p in net.named_parameters():
        nn.init.normal_(p, 1.0 if p.ndim == 1 and name.endswith("norm.weight") else 0.0, 0.25 if p.ndim == 1 else 1.2 * p[0].numel() ** -0.5)
    nn.init.normal_(net.stem_norm.running_mean, 0.0, 0.4)
    nn.init.uniform_(net.stem_norm.running_var, 0.002, 0.8)
    return net.eval()


def batch():
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(@SEED@))
'''


def image(name, fault, edits, *, say, where=(), healthy=False, expect="differs", **kw):
    @case(name)
    def build(b):
        text = IMAGE.replace("@SEED@", str(b.int(1, 99999)))
        b.path("reference.py").write_text(text)
        for old, new in edits:
            assert old in text, old
            text = text.replace(old, new)
        b.path("port.py").write_text(text)

        def check():
            (p, x), (r, _) = code_ports.load_py(b.dir / "port.py:load"), code_ports.load_py(b.dir / "reference.py:load")
            with torch.no_grad():
                return gap(p.double()(x.double()), r.double()(x.double()))

        kw.setdefault("level", 3)
        return truth("image", fault, port="port.py:load", ref="reference.py:load", batch="reference.py:batch", where=where, say=say, healthy=healthy, exit=(0,) if healthy else (1,), check=check, expect=expect, **kw)


image("image-healthy-channels-last", "healthy: the channel norm through channels_last and F.layer_norm", [("        mu = x.mean(1, keepdim=True)\n        var = (x - mu).pow(2).mean(1, keepdim=True)\n        return (x - mu) / torch.sqrt(var + self.eps) * self.weight[:, None, None] + self.bias[:, None, None]",
      "        return F.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)")], say=("same",), healthy=True, expect="same")
image("image-groups", "GroupNorm of 16 groups, the reference's has 8", [("nn.GroupNorm(8, 48", "nn.GroupNorm(16, 48")], say=(r"group",), where=["mid_norm"])
image("image-batchnorm-eps", "BatchNorm at PyTorch's eps 1e-5, the reference at Keras' 1e-3", [("nn.BatchNorm2d(32, eps=1e-3)", "nn.BatchNorm2d(32)")], say=("eps",), where=["stem_norm"])
image("image-batchnorm-stats-lost", "the running statistics were not converted: mean 0, variance 1", [("    nn.init.normal_(net.stem_norm.running_mean, 0.0, 0.4)\n    nn.init.uniform_(net.stem_norm.running_var, 0.002, 0.8)\n", "")], say=(r"running|statistic|reinit|initial|mean|variance",), where=["stem_norm"], level=2)
image("image-batchnorm-mean-var-swapped", "running mean and variance swapped by the converter", [("    return net.eval()", "    m, v = net.stem_norm.running_mean.clone(), net.stem_norm.running_var.clone()\n    net.stem_norm.running_mean.copy_(v), net.stem_norm.running_var.copy_(m.abs())\n    return net.eval()")], say=(r"running|statistic|swap|mean|variance",), where=["stem_norm"], level=2)
image("image-channel-norm-axis", "the channel norm takes its statistics over the width", [("mu = x.mean(1, keepdim=True)", "mu = x.mean(-1, keepdim=True)"), (".pow(2).mean(1, keepdim=True)", ".pow(2).mean(-1, keepdim=True)")], say=(r"ax[ie]s|dimension|channel|row",), where=["top_norm"])
image("image-channel-norm-eps", "the channel norm at 1e-2 in place of 1e-6", [("ChannelNorm(64)", "ChannelNorm(64, 1e-2)")], say=("eps",), where=["top_norm"])
image("image-batchnorm-in-training-mode", "BatchNorm uses the batch's statistics in evaluation", [("self.stem_norm(self.stem(x))", "F.batch_norm(self.stem(x), None, None, self.stem_norm.weight, self.stem_norm.bias, True, 0.0, 1e-3)")], say=(r"batch|running|training|statistic|not called|never|notapplied|missing|not applied",), where=["stem_norm"], level=4)


# ================================================================================================ more
def _two(b, m, sd):
    i, j = (int(v) for v in b.rng.choice(m.layers, 2, replace=False))
    x, y = (f"model.layers.{i}.{n}.weight" for n in (HF1, HF2))
    sd[x], sd[y] = sd[y], sd[x]
    z = f"model.layers.{j}.{b.pick(HF1, HF2)}.weight"
    sd[z] = -sd[z]
    return [x, y, z]


st("st-two-faults", "llama", "two faults: a swap in one layer, a negated gain in another", _two, say=(r"(?s)(?=.*(?:swap|exchang|interchang))(?=.*(?:negat|sign|flip|times -1))",), layers=4, second="both are named")


def _frankenmerge(b, m, sd):
    i = b.int(1, m.layers - 1)
    for k in list(sd):
        if layer_of(k) == i:
            sd[k] = sd[k.replace(f"layers.{i}.", f"layers.{i - 1}.")].copy()
    return [k for k in m.norms() if layer_of(k) == i]


st("st-layer-duplicated", "llama", "a whole layer is a copy of the one before", _frankenmerge, say=("copy",), layers=4)


def _bf16_as_f16(b, m, sd):
    for k in m.norms():
        sd[k] = to_torch(sd[k], "bf16").view(torch.float16).float().numpy()
    return m.norms()


st("st-bf16-bytes-read-as-f16", "llama", "the bytes of the bf16 gains were read as float16", _bf16_as_f16, say=("values", "reinterpret", "bytes"), wrong=("plus1", "swap", "perm"), dtype="bf16", port32=True,
   second="1.0 became 1.875; best: 'bfloat16 read as float16'")


@case("gguf-layers-reordered")
def _(b):
    L = 12
    order = [int(s) for s in sorted(str(i) for i in range(L))]

    def edit(t, m, n):
        old = dict(t)
        for k in t:
            if k.startswith("blk."):
                _, i, rest = k.split(".", 2)
                t[k] = old[f"blk.{order[int(i)]}.{rest}"]

    m, _, _ = gguf_case(b, "llama", edit, layers=L, linear="q8_0")
    hit = [f"model.layers.{i}.{k}.weight" for i, j in enumerate(order) if i != j for k in (HF1, HF2)]
    return truth("gguf", "whole layers in the order 0, 1, 10, 11, 2, ...", port="port.gguf", where=gg(m, *hit), say=("order",), check=gguf_check(b, m), expect="differs")


@case("gguf-healthy-gain-of-two-axes")
def _(b):
    m = tiny(b, "qwen2")
    save_folder(b.dir / "reference", m.config, m.sd)
    t = gguf_tensors(m)
    for k in t:
        if k.endswith("norm.weight"):
            t[k] = t[k][None]
    save_gguf(b.dir / "port.gguf", m, t, linear="f16", norm_types={k: Q.F32 for k in t if "norm" in k})
    return truth("gguf", "healthy: gains stored with shape (1, n)", port="port.gguf", healthy=True, exit=(0,), say=("same",), wrong=("swap", "plus1"))


onnx_case("onnx-healthy-gain-of-three-axes", "llama", "healthy: a gain of shape (1, 1, n)", style="decomposed", healthy=True, expect="same",
          edits=lambda b, m: ([], {stem(k): {"w": m.sd[k][None, None]} for k in m.norms()}))
code_case("code-rms-with-bias", ("llama", "qwen3"), "a constant is added after the gain", lambda b, m: [("return self.g * h.type_as(x)", "return self.g * h.type_as(x) + 0.03")], say=("bias", "added", "offset"), where=every, level=3)
code_case("code-gain-before-norm", "llama", "the gain multiplies before the statistics are taken", lambda b, m: [("h = x.float()\n", "h = x.float() * self.g\n"), ("return self.g * h.type_as(x)", "return h.type_as(x)")], say=("gain", "weight", "before", "formula", "no norm"), where=every, level=3)
code_case("code-abs-for-square", "llama", "the mean absolute value, not the root mean square", lambda b, m: [("h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)", "h = h / (h.abs().mean(-1, keepdim=True) + self.eps)")], say=(r"abs|formula|not (a|in a|the) norm|no norm|statistic|square|unknown|not identified",), where=every, level=3)
cfg_case("meta-eps-t5", "t5", "eps in config.json", _set("layer_norm_epsilon", 1e-3, 1e-2), ("eps",))


# ================================================================================================ hostile files
CANARY = "CANARY"


def hostile(name, fault, *, exit=(2,), say=(r".",), port="port.gguf", ref="reference", **kw):
    def deco(f):
        @case(name)
        def build(b):
            m = tiny(b, kw.get("family", "llama"), 2, hidden=64)
            save_folder(b.dir / "reference", m.config, m.sd, "f32")
            got = f(b, m)
            return truth("hostile", fault, port=got or port, ref=ref, say=say, exit=exit, level=1, note=kw.get("note", "one line, exit 2, nothing executed, memory bounded"), max_mib=1500)

        return f

    return deco


def good_gguf(b, m, name="good.gguf"):
    save_gguf(b.dir / name, m, linear="q8_0")
    data = (b.dir / name).read_bytes()
    (b.dir / name).unlink()
    return bytearray(data)


def raw_gguf(tensors=1, kv=(), infos=(), data=b"", version=3, magic=b"GGUF"):
    out = magic + struct.pack("<IQQ", version, tensors, len(kv)) + b"".join(kv) + b"".join(infos)
    out += b"\0" * (-len(out) % 32)
    return out + data


def kv_str(k, v):
    return gguf_string(k) + struct.pack("<I", 8) + gguf_string(v)


def info(name, dims, kind=0, offset=0):
    return gguf_string(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", kind, offset)


ARCHKV = kv_str("general.architecture", "llama")


@hostile("bad-gguf-cut-header", "cut inside the header")
def _(b, m):
    d = good_gguf(b, m)
    b.path("port.gguf").write_bytes(d[: b.int(30, 900)])


@hostile("bad-gguf-cut-data", "cut inside the last tensors")
def _(b, m):
    d = good_gguf(b, m)
    b.path("port.gguf").write_bytes(d[: int(len(d) * b.uniform(0.4, 0.97))])


@hostile("bad-gguf-count-lies", "2^62 tensors announced")
def _(b, m):
    d = good_gguf(b, m)
    d[8:16] = struct.pack("<Q", 2**62)
    b.path("port.gguf").write_bytes(d)


@hostile("bad-gguf-string-lies", "a key of 2^60 bytes")
def _(b, m):
    d = good_gguf(b, m)
    d[24:32] = struct.pack("<Q", 2**60)
    b.path("port.gguf").write_bytes(d)


@hostile("bad-gguf-array-lies", "an array of 2^61 strings")
def _(b, m):
    kv = gguf_string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2**61)
    b.path("port.gguf").write_bytes(raw_gguf(1, [ARCHKV, kv], [info("output_norm.weight", [64])], b"\0" * 256))


@hostile("bad-gguf-nested-arrays", "arrays in arrays, 5000 deep")
def _(b, m):
    kv = gguf_string("x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 1) + struct.pack("<I", 7)
    b.path("port.gguf").write_bytes(raw_gguf(1, [ARCHKV, kv], [info("output_norm.weight", [64])], b"\0" * 256))


@hostile("bad-gguf-dims-overflow", "dimensions whose product overflows 64 bits")
def _(b, m):
    b.path("port.gguf").write_bytes(raw_gguf(1, [ARCHKV], [info("output_norm.weight", [2**33, 2**33])], b"\0" * 256))


@hostile("bad-gguf-size-lies", "a gain of 2^40 numbers in a file of 400 bytes")
def _(b, m):
    b.path("port.gguf").write_bytes(raw_gguf(1, [ARCHKV], [info("output_norm.weight", [2**40])], b"\0" * 256))


@hostile("bad-gguf-offset-outside", "a tensor's data begin beyond the end")
def _(b, m):
    b.path("port.gguf").write_bytes(raw_gguf(1, [ARCHKV], [info("output_norm.weight", [64], offset=2**50)], b"\0" * 256))


@hostile("bad-gguf-twice", "a norm named twice, with other values")
def _(b, m):
    data = np.ones(64, np.float32).tobytes() + (2 * np.ones(64, np.float32)).tobytes()
    b.path("port.gguf").write_bytes(raw_gguf(2, [ARCHKV], [info("output_norm.weight", [64]), info("output_norm.weight", [64], offset=256)], data))


@hostile("bad-gguf-unknown-type", "quantization type 199 at a norm")
def _(b, m):
    b.path("port.gguf").write_bytes(raw_gguf(1, [ARCHKV], [info("output_norm.weight", [64], kind=199)], b"\0" * 256))


@hostile("bad-gguf-alignment", "alignment 0")
def _(b, m):
    kv = gguf_string("general.alignment") + struct.pack("<II", 4, 0)
    b.path("port.gguf").write_bytes(raw_gguf(1, [ARCHKV, kv], [info("output_norm.weight", [64])], b"\0" * 256))


@hostile("bad-gguf-escape-name", "a tensor's name holds terminal escapes", exit=(1, 2), say=(r".",), note="the escape must not reach the terminal; a file with one odd norm may be compared (exit 1) or refused (exit 2)")
def _(b, m):
    name = "blk.0.attn_norm\x1b[2J\x1b]0;owned\x07.weight"
    b.path("port.gguf").write_bytes(raw_gguf(1, [ARCHKV], [info(name, [64])], np.ones(64, np.float32).tobytes()))


@hostile("bad-gguf-version", "version 77")
def _(b, m):
    b.path("port.gguf").write_bytes(raw_gguf(1, [ARCHKV], [info("output_norm.weight", [64])], b"\0" * 256, version=77))


@hostile("bad-gguf-html", "an error page saved as .gguf")
def _(b, m):
    b.path("port.gguf").write_text("<!DOCTYPE html><html><body>404: Entry not found</body></html>")


@hostile("bad-gguf-bytes-flipped", "random bytes of the header flipped", exit=(0, 1, 2), note="any answer but a crash (101) or a hang; a flip may leave a readable file")
def _(b, m):
    d = good_gguf(b, m)
    for _ in range(12):
        d[b.int(4, 1500)] = b.int(0, 255)
    b.path("port.gguf").write_bytes(d)


def raw_st(header, data=b"", length=None):
    h = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(h) if length is None else length) + h + data


@hostile("bad-st-length", "a header of 2^63 - 1 bytes", port="port.safetensors")
def _(b, m):
    b.path("port.safetensors").write_bytes(raw_st({"model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 16, 2**63 - 1))


@hostile("bad-st-overlap", "two tensors over the same bytes", port="port.safetensors")
def _(b, m):
    h = {f"model.layers.{i}.input_layernorm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]} for i in range(2)}
    b.path("port.safetensors").write_bytes(raw_st(h, b"\1" * 256))


@hostile("bad-st-duplicate-key", "a key twice in the header", port="port.safetensors")
def _(b, m):
    one = '"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [%d, %d]}'
    b.path("port.safetensors").write_bytes(raw_st(("{" + one % (0, 256) + ", " + one % (256, 512) + "}").encode(), np.ones(128, np.float32).tobytes()))


@hostile("bad-st-cut", "cut inside the data", port="port.safetensors")
def _(b, m):
    d = (b.dir / "reference/model.safetensors").read_bytes()
    b.path("port.safetensors").write_bytes(d[: len(d) // 2])


@hostile("bad-st-deep-json", "a header nested 100000 deep", port="port.safetensors")
def _(b, m):
    b.path("port.safetensors").write_bytes(raw_st(b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}"))


@hostile("bad-st-index-outside", "an index whose shard lies outside the folder", port="port")
def _(b, m):
    save_folder(b.dir / "elsewhere", m.config, m.sd)
    (b.dir / "port").mkdir()
    shutil.copy(b.dir / "elsewhere/config.json", b.dir / "port/config.json")
    (b.dir / "port/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {k: "../elsewhere/model.safetensors" for k in m.sd}}))


@hostile("bad-st-shard-missing", "an index names a shard that is not there", port="port")
def _(b, m):
    save_folder(b.dir / "port", m.config, m.sd, shards=3)
    (b.dir / "port/model-00002-of-00003.safetensors").unlink()


@hostile("bad-folder-remote-code", "auto_map and a .py in the folder: must not run", port="port", exit=(0, 1, 2), note="the canary file must not appear; weights are the reference's")
def _(b, m):
    save_folder(b.dir / "port", m.config, m.sd, cfg_edit=lambda c: (c.update(auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"}), c.update(model_type="evil_model")))
    (b.dir / "port/modeling_evil.py").write_text(f"open({str(b.dir / CANARY)!r}, 'w').write('x')\nclass Evil: pass\n")


@hostile("bad-pickle-only", "only pytorch_model.bin, a pickle that runs code", port="port")
def _(b, m):
    (b.dir / "port").mkdir()
    shutil.copy(b.dir / "reference/config.json", b.dir / "port/config.json")

    class Evil:
        def __reduce__(self):
            return (open, (str(b.dir / CANARY), "w"))

    (b.dir / "port/pytorch_model.bin").write_bytes(pickle.dumps(Evil()))


@hostile("bad-config-huge", "config.json announces 10^9 layers", port="port", exit=(1, 2), note="exit 2, or 1 from the values alone; memory and time bounded")
def _(b, m):
    save_folder(b.dir / "port", m.config, m.sd, cfg_edit=lambda c: c.update(num_hidden_layers=10**9, layer_types=None))


@hostile("bad-config-not-json", "config.json is cut", port="port")
def _(b, m):
    save_folder(b.dir / "port", m.config, m.sd)
    t = (b.dir / "port/config.json").read_text()
    (b.dir / "port/config.json").write_text(t[: len(t) // 2])


@hostile("bad-lfs-pointer", "a git-lfs pointer in place of the weights", port="port")
def _(b, m):
    save_folder(b.dir / "port", m.config, m.sd)
    (b.dir / "port/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 536223056\n")


@hostile("bad-empty", "an empty file", port="port.onnx")
def _(b, m):
    b.path("port.onnx").write_bytes(b"")


@hostile("bad-no-file", "no such file", port="nothing.gguf")
def _(b, m):
    pass


@hostile("bad-fifo", "a named pipe that nobody writes", port="port.gguf")
def _(b, m):
    os.mkfifo(b.path("port.gguf"))


@hostile("bad-onnx-cut", "ONNX cut in the middle", port="port.onnx")
def _(b, m):
    onnxnet.decoder(b.path("port.onnx"), m)
    d = b.path("port.onnx").read_bytes()
    b.path("port.onnx").write_bytes(d[: int(len(d) * b.uniform(0.2, 0.9))])


def _external(b, m, location, extra=()):
    import onnx

    onnxnet.decoder(b.path("port.onnx"), m)
    model = onnx.load(b.path("port.onnx"))
    done = False
    for t in model.graph.initializer:
        if t.name.endswith("input_layernorm.weight"):
            t.ClearField("raw_data")
            t.data_location = onnx.TensorProto.EXTERNAL
            for k, v in (("location", location), *extra):
                e = t.external_data.add()
                e.key, e.value = k, v
            done = True
    assert done
    b.path("port.onnx").write_bytes(model.SerializeToString())


@hostile("bad-onnx-external-outside", "external data in ../, outside the folder", port="in/port.onnx")
def _(b, m):
    (b.dir / "secret.bin").write_bytes(np.ones(4096, np.float32).tobytes())
    _external(b, m, "../secret.bin")
    (b.dir / "in").mkdir()
    (b.dir / "port.onnx").rename(b.dir / "in/port.onnx")


@hostile("bad-onnx-external-absolute", "external data at an absolute path", port="port.onnx")
def _(b, m):
    _external(b, m, "/etc/passwd")


@hostile("bad-onnx-external-symlink", "external data through a link that leads outside", port="in/port.onnx")
def _(b, m):
    (b.dir / "secret.bin").write_bytes(np.ones(4096, np.float32).tobytes())
    _external(b, m, "data.bin")
    (b.dir / "in").mkdir()
    (b.dir / "port.onnx").rename(b.dir / "in/port.onnx")
    (b.dir / "in/data.bin").symlink_to(b.dir / "secret.bin")


@hostile("bad-onnx-external-length", "external data longer than its file", port="port.onnx")
def _(b, m):
    (b.dir / "data.bin").write_bytes(b"\0" * 64)
    _external(b, m, "data.bin", (("offset", "0"), ("length", str(2**45))))


@hostile("bad-onnx-dims", "an initializer of 2^40 numbers without data", port="port.onnx")
def _(b, m):
    import onnx

    onnxnet.decoder(b.path("port.onnx"), m)
    model = onnx.load(b.path("port.onnx"))
    t = next(t for t in model.graph.initializer if t.name == "model.norm.weight")
    del t.dims[:]
    t.dims.extend([2**40])
    t.ClearField("raw_data")
    b.path("port.onnx").write_bytes(model.SerializeToString())


@hostile("bad-onnx-unknown-op", "an operator of an unknown domain in the way", port="port.onnx", note="exit 2 by the specification", exit=(2,))
def _(b, m):
    def raw(g):
        g.nodes[5].op_type, g.nodes[5].domain = "WarpField", "com.example.secret"

    onnxnet.decoder(b.path("port.onnx"), m, fault={"raw": raw})


@hostile("bad-onnx-twice", "an initializer named twice", port="port.onnx")
def _(b, m):
    import onnx

    onnxnet.decoder(b.path("port.onnx"), m)
    model = onnx.load(b.path("port.onnx"))
    t = next(t for t in model.graph.initializer if t.name == "model.norm.weight")
    c = model.graph.initializer.add()
    c.CopyFrom(t)
    c.raw_data = (2 * np.ones(64, np.float32)).tobytes()
    b.path("port.onnx").write_bytes(model.SerializeToString())


@hostile("bad-recording-shapes", "a recording whose output has other rows than its input", port="port.safetensors")
def _(b, m):
    x = torch.randn(40, 64)
    save_file({"model.norm.input": x, "model.norm.output": torch.randn(39, 64)}, b.path("port.safetensors"), metadata={"format": "normkit-recording", "version": "1"})


@hostile("bad-recording-version", "a recording of version 9", port="port.safetensors")
def _(b, m):
    x = torch.randn(40, 64)
    save_file({"model.norm.input": x, "model.norm.output": x.clone()}, b.path("port.safetensors"), metadata={"format": "normkit-recording", "version": "9"})


@hostile("bad-recording-tokens", "a recording whose tokens are no JSON", port="port.safetensors", exit=(2, 0, 1), note="exit 2, or rows left uncompared with a word about it")
def _(b, m):
    x = torch.randn(40, 64)
    save_file({"model.norm.input": x, "model.norm.output": torch.nn.functional.rms_norm(x, (64,))}, b.path("port.safetensors"),
              metadata={"format": "normkit-recording", "version": "1", "tokens": "[1, 2, __import__('os')"})


@hostile("bad-recording-token-range", "tokens beyond the reference's vocabulary", port="port.safetensors", exit=(2, 0, 1), note="one line; no traceback from an embedding")
def _(b, m):
    x = torch.randn(40, 64)
    save_file({"model.norm.input": x, "model.norm.output": torch.nn.functional.rms_norm(x, (64,))}, b.path("port.safetensors"),
              metadata={"format": "normkit-recording", "version": "1", "tokens": json.dumps([10**9] * 40)})


@hostile("bad-code-raises", "FILE.py whose function raises", port="port.py:load", say=("boom|raise|RuntimeError",))
def _(b, m):
    b.path("port.py").write_text("def load():\n    raise RuntimeError('boom')\n")


@hostile("bad-code-no-model", "FILE.py whose function returns a string", port="port.py:load")
def _(b, m):
    b.path("port.py").write_text("def load():\n    return 'no model'\n")


@hostile("bad-code-no-function", "FILE.py without the function named", port="port.py:nowhere", say=("nowhere",))
def _(b, m):
    b.path("port.py").write_text("def load():\n    return None\n")


@hostile("bad-nothing-in-common", "two models that have nothing in common", port="port", exit=(1, 2), say=(r"nothing|no norm|none|not compar|pair|common|differ",), note="exit 1 or 2 with a word; no pairing by force")
def _(b, m):
    g = tiny(b, "gpt2", 3, hidden=128)
    save_folder(b.dir / "port", g.config, g.sd)


@hostile("bad-no-norms", "a file without any norm", port="port.safetensors", exit=(1, 2), say=(r"no norm|none|nothing|missing",))
def _(b, m):
    save_file({"a.weight": torch.randn(8, 8), "b.weight": torch.randn(8, 8)}, b.path("port.safetensors"))


# ------------------------------------------------------------------------------------------------
def build(name, seed, folder):
    """Write the case's files below folder and give its truth (with its id)."""
    b = Box(Path(folder) / name, seed, name)
    t = CASES[name](b)
    t["id"], t["dir"] = name, str(b.dir)
    return t


if __name__ == "__main__":
    for name in CASES:
        print(name)
    print(len(CASES), file=sys.stderr)
