"""The formula that most similar norms of a model have, for a norm that no config and no file declares."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from normkit.measurement.facts import Site
from normkit.spec import NormSpec

# Fewer that agree may do so by chance; where more differ, a model has several kinds of norm.
_FEWEST, _MOST = 3, 0.75


@dataclass(frozen=True, kw_only=True)
class Majority:
    """The formula of most similar norms, which this norm does not have."""

    spec: NormSpec
    agreeing: int
    """Number of similar norms with this formula."""
    others: int

    @property
    def words(self) -> str:
        """The source of the formula, in words."""
        number = f"{self.agreeing}" if self.agreeing == self.others else f"{self.agreeing} of {self.others}"
        return f"the majority of the norms like it ({number})"


def place_of(path: str) -> str:
    """The path with its numbers left out: the same for norms of one name in all blocks."""
    return re.sub(r"\d+", "", path)


def majorities(sites: Collection[Site], unrecognised: Iterable[str], open_at: Collection[str]) -> dict[str, Majority]:
    """The norms that differ from nearly all norms like them, by path, with what those compute.

    The norms like one have its name in the other blocks; where these are under three, they have the role, the width and
    the class of itself or of one of these.

    Args:
        sites: Norms whose specs are known.
        unrecognised: Paths of norms that no spec describes.
        open_at: Paths of sites of whose spec something could not be decided: they are no measure for others.
    """
    by_path: Mapping[str, Site] = {site.path: site for site in sites}
    found = {}
    for path in (*by_path, *unrecognised):
        own = by_path.get(path)
        named = [site for site in sites if site.path != path and place_of(site.path) == place_of(path)]
        like = named
        if len(named) < _FEWEST:
            kinds = {_kind(site) for site in (*named, *([] if own is None else [own]))}
            like = [site for site in sites if site.path != path and _kind(site) in kinds]
        counts = Counter(site.spec for site in like if site.path not in open_at)
        spec, agreeing = next(iter(counts.most_common(1)), (None, 0))
        if spec is None or agreeing < max(_FEWEST, _MOST * len(like)):
            continue
        # Two of one place that agree are so by design.
        if own is None or (own.spec != spec and own.spec not in {site.spec for site in named}):
            found[path] = Majority(spec=spec, agreeing=agreeing, others=len(like))
    return found


def _kind(site: Site) -> tuple[str, int, str]:
    return site.role, site.input.features, site.class_name
