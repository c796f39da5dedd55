"""Group C, axes: which elements make a row. Along another axis than the features, or over another number of heads."""

from __future__ import annotations

from normkit.conventions.rows import Rows
from normkit.identification.passport import Passport
from normkit.measurement.facts import Site, place_of
from normkit.rules.facts import Facts
from normkit.rules.finding import Severity
from normkit.rules.rule import NO_BASELINE, Case, Outcome, Rule, hit
from normkit.text import counted

_SEVERAL = 2


@Rule(
    id="C1",
    title="Rows are along another axis",
    severity="error",
    threshold=(
        "other axes or groups than declared; or several tokens in a row where most norms take the features; or other "
        "ones than the same norm in all other modules of a class, which agree (warning)"
    ),
    source="OpenNMT-tf#6, tensorflow-addons#2142",
    why=(
        "A norm over the tokens makes each output depend on the length of the text and on its other tokens. Shapes "
        "fit, training runs, and results get worse as soon as lengths differ from those of training."
    ),
    remedy=(
        "normalize the last axis of (batch, token, feature)",
        "for a norm over channels, transpose to (batch, channel, token) before it and back after it",
    ),
    confirm='nk.identify(module, (2, 5, features)).readings["axes"]: which outputs one input element moves',
    follows=("C2",),
    looks_at=("norms", "other norms"),
)
def wrong_axis(facts: Facts) -> Outcome:
    """Other axes than declared; or over the tokens of a (B, T, D) stream whose other norms take its features."""
    width = facts.model.width
    along_features = [site for site in facts.sites if site.spec.rows.num_trailing == 1 and site.input.features == width]
    over_tokens = [site for site in facts.sites if spans_tokens(site, facts)]
    cases: list[Case] = []
    for site in facts.sites:
        seen, meant = site.spec.rows, _declared_rows(site, facts)
        if meant is not None:
            if seen != meant:
                cases.append(Case(site.path, "error", f"a row is {seen.words}, declared is {meant.words}"))
        elif site in over_tokens and len(along_features) > len(over_tokens) and not facts.is_stock(site.path):
            words = f"a row is {seen.words}; that of {counted(len(along_features), 'other norm')} is "
            cases.append(Case(site.path, "error", f"{words}the last axis, the {width} features of the stream"))
    known = {case.path for case in cases}
    for odd in facts.odd_rows:
        path = odd.path.partition(":")[0]
        if odd.path not in known and facts.declared(odd.path) is None and not facts.is_stock(path):
            words = f"a row is {odd.rows.words}; that of the same norm in {odd.others} other modules of its class is "
            # A norm may call the function that makes the rows.
            cases.append(Case(path, "warning", f"{words}{odd.usual.words}"))
    for other in facts.others:
        # Rows share statistics in a way that no spec describes, as over earlier positions.
        coupled, spec = other.passport.readings.get("coupled axes"), facts.intended_at(other.path)
        shared = over_time(other.passport) if coupled is None else coupled.evidence[0]
        if shared is not None and spec is not None and not facts.is_stock(other.path):
            words = f"{shared}; {facts.source_at(other.path)} says that a row is {spec.rows.words}"
            cases.append(Case(other.path, "error", words))
    return hit(cases, f"{counted(len(cases), 'norm')} over other axes or groups than meant")


def over_time(passport: Passport) -> str | None:
    """The influence of one position on others, for a norm that no spec describes; None if there is none."""
    reading = passport.readings.get("time")
    if reading is None or reading.value is None or passport.spec is not None:
        return None
    lines = zip(reading.value, reading.evidence, strict=True)
    return next((line for axis, line in lines if axis["coupling"] != "none"), None)


def _declared_rows(site: Site, facts: Facts) -> Rows | None:
    if (declared := facts.declared(site.path)) is not None:
        return declared.spec.rows
    if facts.intent is None or (stock := facts.intent.specs.get(site.path)) is None or facts.is_stock(site.path):
        return None
    # A stock norm that was identified, on one row, tells trailing features and nothing else.
    is_known = stock.rows.num_trailing == 1 or site.path in facts.intent.declared
    return stock.rows if is_known else None


def spans_tokens(site: Site, facts: Facts) -> bool:
    """Its input is (B, T, D), and a row holds several tokens."""
    passport = facts.passports.get(site.path)
    shape = () if passport is None else passport.shape
    if len(shape) != 3 or shape[-1] != facts.model.width:
        return False
    rows = site.spec.rows
    is_sample = rows.are_samples and (rows.groups == 1 or rows.channel_axis == -1)
    return rows.are_places or rows.num_trailing == 2 or is_sample


