"""ONNX ports written with onnx.helper: Llama/Qwen3/Gemma decoders, GPT-2 and BERT, norms fused or decomposed."""

import numpy as np
import onnx
import onnx.helper as oh
import onnx.numpy_helper as nh
from lib import *


class Graph:
    """`style`: how norms are written. `half`: float16 weights and activations, norms through Cast to float32 or not."""

    def __init__(self, style="fused", half=False, names=True, edits=None):
        self.nodes, self.inits, self.k = [], {}, 0
        self.style, self.half, self.names, self.edits = style, half, names, edits or {}
        self.dt = np.float16 if half else np.float32
        self.domains = {""}

    def new(self, stem="t"):
        self.k += 1
        return f"/{stem}_{self.k}_output_0"

    def op(self, kind, *inputs, outs=1, domain="", at="", **attrs):
        names = [self.new(f"{at}/{kind}" if at else kind) for _ in range(outs)]
        self.nodes.append(oh.make_node(kind, list(inputs), names, name=names[0].removesuffix("_output_0"), domain=domain, **attrs))
        self.domains.add(domain)
        return names[0] if outs == 1 else names

    def const(self, a, name=None):
        name = name or self.new("const").removesuffix("_output_0")
        self.inits[name] = np.asarray(a)
        return name

    def f(self, a, name=None):
        return self.const(np.asarray(a, self.dt), name)

    def cast(self, x, to):
        return self.op("Cast", x, to=to)

    # --- norms
    def rms(self, x, path, w, eps, offset=False):
        e = self.edits.get(path, {})
        if e.get("skip"):
            return x
        eps = e.get("eps", eps)
        w = e.get("w", w)
        if offset and self.style in ("fused", "simplified"):
            w = w + 1
        style = e.get("style", self.style)
        if e.get("wrong") == "layernorm":
            return self.op("LayerNormalization", x, self.f(w, path + ".weight"), axis=-1, epsilon=eps, at=path)
        if style == "fused":
            return self.op("RMSNormalization", x, self.f(w, path + ".weight"), axis=-1, epsilon=eps, at=path)
        if style == "simplified":
            return self.op("SimplifiedLayerNormalization", x, self.f(w, path + ".weight"), axis=-1, epsilon=eps, at=path)
        h = self.cast(x, 1) if self.half else x
        c32 = lambda a: self.const(np.asarray(a, np.float32))
        p = self.op("Pow", h, c32(2.0), at=path)
        m = self.op("ReduceMean", p, self.const(np.asarray([-1], np.int64)), keepdims=1, at=path)
        if e.get("divisor"):
            m = self.op("Mul", m, c32(len(w) / (len(w) - 1)), at=path)
        if e.get("outside"):
            r = self.op("Add", self.op("Sqrt", m, at=path), c32(eps), at=path)
        else:
            r = self.op("Sqrt", self.op("Add", m, c32(eps), at=path), at=path)
        y = self.op("Mul", h, self.op("Reciprocal", r, at=path), at=path) if self.k % 2 else self.op("Div", h, r, at=path)
        if self.half:
            y = self.cast(y, 10)
        g = self.f(w, path + ".weight")
        if offset:
            g = self.op("Add", g, self.f(1.0), at=path)
        return self.op("Mul", g, y, at=path)

    def ln(self, x, path, w, b, eps):
        e = self.edits.get(path, {})
        if e.get("skip"):
            return x
        eps, w, b = e.get("eps", eps), e.get("w", w), e.get("b", b)
        if e.get("wrong") == "rms":
            y = self.op("RMSNormalization", x, self.f(w, path + ".weight"), axis=-1, epsilon=eps, at=path)
            return self.op("Add", y, self.f(b, path + ".bias"), at=path)
        if e.get("style", self.style) == "fused":
            return self.op("LayerNormalization", x, self.f(w, path + ".weight"), self.f(b, path + ".bias"), axis=e.get("axis", -1), epsilon=eps, at=path)
        h = self.cast(x, 1) if self.half else x
        c32 = lambda a: self.const(np.asarray(a, np.float32))
        ax = self.const(np.asarray([-1], np.int64))
        d = self.op("Sub", h, self.op("ReduceMean", h, ax, keepdims=1, at=path), at=path)
        v = self.op("ReduceMean", self.op("Pow", d, c32(2.0), at=path), ax, keepdims=1, at=path)
        if e.get("divisor"):
            v = self.op("Mul", v, c32(len(w) / (len(w) - 1)), at=path)
        if e.get("outside"):
            r = self.op("Add", self.op("Sqrt", v, at=path), c32(eps), at=path)
        else:
            r = self.op("Sqrt", self.op("Add", v, c32(eps), at=path), at=path)
        y = self.op("Div", d, r, at=path)
        if self.half:
            y = self.cast(y, 10)
        return self.op("Add", self.op("Mul", y, self.f(w, path + ".weight"), at=path), self.f(b, path + ".bias"), at=path)

    # --- the rest
    def linear(self, x, w, b=None, name=None):  # exporters write the transposed matrix under a number
        y = self.op("MatMul", x, self.f(w.T, name or f"onnx::MatMul_{self.k + 900}"))
        return self.op("Add", y, self.f(b, (name or f"lin_{self.k}") + ".bias")) if b is not None else y

    def heads(self, x, n, d):
        return self.op("Transpose", self.op("Reshape", x, self.const(np.asarray([0, 0, n, d], np.int64))), perm=[0, 2, 1, 3])

    def attention(self, q, k, v, scale, mask, width):
        s = self.op("Mul", self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2])), self.f(scale))
        if mask is not None:
            s = self.op("Add", s, mask)
        o = self.op("Transpose", self.op("MatMul", self.op("Softmax", s, axis=-1), v), perm=[0, 2, 1, 3])
        return self.op("Reshape", o, self.const(np.asarray([0, 0, width], np.int64)))

    def finish(self, path, logits, vocab, external=None, opset=None):
        self.nodes.append(oh.make_node("Cast", [logits], ["logits"], to=1))
        graph = oh.make_graph(self.nodes, "main_graph", [oh.make_tensor_value_info("input_ids", 7, ["batch", "sequence"])],
                              [oh.make_tensor_value_info("logits", 1, ["batch", "sequence", vocab])],
                              [nh.from_array(np.ascontiguousarray(a), n) for n, a in self.inits.items()])
        opsets = [oh.make_opsetid("", opset or 23)]
        if "com.microsoft" in self.domains:
            opsets.append(oh.make_opsetid("com.microsoft", 1))
        model = oh.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="pytorch", producer_version="2.9.0")
        if external:
            onnx.save(model, path, save_as_external_data=True, location=external, size_threshold=256)
        else:
            onnx.save(model, path)
        return path


