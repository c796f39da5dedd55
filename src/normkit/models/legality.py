"""Which changes of a model keep what it computes, derived from its graph; with the reason for each that does not.

Each function returns None where the change is exact, else one sentence. The conditions: docs/explanation/folding.md.
"""

from __future__ import annotations

from normkit.models.graph import Attention, Graph, Linear, Norm, Table


def against_folding(graph: Graph, norm: Norm, *, untie: bool = False) -> str | None:
    """Why the gain or bias of a norm cannot leave it: something other than linear maps takes its output.

    Args:
        graph: Of the checkpoint.
        norm: One of its norms.
        untie: Whether a tied head gets a table of its own.
    """
    if norm.opaque:
        return f"its output goes to {norm.opaque}"
    if norm.gives in graph.returned or norm.name in graph.returned:
        return f"its output is what {graph.architecture} returns"
    for space in norm.writes:
        if graph.is_read(space):
            return f"its output is added to the {space}, where no gain can leave it and no linear map alone takes it"
    readers = graph.readers(norm.gives)
    if not readers:
        return "no linear map reads it"
    if not untie:
        for reader in readers:
            if reader.tied_to:
                return f"its reader {reader.name} shares the table {reader.tied_to}; {_untying(graph)}"
    return against_untying(graph) if any(reader.tied_to for reader in readers) else None


def against_untying(graph: Graph) -> str | None:
    """Why a head and its table cannot be separated."""
    tie = graph.family.tie
    return tie.fixed if graph.is_tied and tie is not None and tie.fixed else None


def against_centring(graph: Graph, space: str) -> str | None:
    """Why the writers of a space cannot be centred: something that reads the space sees the mean."""
    if space in graph.returned:
        return f"{graph.architecture} returns the {space}"
    for norm in graph.norms_of(space):
        if norm.kind == "rms":
            return f"{norm.name} is an RMSNorm, which sees the mean that centring would remove"
    for reader in graph.readers(space):
        return f"{reader.name} reads the {space} without a norm, and sees the mean"
    return None


def against_centring_writer(graph: Graph, writer: Linear | Table, *, untie: bool = False) -> str | None:
    """Why one writer cannot be centred although its space can."""
    if isinstance(writer, Linear):
        if writer.through:
            return (
                f"{writer.through} stands between {writer.name} and the sum, so that its mean cannot be taken out of it"
            )
        return None
    tied = [linear for linear in graph.linears if linear.tied_to == writer.name]
    if not tied:
        return None
    if not untie:
        return f"{tied[0].name} shares the table {writer.name}; {_untying(graph)}"
    return against_untying(graph)


def against_rms(graph: Graph, norm: Norm, *, untie: bool = False) -> str | None:
    """Why a LayerNorm cannot become an RMSNorm: what it reads may have a mean."""
    if norm.kind == "rms":
        return "it is one"
    if not norm.reads:
        return "what it normalizes is no sum of linear maps"
    if reason := against_centring(graph, norm.reads):
        return reason
    for other in graph.added(norm.reads):
        return f"the output of {other.name} is added to the {norm.reads}, and its gain and bias give it a mean"
    for writer in graph.writers(norm.reads):
        if reason := against_centring_writer(graph, writer, untie=untie):
            return reason
    return None if graph.writers(norm.reads) else f"nothing that is known writes to the {norm.reads}"


def against_value_fold(attention: Attention) -> str | None:
    """Why the bias of the values cannot pass through an attention into the bias behind it."""
    if attention.sinks is not None:
        return f"the sinks {attention.sinks} take part of each row, so that its weights do not sum to one"
    if attention.clip is not None:
        return f"{attention.clip} cuts off values with their bias"
    if attention.output.bias is None:
        return f"{attention.output.name} has no bias to take it"
    return None


def ignores_key_bias(graph: Graph, reader: Linear) -> bool:
    """Whether a bias of these keys would shift all scores of a query equally, which softmax does not see.

    Not if positions rotate the keys, the scores are capped, keys are clipped, or there is a sink.
    """
    users = [attention for attention in graph.attentions if attention.key == reader]
    return bool(users) and not any(user.rotary or user.softcap or user.sinks or user.clip for user in users)


def _untying(graph: Graph) -> str:
    return against_untying(graph) or "untying gives the head a table of its own"
