"""Two runs compared: the noise between two runs of the same code, and a verdict in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from attn_pass.measuring.timing import percentile_10

LEAST_NOISE = 0.03  # two runs of the same code are never nearer than this says
TOO_NOISY = 0.25  # where the same code differs by more, nothing can be told


def apart(ratios: Sequence[float]) -> float:
    """By how much measurements of the same code differ, as a share: by medians or percentiles, whichever says more."""
    return max(*(abs(math.log(ratio)) for ratio in ratios), LEAST_NOISE)


def noise_of(samples: Sequence[float], again: Sequence[float]) -> float:
    """The same of the samples of two runs of the same code: by medians, and by 10th percentiles."""
    medians = statistics.median(samples) / statistics.median(again)
    return apart((medians, percentile_10(samples) / percentile_10(again)))


def verdict(median: float, p10: float, around: float) -> str:
    """In words, of the ratios of medians and of 10th percentiles: within the noise, or where they differ, the same.

    Some code has two speeds, from call to call: then one of the two ratios says so, and the other does not.
    """
    if math.isnan(around):
        return "no A/A row"
    if min(median, p10) > math.exp(around):
        return "faster"
    if max(median, p10) < math.exp(-around):
        return "slower"
    return "same"