@Rule(
    id="C2",
    title="Query or key norms span another number of heads",
    severity="error",
    threshold="features of a row against those declared: one head, or all heads together",
    source="vllm-project/vllm#16311, OLMo#521",
    why=(
        "Normalized head by head, every head has queries of one length; normalized over all heads, only their sum "
        "is fixed. Weights trained with one form lose accuracy with the other: 4.5 points of MMLU-Pro in one port. "
        "Both are in use, so only the model's own declaration tells which is right."
    ),
    remedy=(
        "reshape to (..., heads, head_dim) before the norm, or after it, as the reference model does",
        "if this form is meant, write it into the intent file",
    ),
    confirm="the length of the norm's weight in the checkpoint: head_dim, or heads * head_dim",
)
def mixed_heads(facts: Facts) -> Outcome:
    """Query and key norms over another number of heads than declared."""
    cases: list[Case] = []
    undeclared = False
    for site in facts.sites:
        declared = facts.declared(site.path)
        if "query-key" not in (site.role, declared.role if declared is not None else "") and site.role != "unknown":
            continue
        # The other axis of a row is then tokens, not heads.
        if site.spec.rows.are_channels or spans_tokens(site, facts):
            continue
        n, meant = site.input.features, declared.features if declared is not None else None
        if meant is None and facts.intent is not None:
            meant = facts.intent.features.get(site.path)
        if meant is None:
            undeclared |= site.role == "query-key" and not facts.is_wired_as_stock(site.path)
        elif n > meant and n % meant == 0:
            words = f"a row holds {n // meant} heads of {meant} features, declared is one"
            cases.append(Case(site.path, "error", words))
        elif n < meant and meant % n == 0:
            words = f"a row holds {n} features, declared are {meant}, {meant // n} times that"
            cases.append(Case(site.path, "error", words))
    if not cases and undeclared:
        return NO_BASELINE
    return hit(cases, f"{counted(len(cases), 'norm')} of queries or keys over another number of heads than declared")


@Rule(
    id="C18",
    title="Groups of one channel, or one group of all",
    severity="warning",
    threshold=(
        "a group norm whose groups are single channels, or whose only group is the whole sample, beside at least two "
        "group norms of the same name that have several groups of several channels, and other numbers of both "
        "(warning); else a note"
    ),
    source="Wu & He 2018, arXiv:1803.08494, section 3.1: one group is layer norm, as many as channels instance norm",
    why=(
        "A number of groups that was written for another width splits otherwise: 32 groups of 32 channels are an "
        "instance norm, which forgets how strong a channel is; a single group is a layer norm over the sample. Any "
        "number that divides the channels is accepted."
    ),
    remedy=(
        "give the number of groups that the config says, or fix the channels of a group in place of the groups",
        "if it is meant so, write it into the intent file",
    ),
    confirm="module.num_groups beside module.num_channels",
    looks_at=("norms",),
)
def odd_groups(facts: Facts) -> Outcome:
    """Group norms by name that are instance norms or layer norms by what they do."""
    named = [
        site
        for site in facts.sites
        if "group" in site.class_name.lower() and site.spec.rows.are_samples and site.gain is not None
    ]
    kinds = {site.path: (site.spec.rows.groups, site.gain.size) for site in named if site.gain is not None}
    odd = {path: groups for path, (groups, channels) in kinds.items() if channels > 1 and groups in (1, channels)}
    # C1 judges those of which the config or an intent file says what is meant.
    meant = facts.intent.declared if facts.intent is not None else ()
    known = {path for path in odd if facts.declared(path) is not None or path in meant}
    cases = []
    for path, groups in odd.items():
        channels = kinds[path][1]
        like = [kinds[other] for other in kinds if other not in odd and place_of(other) == place_of(path)]
        # One number for all norms, of groups or of the channels of one, splits the narrow ones so by design.
        is_by_number = any(groups == other or channels * other == groups * all_of for other, all_of in like)
        words = f"{counted(groups, 'group')} of {counted(channels // groups, 'channel')}"
        if len(like) >= _SEVERAL and not is_by_number:
            words += f"; {counted(len(like), 'other norm')} of its name have several groups of several"
        if path not in known:
            severity: Severity = "warning" if len(like) >= _SEVERAL and not is_by_number else "note"
            cases.append(Case(path, severity, words))
    return hit(cases, f"{len(cases)} of {counted(len(kinds), 'group norm')} with one group, or one channel a group")


RULES = (wrong_axis, mixed_heads, odd_groups)
"""The rules of this file."""
