"""A synthetic inspection with as many norms a block, and as long names, as Gemma 3 has, over as many decades."""

import dataclasses

# The names and roles of the norms in a block.
_NORMS = {
    "input_layernorm": "pre",
    "self_attn.q_norm": "query-key",
    "self_attn.k_norm": "query-key",
    "post_attention_layernorm": "output",
    "pre_feedforward_layernorm": "pre",
    "post_feedforward_layernorm": "output",
}


def renamed(base):
    """The inspection of a pre-norm model with six norms a block in place of two."""
    first, final = base.sites[0], base.sites[-1]
    sites = []
    for block in base.blocks:
        for place, (name, role) in enumerate(_NORMS.items()):
            rms = 0.116 * 1.7**block.index * (1 + place)
            entering = dataclasses.replace(
                first.input, rms_quantiles=(rms / 1.6, rms, rms * 1.6), mean_energy=0.0003 * (1 + place + block.index)
            )
            quantiles = tuple(9.0 * block.index * step + 30.0 * place + 0.5 for step in (-2, -1, -0.5, 0, 0.5, 1, 60))
            gain = dataclasses.replace(first.gain, quantiles=quantiles, outliers=((400, quantiles[-1]),))
            path = f"model.layers.{block.index}.{name}"
            ours = {"path": path, "order": len(sites), "block": block.index, "role": role}
            sites.append(dataclasses.replace(first, input=entering, gain=gain, **ours))
    sites.append(dataclasses.replace(final, path="model.norm", order=len(sites)))
    blocks = (dataclasses.replace(block, path=f"model.layers.{block.index}") for block in base.blocks)
    calls = (dataclasses.replace(call, path=f"model.layers.{call.block}.self_attn") for call in base.attentions)
    keys = (dataclasses.replace(each, path=f"model.layers.{each.block}.self_attn") for each in base.selections)
    changed = {"sites": tuple(sites), "blocks": tuple(blocks), "attentions": tuple(calls), "selections": tuple(keys)}
    return dataclasses.replace(base, final_norm="model.norm", **changed)
