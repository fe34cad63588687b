"""Put prompts before the texts that continue them, with the logprobs of their tokens."""

from __future__ import annotations

from attrs import evolve, frozen

from paged_sdk import CompletionResponse, Logprobs, Model, TokenLogprob

__all__ = ["Echo"]


@frozen
class Echo:
    """Is a prompt, to be shown before each of its texts.

    :ivar token_ids: its tokens
    :ivar text: their text
    :ivar first: the first of them, before which there is nothing that it could have a logprob after
    """

    token_ids: list[int]
    text: str
    first: TokenLogprob

    @classmethod
    async def of(cls, model: Model, prompt: str | list[int]) -> Echo:
        """Look up a prompt's tokens, or their text.

        A token that a tokenizer puts before every text has no characters in it.

        :raises InvalidRequestError: it has no tokens, or one that is outside the vocabulary
        """
        if isinstance(prompt, str):
            token_ids, text = await model.tokenize(prompt, add_special_tokens=True), prompt
        else:
            token_ids, text = prompt, await model.detokenize(prompt, skip_special_tokens=False)
        token = await model.detokenize(token_ids[:1], skip_special_tokens=False)
        data = token.encode() if text.startswith(token) else b""
        first = TokenLogprob(token=token, token_id=next(iter(token_ids), -1), logprob=0.0, bytes=tuple(data))
        return cls(token_ids, text, first)

    def before(self, answer: CompletionResponse) -> CompletionResponse:
        """Return an answer whose texts begin with the prompt, and their logprobs with those of its tokens, which it
        holds. That of the first token is 0.
        """
        assert answer.prompt_logprobs is not None
        of_prompt = (self.first, *answer.prompt_logprobs.content)
        choices = [
            evolve(
                choice,
                text=self.text + choice.text,
                logprobs=Logprobs(content=of_prompt + (() if choice.logprobs is None else choice.logprobs.content)),
            )
            for choice in answer.choices
        ]
        return evolve(answer, choices=tuple(choices), prompt_logprobs=None)