def decoder(path, model, style="fused", half=False, edits=None, fault=None, external=None):
    """Llama, Qwen3 or Gemma in ONNX."""
    fault = fault or {}
    c, sd = model.config, model.sd
    g = Graph(style, half, edits=edits)
    H, KV = c.num_attention_heads, c.num_key_value_heads
    hd = getattr(c, "head_dim", None) or c.hidden_size // H
    off = model.family in OFFSET and not fault.get("no_offset")
    eps = c.rms_norm_eps
    T = g.op("Gather", g.op("Shape", "input_ids"), g.const(np.asarray([1], np.int64)), axis=0)
    zero, axis = g.const(np.asarray([0], np.int64)), g.const(np.asarray([0], np.int64))
    base = fault.get("rope_base", c.rope_parameters["rope_theta"])
    angle = np.arange(512)[:, None] * base ** (-np.arange(0, hd, 2) / hd)
    angle = np.concatenate([angle, angle], -1)
    cos, sin = (g.op("Slice", g.f(t(angle), n), zero, T, axis) for t, n in ((np.cos, "rope.cos"), (np.sin, "rope.sin")))
    mask = g.op("Slice", g.op("Slice", g.f(np.triu(np.full((512, 512), -1e4), 1), "causal"), zero, T, axis), zero, T, g.const(np.asarray([1], np.int64)))
    embed = sd["model.embed_tokens.weight"]
    x = g.op("Gather", g.f(embed, "model.embed_tokens.weight"), "input_ids", axis=0)
    if model.family == "gemma" and not fault.get("no_embed_scale"):
        x = g.op("Mul", x, g.f(c.hidden_size**0.5))

    def rope(v):
        a, b = g.op("Split", v, axis=-1, num_outputs=2, outs=2)
        turned = g.op("Concat", g.op("Neg", b), a, axis=-1)
        return g.op("Add", g.op("Mul", v, cos), g.op("Mul", turned, sin))

    def repeat(v):
        if H == KV:
            return v
        v = g.op("Unsqueeze", v, g.const(np.asarray([2], np.int64)))
        v = g.op("Expand", v, g.const(np.asarray([1, 1, H // KV, 1, 1], np.int64)))
        return g.op("Reshape", v, g.const(np.asarray([0, H, -1, hd], np.int64)))

    for i in range(model.layers):
        p = f"model.layers.{i}."
        h = g.rms(x, p + "input_layernorm", sd[p + "input_layernorm.weight"], eps, off)
        q, k, v = (g.heads(g.linear(h, sd[p + f"self_attn.{n}_proj.weight"]), m, hd) for n, m in (("q", H), ("k", KV), ("v", KV)))
        if p + "self_attn.q_norm.weight" in sd:
            q, k = (g.rms(t, p + f"self_attn.{n}_norm", sd[p + f"self_attn.{n}_norm.weight"], eps) for t, n in ((q, "q"), (k, "k")))
        q, k = rope(q), rope(k)
        o = g.attention(q, repeat(k), repeat(v), fault.get("scale", hd**-0.5), mask, H * hd)
        x = g.op("Add", x, g.linear(o, sd[p + "self_attn.o_proj.weight"]))
        h = g.rms(x, p + "post_attention_layernorm", sd[p + "post_attention_layernorm.weight"], eps, off)
        a, u = g.linear(h, sd[p + "mlp.gate_proj.weight"]), g.linear(h, sd[p + "mlp.up_proj.weight"])
        if fault.get("act", "gelu" if model.family == "gemma" else "silu") == "gelu":
            a = g.op("Gelu", a, approximate="tanh")
        else:
            a = g.op("Mul", a, g.op("Sigmoid", a))
        x = g.op("Add", x, g.linear(g.op("Mul", a, u), sd[p + "mlp.down_proj.weight"]))
    if not fault.get("no_final"):
        x = g.rms(x, "model.norm", sd["model.norm.weight"], eps, off)
    head = sd.get("lm_head.weight", embed)
    logits = g.linear(x, head, name="lm_head.weight_t")
    if fault.get("raw"):
        fault["raw"](g)
    return g.finish(path, logits, c.vocab_size, external)


def gpt(path, model, style="fused", half=False, edits=None, fault=None, external=None, prefix=""):
    """GPT-2 or BERT (masked language model) in ONNX."""
    fault = fault or {}
    c, sd = model.config, model.sd
    bert = model.family == "bert"
    g = Graph(style, half, edits=edits)
    d, H = config_of(c, "hidden_size", "n_embd"), config_of(c, "num_attention_heads", "n_head")
    hd = d // H
    eps = c.layer_norm_eps if bert else c.layer_norm_epsilon
    T = g.op("Gather", g.op("Shape", "input_ids"), g.const(np.asarray([1], np.int64)), axis=0)
    zero, axis = g.const(np.asarray([0], np.int64)), g.const(np.asarray([0], np.int64))
    wte, wpe = ("bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight") if bert else ("transformer.wte.weight", "transformer.wpe.weight")
    ln = lambda x, path: g.ln(x, path, sd[path + ".weight"], sd[path + ".bias"], eps)
    x = g.op("Add", g.op("Gather", g.f(sd[wte], wte), "input_ids", axis=0), g.op("Slice", g.f(sd[wpe], wpe), zero, T, axis))
    mask = None
    if bert:
        x = ln(g.op("Add", x, g.f(sd["bert.embeddings.token_type_embeddings.weight"][0])), "bert.embeddings.LayerNorm")
    else:
        mask = g.op("Slice", g.op("Slice", g.f(np.triu(np.full((512, 512), -1e4), 1), "causal"), zero, T, axis), zero, T, g.const(np.asarray([1], np.int64)))

    def attend(h, q, k, v, o):
        q, k, v = (g.heads(g.linear(h, *t), H, hd) for t in (q, k, v))
        return g.linear(g.attention(q, k, v, fault.get("scale", hd**-0.5), mask, d), *o)

    def gelu(h):
        return g.op("Gelu", h, approximate="none" if bert != bool(fault.get("act")) else "tanh")

    for i in range(model.layers):
        if bert:
            p = f"bert.encoder.layer.{i}."
            pair = lambda n: (sd[p + n + ".weight"], sd[p + n + ".bias"])
            a = attend(x, pair("attention.self.query"), pair("attention.self.key"), pair("attention.self.value"), pair("attention.output.dense"))
            x = ln(g.op("Add", x, a), p + "attention.output.LayerNorm")
            h = g.linear(gelu(g.linear(x, *pair("intermediate.dense"))), *pair("output.dense"))
            x = ln(g.op("Add", x, h), p + "output.LayerNorm")
        else:
            p = f"transformer.h.{i}."
            pair = lambda n: (sd[p + n + ".weight"].T, sd[p + n + ".bias"])
            h = ln(x, p + "ln_1")
            w, bb = pair("attn.c_attn")
            parts = [(w[j * d:(j + 1) * d], bb[j * d:(j + 1) * d]) for j in range(3)]
            x = g.op("Add", x, attend(h, *parts, pair("attn.c_proj")))
            h = ln(x, p + "ln_2")
            x = g.op("Add", x, g.linear(gelu(g.linear(h, *pair("mlp.c_fc"))), *pair("mlp.c_proj")))
    if bert:
        t = "cls.predictions."
        x = g.linear(x, sd[t + "transform.dense.weight"], sd[t + "transform.dense.bias"])
        x = ln(g.op("Gelu", x, approximate="none"), t + "transform.LayerNorm")
        logits = g.linear(x, sd[wte], sd[t + "bias"], name="decoder.weight_t")
    else:
        if not fault.get("no_final"):
            x = ln(x, "transformer.ln_f")
        logits = g.linear(x, sd[wte], name="lm_head.weight_t")
    if fault.get("raw"):
        fault["raw"](g)
    return g.finish(path, logits, c.vocab_size, external)


def onnx_logits(path, ids):
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    s = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(s.run(None, {"input_ids": ids.numpy()})[0]).double()
