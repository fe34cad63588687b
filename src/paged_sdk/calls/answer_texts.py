"""Makes what turns the output of a request into text: detokenizers, and parsers of answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Self

from attrs import frozen

from paged_sdk.calls.responses import ResponseParts
from paged_sdk.chat.answer import AnswerParser
from paged_sdk.chat.output_text import OutputText
from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.chat.token_healing import EncodedPrompt
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.types.answer_form import AnswerForm
from paged_sdk.types.request_options import RequestOptions

__all__ = ["AnswerTexts"]


@frozen(kw_only=True, eq=False)
class AnswerTexts:
    """Holds the detokenizers and parsers of a request's choices.

    :ivar continues_prompt: whether the text continues the prompt's, so that a leading space belongs to it
    :ivar kept_special_ids: special tokens that appear in the text, for the parsers
    :ivar texts: per prompt: one detokenizer per choice
    :ivar parsers: one parser per choice; empty: the text is not parsed
    """

    processor: TextProcessor
    continues_prompt: bool
    kept_special_ids: frozenset[int]
    texts: Sequence[Sequence[OutputText]]
    parsers: Sequence[AnswerParser]

    @classmethod
    def of(
        cls, processor: TextProcessor, options: RequestOptions, samplings: Sequence[SamplingParams], *, is_chat: bool
    ) -> Self:
        """Make the detokenizers and parsers of a request.

        :param samplings: the sampling parameters of each prompt
        """
        form = options.answer_form
        # In output for a parser every byte counts, a leading space too, also in a chat's answer.
        continues_prompt = not is_chat or options.continue_final_message or not form.is_prose
        tools = {tool.name: tool.parameters for tool in options.shown_tools} or None
        is_parsed = is_chat and form is not AnswerForm.CONSTRAINED
        answers = processor.answers.of_form(form)
        if options.continue_final_message:
            answers = answers.begun
        kept = processor.kept_special_ids(answers, with_tools=tools is not None) if is_parsed else frozenset()
        texts = [
            [
                OutputText(processor.tokenizer, sampling.stop, continues_prompt=continues_prompt, kept=kept)
                for _ in range(sampling.n_choices)
            ]
            for sampling in samplings
        ]
        num_choices = sum(map(len, texts))
        parsers = [answers.parser(tools) for _ in range(num_choices if is_parsed else 0)]
        return cls(
            processor=processor,
            continues_prompt=continues_prompt,
            kept_special_ids=kept,
            texts=texts,
            parsers=[parser for parser in parsers if parser is not None],
        )

    def parts(self, *, sorts_logprobs: bool) -> ResponseParts:
        """Return the parts of a response, still empty.

        :param sorts_logprobs: whether to find the logprobs of the content's tokens
        """
        return ResponseParts(
            self.processor.tokenizer,
            list(chain.from_iterable(self.texts)),
            self.parsers,
            num_prompts=len(self.texts),
            sorts_logprobs=sorts_logprobs,
        )

    def note_prompts(self, prompts: Sequence[EncodedPrompt]) -> None:
        """Tell detokenizers what of the prompts is generated again, and parsers how the prompt ends."""
        for prompt, texts in zip(prompts, self.texts, strict=True):
            if prompt.healing is not None:
                for text in texts:
                    text.leave_out(len(prompt.healing.data))
        if self.parsers:
            end = self.processor.prompt_end(prompts[0].token_ids)
            for parser in self.parsers:
                parser.note_prompt(end)
