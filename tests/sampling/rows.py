"""Make rows to sample, in a line each."""

from __future__ import annotations

from collections.abc import Sequence

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.constraints.compiler import GrammarCompiler
from paged_sdk.constraints.grammar import Grammar
from paged_sdk.constraints.vocabulary import Vocabulary
from paged_sdk.sampling.row import SampleRow
from paged_sdk.scheduler.request import Request
from paged_sdk.types.constraint import Constraint

__all__ = ["EOS", "encode", "make_grammar", "make_request", "make_row"]

EOS = frozenset({2})


def encode(text: str) -> list[int]:
    """Encode characters: 'a' is 1, newline, colon, quote and star are 3 to 6."""
    return [{"a": 1, "\n": 3, ":": 4, '"': 5, "*": 6}[character] for character in text]


def make_request(
    params: SamplingParams, prompt: Sequence[int] = (7, 8), stop_token_ids: frozenset[int] = EOS
) -> Request:
    return Request(
        request_id="r", prompt_token_ids=list(prompt), sampling=params, max_tokens=100, stop_token_ids=stop_token_ids
    )


def make_grammar(constraint: Constraint, tokens: Sequence[bytes]) -> Grammar:
    """Compile a constraint for a vocabulary in which token 2 ends a text.

    :param tokens: the bytes of each token
    """
    vocabulary = Vocabulary(tokens=tokens, special_ids=[2], end_ids=(2,), encode=lambda text: [])
    return GrammarCompiler(lambda: vocabulary).compile(constraint)


def make_row(
    request: Request | SamplingParams,
    output: Sequence[int] = (),
    *,
    prompt: Sequence[int] = (7, 8),
    seq_id: int = 0,
    choice_index: int = 0,
    num_samples: int = 1,
) -> SampleRow:
    """Make a row of a request, or of a request of its own.

    :param prompt: the prompt of its own request
    """
    if isinstance(request, SamplingParams):
        request = make_request(request, prompt)
    tokens = [*request.prompt_token_ids, *output]
    return SampleRow(seq_id, request, tokens, len(tokens), choice_index, num_samples)
