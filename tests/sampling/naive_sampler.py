"""Sample one row in the plainest way, in float64 and from the settings' descriptions, as the sampler's reference."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from paged_sdk.config.sampling import DryParams
from paged_sdk.sampling.row import SampleRow

__all__ = ["Distribution", "naive_distribution", "naive_dry", "naive_process", "naive_uniform"]


def naive_process(
    logits: npt.NDArray[np.float64], row: SampleRow, breakers: Collection[tuple[int, ...]]
) -> npt.NDArray[np.float64]:
    """Apply bias, bans, penalties and DRY."""
    params = row.request.sampling
    scores = logits.copy()
    for token, bias in (params.logits_bias or {}).items():
        scores[token] += bias
    output = list(row.token_ids[row.num_prompt_tokens :])
    if len(output) < params.min_tokens:
        for token in row.request.stop_token_ids:
            scores[token] = -np.inf
    for token in set(row.token_ids):
        penalty = params.repetition_penalty or 1.0
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.dry_params is not None and params.dry_params.multiplier:
        for token, amount in naive_dry(row.token_ids, params.dry_params, breakers).items():
            scores[token] -= amount
    return scores


def naive_dry(tokens: Sequence[int], params: DryParams, breakers: Collection[tuple[int, ...]]) -> dict[int, float]:
    """Return, for every token, the longest tail of the text that it followed before and that no breaker cuts."""
    ends = [end for end in range(len(tokens)) for breaker in breakers if ends_with(tokens[: end + 1], breaker)]
    unbroken = len(tokens) - 1 - max(ends, default=-1)
    longest: dict[int, int] = {}
    for position in range(1, len(tokens)):
        length = 0
        while length < min(position, unbroken) and tokens[position - 1 - length] == tokens[-1 - length]:
            length += 1
        if length and (tokens[position],) not in breakers:
            longest[tokens[position]] = max(longest.get(tokens[position], 0), length)
    return {
        token: params.multiplier * params.base ** (length - params.allowed_length)
        for token, length in longest.items()
        if length >= params.allowed_length
    }


def ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return len(tokens) >= len(end) and list(tokens[len(tokens) - len(end) :]) == list(end)


@frozen(eq=False)
class Distribution:
    """Holds what temperature and truncation leave.

    :ivar tokens: the kept tokens in the documented order of the inverse CDF
    :ivar probabilities: their probabilities, which add up to 1
    :ivar margin: how near any decision was to the opposite one
    """

    tokens: list[int]
    probabilities: npt.NDArray[np.float64]
    margin: float

    def draw(self, uniform: float) -> tuple[int, float]:
        """Return the token at that quantile, and how far it is from the next."""
        cumulative = self.probabilities.cumsum()
        index = int((cumulative <= uniform).sum())
        return self.tokens[min(index, len(self.tokens) - 1)], float(np.abs(cumulative - uniform).min())


def naive_distribution(scores: npt.NDArray[np.float64], row: SampleRow) -> Distribution:
    """Apply temperature, top-k, top-p and min-p."""
    params = row.request.sampling
    vocab_size = len(scores)
    temperature = 1.0 if params.temperature is None else params.temperature
    order = np.lexsort((np.arange(vocab_size), -scores))
    weights = np.exp((scores[order] - scores[order[0]]) / temperature)
    if params.top_k is not None:
        weights = weights[: params.top_k]
    weights /= weights.sum()
    margin = 1.0
    keep = np.ones(len(weights), bool)
    if params.top_p is not None and params.top_p < 1:
        before = np.concatenate([[0.0], weights.cumsum()[:-1]])
        keep &= before < params.top_p
        margin = min(margin, float(np.abs(before - params.top_p).min()))
    if params.min_p:
        ratio = weights / weights[0]
        keep &= ratio >= params.min_p
        margin = min(margin, float(np.abs(ratio[ratio < 1] - params.min_p).min(initial=1.0)))
    tokens, weights = order[: len(weights)][keep], weights[keep]
    is_sorted = (params.top_k or vocab_size) < vocab_size or (params.top_p or 1.0) < 1
    if not is_sorted:
        by_id = np.argsort(tokens)
        tokens, weights = tokens[by_id], weights[by_id]
    return Distribution(tokens.tolist(), weights / weights.sum(), margin)


def naive_uniform(seed: int, choice_index: int, position: int) -> float:
    """Compute SplitMix64 in Python's own integers."""

    def mix(value: int) -> int:
        value = value % 2**64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
        return value ^ (value >> 31)

    gamma = 0x9E3779B97F4A7C15
    start = mix(mix(seed % (2**64 - 59) + gamma) + gamma * (choice_index + 1))
    return (mix(start + gamma * (position + 1)) >> 11) / 2**53
