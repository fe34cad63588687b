"""Adds up the usage of several answers."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from paged_sdk import CompletionTokensDetails, PromptTokensDetails, Usage

__all__ = ["summed"]


def summed(usages: Sequence[Usage]) -> Usage:
    """Return the total usage of answers. Times until the first token are those of the first answer."""
    if len(usages) == 1:
        return usages[0]
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    prompt_time = sum(usage.total_prompt_time_sec for usage in usages)
    completion_time = sum(usage.total_completion_time_sec for usage in usages)
    return evolve(
        usages[0],
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        avg_tok_per_sec=_rate(prompt + completion, prompt_time + completion_time),
        avg_prompt_tok_per_sec=_rate(prompt, prompt_time),
        avg_compl_tok_per_sec=_rate(completion, completion_time),
        total_time_sec=sum(usage.total_time_sec for usage in usages),
        total_prompt_time_sec=prompt_time,
        total_completion_time_sec=completion_time,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
        ),
        completion_tokens_details=CompletionTokensDetails.total(usage.completion_tokens_details for usage in usages),
    )


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
