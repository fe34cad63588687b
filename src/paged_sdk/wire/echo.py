"""Put prompts before the texts that continue them, with the logprobs of their tokens."""

from __future__ import annotations

from attrs import evolve, frozen

from paged_sdk import CompletionChoice, InvalidRequestError, Logprobs, Model, TokenLogprob

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
    async def of(cls, model: Model, prompt: str | list[int], name: str = "prompt") -> Echo:
        """Look up a prompt's tokens, or their text.

        A token that a tokenizer puts before every text has no characters in it.

        :param name: what errors call it
        :raises InvalidRequestError: it is no Unicode, or has a token that is outside the vocabulary
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
        """Return a choice of the prompt with it before the text, and the logprobs of its tokens, which the choice has,
        before those of the text. That of the first token is 0.
        """
        first = self.first
        of_rest: tuple[TokenLogprob, ...] = ()
        if choice.prompt_logprobs is not None:
            of_rest = choice.prompt_logprobs.content
            rest, data = b"".join(bytes(token.bytes) for token in of_rest), self.text.encode()
            if data.endswith(rest):  # a token that ends amid a character has no text to look for
                first = evolve(first, bytes=tuple(data.removesuffix(rest)))
        of_text = () if choice.logprobs is None else choice.logprobs.content
        logprobs = Logprobs(content=(first, *of_rest, *of_text))
        return evolve(choice, text=self.text + choice.text, logprobs=logprobs, prompt_logprobs=None)
