"""Prepends prompts, with the logprobs of their tokens, to their completions (``echo`` with ``logprobs``)."""

from __future__ import annotations

from attrs import evolve, frozen

from paged_sdk import CompletionChoice, InvalidRequestError, Logprobs, Model, TokenLogprob

__all__ = ["Echo"]


@frozen
class Echo:
    """Holds a prompt that is prepended to each of its completions.

    :ivar token_ids: the prompt's tokens
    :ivar text: their text
    :ivar first: the first token, which has no logprob because nothing precedes it: 0 stands in
    """

    token_ids: list[int]
    text: str
    first: TokenLogprob

    @classmethod
    async def of(cls, model: Model, prompt: str | list[int], name: str = "prompt") -> Echo:
        """Tokenize a prompt given as text, or decode one given as token ids.

        A BOS token that the tokenizer adds has no characters of the text: its ``bytes`` are empty.

        :param name: the prompt's name in errors
        :raises InvalidRequestError: a text is not valid Unicode, or a token id is outside the vocabulary
        """
        try:
            if isinstance(prompt, str):
                token_ids, text = await model.tokenize(prompt, add_special_tokens=True), prompt
            else:
                token_ids, text = prompt, await model.detokenize(prompt, skip_special_tokens=False)
        except InvalidRequestError as error:
            raise InvalidRequestError.of(name, error.value, error.allowed) from None
        token = await model.detokenize(token_ids[:1], skip_special_tokens=False)
        data = token.encode() if text.startswith(token) else b""
        first = TokenLogprob(token=token, token_id=next(iter(token_ids), -1), logprob=0.0, bytes=tuple(data))
        return cls(token_ids, text, first)

    def before(self, choice: CompletionChoice) -> CompletionChoice:
        """Return a choice with the prompt prepended to its text, and ``prompt_logprobs`` prepended to its logprobs. The
        first token's logprob is 0.
        """
        first = self.first
        of_rest: tuple[TokenLogprob, ...] = ()
        if choice.prompt_logprobs is not None:
            of_rest = choice.prompt_logprobs.content
            rest, data = b"".join(bytes(token.bytes) for token in of_rest), self.text.encode()
            if data.endswith(rest):  # by bytes: a token that ends within a character has no text
                first = evolve(first, bytes=tuple(data.removesuffix(rest)))
        of_text = () if choice.logprobs is None else choice.logprobs.content
        logprobs = Logprobs(content=(first, *of_rest, *of_text))
        return evolve(choice, text=self.text + choice.text, logprobs=logprobs, prompt_logprobs=None)
