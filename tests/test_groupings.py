"""However a model's tokens are grouped on their way - one by one, some at a time, all at once to a client that reads
slowly - every face says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import anyio
from attrs import frozen
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faces import data_of, of_blocks, of_chat_events, of_drop_in, of_items, of_rounds, read_off
from grouped_stream import Engine, Said, Slices, stream_of, streamed
from paged_sdk import CompletionOptions, CompletionResponse
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.types.response import FinishReason
from paged_sdk.wire.completions import CompletionCall

LOOK: Final = '{"name": "look", "arguments": {"at": "Łódź", "for": 3}}'
WAIT: Final = '{"name": "wait", "arguments": {}}'

# What each template is known by, and what its models write.
ANSWERS: Final = {
    "{% if tools %}<tool_call></tool_call>{% endif %}<think></think>": [
        "<think>Hm 🦩.</think>",
        "<think>",
        "Hello, Łódź. ",
        " \n",
        f"<tool_call>\n{LOOK}\n</tool_call>",
        f"<tool_call>{WAIT}</tool_call>",
        f"<tool_call>[{LOOK}, {WAIT}]</tool_call>",
        f"<tool_call>[{LOOK}, {WAIT}, 3]</tool_call>",
        f"<tool_call>{LOOK[:-9]}</tool_call>",
        f"<tool_call>{LOOK} and</tool_call>",
    ],
    "{{ '[TOOL_CALLS]' }}[THINK][/THINK]": [
        "[THINK]Hm.[/THINK]",
        "Hello, Łódź. ",
        f"[TOOL_CALLS] [{LOOK}, {WAIT}]",
        f"[TOOL_CALLS] [{LOOK}, {{}}]",
        '[TOOL_CALLS]look[ARGS]{"for": 12}',
        '[TOOL_CALLS]look[ARGS]{"for": 12',
    ],
    "<|start|>assistant<|channel|>analysis<|message|>": [
        "<|channel|>analysis<|message|>Hm.<|end|>",
        "<|start|>assistant<|channel|>analysis<|message|>Hm, hm.<|end|>",
        "<|start|>assistant<|channel|>final<|message|>Hello 🦩.<|end|>",
        '<|start|>assistant<|channel|>commentary to=functions.look<|message|>{"at": "a", "for": 4}<|call|>',
        '<|start|>assistant<|channel|>commentary to=functions.look<|message|>{"at": "a", "for"<|call|>',
    ],
    """<|start_header_id|>{{- '"parameters": ' }}""": [
        '{"name": "wait", "parameters": {}}; {"name": "look", "parameters": {"at": "a"}}',
        "[look(at='x', for=1), wait()]",
        "[look(at='x', for=open), wait()]",
        "Hello.",
        "<|python_tag|>look.call(at='x')",
    ],
    "{{ messages[0].content }}": ["Hello, Łódź. ", " \n", f"<tool_call>{WAIT}</tool_call>", "<think>Hm 🦩.</think>"],
}


def all_of(engine: Engine, template: str | None) -> tuple[list[Any], Any]:
    """Return all chunks of a stream, and the response in the end."""
    found: list[tuple[list[Any], Any]] = []

    async def run() -> None:  # asyncio spells out what this returns, which took a tenth of these tests
        found.append(await streamed(stream_of(engine, template), engine))

    anyio.run(run)
    return found[0]


@frozen
class Scene:
    """Is what models say, and how it is asked for.

    :ivar said: the text of each choice, and why it ends
    """

    template: str
    said: tuple[tuple[str, FinishReason], ...]
    stops: tuple[str, ...] = ()
    has_logprobs: bool = False
    has_one_call: bool = False

    def read(self, sizes: Sequence[int]) -> object:
        """Return what the faces make of it, each of which says all of it."""
        engine = Engine([Said(*each) for each in self.said], sizes, self.stops, self.has_logprobs)
        chunks, whole = all_of(engine, self.template)
        found = [read_off(chunks, whole), of_chat_events(chunks, whole, self.has_one_call)]
        of_drop_in(chunks, whole)
        if len(self.said) == 1:
            found += [face(chunks, whole, self.has_one_call) for face in (of_items, of_blocks)]
            found.append(of_rounds(chunks, whole))
        return found


SIZES: Final = st.lists(st.integers(0, 30), max_size=12)
ENDS: Final[list[FinishReason]] = ["stop", "length"]


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    template = draw(st.sampled_from(sorted(ANSWERS)))
    texts = st.lists(st.sampled_from(ANSWERS[template]), min_size=1, max_size=4).map("".join)
    said = draw(st.lists(st.tuples(texts, st.sampled_from(ENDS)), min_size=1, max_size=2))
    stops = draw(st.sampled_from([(), ("arg", " hm")]))
    return Scene(template, tuple(said), stops, draw(st.booleans()), draw(st.booleans()))


HERMES, MISTRAL, HARMONY, LLAMA, PLAIN = ANSWERS


@settings(deadline=None, derandomize=True, max_examples=80)
@given(scenes(), SIZES)
# The rest of a call's arguments, more text and the next call come at once.
@example(Scene(HERMES, ((f"<tool_call>{LOOK[:-9]}</tool_call> and <tool_call>{WAIT}</tool_call>", "stop"),)), [60])
# Thoughts come together with the end of a call before them.
@example(Scene(HARMONY, (("".join(ANSWERS[HARMONY][place] for place in (3, 1, 2)), "stop"),)), [80])
# It is known of two calls together that they are some; then there is a third.
@example(Scene(HERMES, ((f"<tool_call>[{LOOK}, {WAIT}]</tool_call><tool_call>{LOOK}</tool_call>", "stop"),)), [100])
# Of several calls one is asked for, and the first one turns out to be a text.
@example(
    Scene(LLAMA, (("[look(at='x', for=open), wait()]<|python_tag|>look.call(at='x')", "stop"),), has_one_call=True), []
)
# A thought is all there is.
@example(Scene(HERMES, (("<think>Hm", "length"),), has_logprobs=True), [])
# Texts before, between and after calls, and one that only looked like a call.
@example(
    Scene(
        HERMES,
        ((f"<think>Hm.</think> 🦩 <tool_call>{LOOK}</tool_call> Łó <tool_call>{WAIT} and</tool_call> so", "stop"),),
        has_logprobs=True,
    ),
    [7, 3],
)
def test_faces_say_the_same_of_tokens_in_any_grouping(scene: Scene, sizes: list[int]) -> None:
    one_by_one = scene.read([1] * 400)
    assert scene.read(sizes) == one_by_one
    assert scene.read([]) == one_by_one


def items_of(scene: Scene, words: Slices, sizes: Sequence[int]) -> tuple[Any, list[list[int]]]:
    """Return the items that a client of the responses API gets, and the tokens that each message is said to be of."""
    engine = Engine([Said(*each) for each in scene.said], sizes, scene.stops, has_logprobs=True, words=words)
    chunks, whole = all_of(engine, scene.template)
    is_of_bytes = all(end - begin == 1 for begin, end in words.slices) and not words.strips_leading_space
    items: Any = of_items(chunks, whole, scene.has_one_call, has_bytes=is_of_bytes)
    tokens = [[token["token_id"] for token in logprobs] for kind, *_, logprobs in items if kind == "message"]
    return [item[:-1] for item in items], tokens


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    scenes().filter(lambda scene: len(scene.said) == 1),
    st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(any),
    st.booleans(),
    SIZES,
)
# A thought's end, a text and a call's beginning are one token.
@example(
    Scene(HERMES, ((f"<think>Hm</think>Hello, <tool_call>{WAIT}</tool_call>", "stop"),)), [9, 16, 10], False, [1] * 9
)
# Of one token a text and what a stop string drops; of tokens before it the same character.
@example(Scene(HERMES, (("Hello, Łódź. arg", "stop"),), stops=("źx", " arg")), [3, 5, 1, 1, 2, 1], False, [2, 1])
# Nothing is taken apart.
@example(Scene(PLAIN, (("Hello, 🦩 Łódź. arg", "stop"),), stops=(" arg",)), [3, 5, 1, 4, 1, 1, 1], True, [2, 1])
# What looked like a call is text in the end.
@example(Scene(HERMES, ((f" So <tool_call>{LOOK} and</tool_call> it", "stop"),)), [7], True, [1] * 99)
def test_logprobs_of_messages_are_of_the_tokens_that_make_up_their_texts(
    scene: Scene, token_sizes: list[int], strips: bool, sizes: list[int]
) -> None:
    """Which bytes make up a text is known from tokens that are a byte each."""
    text = scene.said[0][0]
    items, messages = items_of(scene, Slices(text, [1], strips_leading_space=strips), [])
    words = Slices(text, token_sizes, strips_leading_space=strips)
    left = list(enumerate(words.slices))
    expected: list[list[int]] = []
    for message in map(set, messages):
        found = [place for place, of_token in left if message.intersection(range(*of_token))]
        left = [each for each in left if each[0] not in found]
        expected.append(found)
    for each in ([1] * 400, sizes, []):
        assert items_of(scene, words, each) == (items, expected)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    st.lists(st.tuples(st.text("aŁ🦩 .", max_size=30), st.sampled_from(ENDS)), min_size=1, max_size=3),
    st.sampled_from([(), ("a.", "🦩 "), ("aaa",)]),
    SIZES,
    st.booleans(),
)
def test_completions_say_the_same_of_tokens_in_any_grouping(
    texts: list[tuple[str, FinishReason]], stops: tuple[str, ...], sizes: list[int], has_logprobs: bool
) -> None:
    found = []
    for each in ([1] * 400, sizes, []):
        engine = Engine([Said(*text) for text in texts], each, stops, has_logprobs)
        chunks, whole = all_of(engine, None)
        assert isinstance(whole, CompletionResponse)
        sampling = SamplingParams(n_choices=len(texts))
        call = CompletionCall(
            model="fake",
            prompt="So: ",
            sampling=sampling,
            options=CompletionOptions(),
            echoed=("So: ",),
            is_streamed=True,
            includes_usage=True,
        )
        writer = call.writer()
        *bodies, last = data_of(writer.begin(whole) + "".join(map(writer.chunk, chunks)) + writer.end(whole))
        assert (last["choices"], last["usage"]) == ([], whole.usage.to_dict())
        said = []
        for choice in call.response(whole)["choices"]:
            pieces = [piece for body in bodies for piece in body["choices"] if piece["index"] == choice["index"]]
            assert "".join(piece["text"] for piece in pieces) == choice["text"]
            assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [choice["finish_reason"]]
            tokens = [token for piece in pieces for token in (piece["logprobs"] or {}).get("tokens", ())]
            assert tokens == (choice["logprobs"] or {}).get("tokens", [])
            said.append((choice["text"], choice["finish_reason"], tokens, choice["logprobs"]))
        found.append(said)
    assert found[1] == found[0]
    assert found[2] == found[0]
