"""Quantiles of a histogram, as Prometheus' `histogram_quantile` gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping


def histogram_quantile(quantile: float, buckets: Mapping[float, float]) -> float | None:
    """The value below which the share `quantile` of the observations lies; None without any.

    `buckets` maps upper bounds to cumulative counts, +Inf included. Within a bucket observations
    are taken as spread evenly, in the lowest from 0 on (where its bound is positive); what lies
    beyond the last finite bound is given as that bound. Counts taken from several pages at
    slightly different moments may shrink from one bound to the next: they are taken as equal.
    """
    bounds = sorted(buckets)
    if not bounds or not math.isinf(bounds[-1]):
        return None
    counts: list[float] = []
    for bound in bounds:
        counts.append(max(buckets[bound], counts[-1] if counts else 0.0))
    if counts[-1] <= 0:
        return None
    rank = quantile * counts[-1]
    index = next(place for place, count in enumerate(counts) if count >= rank)
    if math.isinf(bounds[index]):
        return bounds[index - 1] if index > 0 else None
    if index == 0 and bounds[0] <= 0:
        return bounds[0]
    lower = bounds[index - 1] if index > 0 else 0.0
    below = counts[index - 1] if index > 0 else 0.0
    inside = counts[index] - below
    share = (rank - below) / inside if inside > 0 else 1.0
    return lower + (bounds[index] - lower) * share
