"""Render a conversation to the text of a prompt."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from paged_sdk.chat.allowlist import MAX_SOURCE_CHARS
from paged_sdk.chat.metered import MAX_METERED_CHARS, MeteredTemplate, NotCheapError
from paged_sdk.chat.plain_data import TooLargeError, measure
from paged_sdk.chat.renderer import Interruption, Renderer, RenderError
from paged_sdk.chat.sandbox import RenderLimits, TemplateEnvironment, TemplateRefusalError
from paged_sdk.errors import CheckpointError, InvalidRequestError, shortened, shown
from paged_sdk.logs import get_logger
from paged_sdk.system.files import read_json, read_text
from paged_sdk.types.messages import Message, TextMessageRole
from paged_sdk.types.tool import Tool

__all__ = ["ChatTemplate", "choose_template", "read_template"]

_CONTENT_END = "EndOfTheContent"
"""Appended to a content, it marks where the template writes the content's end. Letters are not escaped in JSON or
HTML."""
_TOOLS_OF_MESSAGE = re.compile(r"""message(?:\[['"]tools['"]\]|\.tools\b)""")

_logger = get_logger(__name__)


class ChatTemplate:
    """Renders conversations by the Jinja template of a Hugging Face checkpoint or GGUF file. Thread-safe.

    Templates are never trusted. A template that uses only operations of known cost, as those of the common families
    do, is rendered in this process (:mod:`paged_sdk.chat.metered`). Other templates, and messages that would be
    expensive to render, are rendered in a process that is killed if it exceeds a limit
    (:mod:`paged_sdk.chat.renderer`).

    :param source: the template
    :param tokens: variables for special tokens, ``{"bos_token": "<s>", ...}``
    :param limits: the limits of one rendering
    :param image_text: see :meth:`showing_images_as`
    :raises CheckpointError: the source is not a template
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        *,
        limits: RenderLimits | None = None,
        image_text: str | None = None,
    ) -> None:
        self.source = source
        self._tokens = dict(tokens)
        self._limits = limits or RenderLimits()
        self._image_text = image_text
        self._renderer = Renderer(self._limits)
        self._metered: MeteredTemplate | None = None
        try:
            self._metered = _metered(source, self._limits)
        except NotCheapError as exc:
            _logger.info("The chat template is rendered in a process of its own: %s", exc)
            self._check()
        except Exception as exc:  # an untrusted template may fail in any way
            raise _unusable(f"{type(exc).__name__}: {shortened(str(exc))}") from exc

    def showing_images_as(self, text: str) -> ChatTemplate:
        """Return a copy of this template that gets messages as plain text, with this text for each image.

        Both share one renderer, so only one of them has to be closed.
        """
        made = copy(self)
        made._image_text = text
        return made

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that make a copy, for example in another process."""
        return {
            "source": self.source,
            "tokens": self._tokens,
            "limits": self._limits,
            "image_text": self._image_text,
        }

    @property
    def runs_in_process(self) -> bool:
        """Tell whether the template can be rendered in this process: it uses only operations of known cost."""
        return self._metered is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        enable_thinking: bool | None = None,
        reasoning_effort: str | None = None,
        tools: Sequence[Tool] = (),
        roles: Sequence[str] | None = None,
        variables: Mapping[str, Any] | None = None,
        change: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        interruption: Interruption | None = None,
    ) -> str:
        """Render the prompt for a conversation.

        :param add_generation_prompt: whether to end with the opening of the model's turn
        :param continue_final_message: whether to end with the content of the last message instead, leaving its turn
            open
        :param enable_thinking: passed to the template; None leaves the template's default
        :param reasoning_effort: passed to the template; None leaves the template's default
        :param tools: the tools that the model may call
        :param roles: role names to pass to the template, one for each message; None: the messages' own
        :param variables: other variables for the template
        :param change: changes each message and tool, in the form that templates get
        :param interruption: lets another thread end the rendering
        :raises InvalidRequestError: the template refuses the conversation (with its own message), fails, exceeds a
            limit, makes no text, or does not write the content to continue
        """
        change = change or _unchanged
        names = [self._name(message.role) for message in messages] if roles is None else roles
        dicts = [{**message.to_dict(), "role": name} for message, name in zip(messages, names, strict=True)]
        if tools and _TOOLS_OF_MESSAGE.search(self.source):
            dicts = _with_tools(dicts, tools)
        # Insert image texts after the change, which must not treat them as text of the messages.
        dicts = [_flat(change(each), self._image_text) for each in dicts]
        if continue_final_message:
            dicts[-1] = {**dicts[-1], "content": dicts[-1]["content"] + _CONTENT_END}
        given = {
            **(variables or {}),
            **self._tokens,
            "messages": dicts,
            "tools": [change(tool.to_dict()) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        if enable_thinking is not None:
            given["enable_thinking"] = enable_thinking
        if reasoning_effort is not None:
            given["reasoning_effort"] = reasoning_effort
        try:
            text = self._generate(given, interruption or Interruption())
        except TemplateRefusalError as exc:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {shortened(str(exc))}", field="messages"
            ) from exc
        except (RenderError, TooLargeError) as exc:
            raise InvalidRequestError(
                f"the model's chat template failed: {shortened(str(exc))}", field="messages"
            ) from exc
        except Exception as exc:  # an untrusted template may fail in any way
            raise InvalidRequestError(
                f"the model's chat template failed: {type(exc).__name__}: {shortened(str(exc))}", field="messages"
            ) from exc
        if not text or text.isspace():
            raise InvalidRequestError("the model's chat template makes no text of these messages", field="messages")
        return _up_to_content_end(text) if continue_final_message else text

    @property
    def takes_tools(self) -> bool:
        """Tell whether the template uses the variable ``tools``."""
        return re.search(r"\btools\b", self.source) is not None

    def mentions(self, token: str) -> bool:
        """Tell whether the template's source contains a text."""
        return token in self.source

    def names_role(self, role: str) -> bool:
        """Tell whether the template's source holds the name of a role in quotes."""
        return any(self.mentions(f"{quote}{role}{quote}") for quote in "'\"")

    @property
    def names_pairs(self) -> bool:
        """Tell whether the template was written for reranking: for messages of the roles "query" and "document"."""
        return self.names_role("query") and self.names_role("document")

    def close(self) -> None:
        """End the rendering processes, if any."""
        self._renderer.close()

    def _check(self) -> None:
        try:
            self._renderer.check(self.source)
        except (RenderError, TemplateError) as exc:
            raise _unusable(str(exc)) from exc

    def _name(self, role: TextMessageRole) -> str:
        """Return the template's name of a role: "developer" becomes "system" if the template does not mention it."""
        if role is not TextMessageRole.DEVELOPER or self.names_role(role.value):
            return role.value
        return TextMessageRole.SYSTEM.value

    def _generate(self, variables: Mapping[str, Any], interruption: Interruption) -> str:
        weight = _weigh([*variables["messages"], *(variables["tools"] or ())], self._limits.max_chars)
        if self._metered is not None and weight <= MAX_METERED_CHARS:
            try:
                return self._metered.render(variables)
            except NotCheapError:
                pass
        return self._renderer.render(self.source, variables, interruption)


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return messages with the tools as JSON in the system message, where Phi-4-mini's template expects them."""
    if messages[0]["role"] != TextMessageRole.SYSTEM.value:
        messages = [{"role": TextMessageRole.SYSTEM.value, "content": ""}, *messages]
    functions = json.dumps([tool.to_dict()["function"] for tool in tools], ensure_ascii=False)
    return [{**messages[0], "tools": functions}, *messages[1:]]


def _up_to_content_end(text: str) -> str:
    """Return the text of a conversation up to the end of the last message's content."""
    before, mark, _ = text.rpartition(_CONTENT_END)
    if not mark:
        raise InvalidRequestError(
            "the model's chat template does not write the last message, which is to be continued", field="messages"
        )
    return before


def _flat(message: dict[str, Any], image_text: str | None) -> dict[str, Any]:
    """Return a message with its parts joined to one text, in which ``image_text`` replaces images; None: no change."""
    parts = message["content"]
    if image_text is None or not isinstance(parts, list):
        return message
    return {**message, "content": "".join(image_text if part["type"] == "image" else part["text"] for part in parts)}


def _unchanged(part: dict[str, Any]) -> dict[str, Any]:
    return part


def _weigh(messages: list[dict[str, Any]], limit: int) -> int:
    """Return the weight of messages.

    :raises TooLargeError: it exceeds the limit
    """
    weight = 0
    for message in messages:
        for part in message.values():
            weight += len(part) if type(part) is str else measure(part, limit=limit).weight
    if weight > limit:
        raise TooLargeError(f"the messages have more than {limit} characters")
    return weight


def _metered(source: str, limits: RenderLimits) -> MeteredTemplate:
    if len(source) > MAX_SOURCE_CHARS:
        raise NotCheapError(f"it has {len(source)} characters")
    return MeteredTemplate(TemplateEnvironment(limits).parse(source), limits)


def _unusable(reason: str) -> CheckpointError:
    return CheckpointError(f"the chat template cannot be used: {reason}")


def choose_template(value: object, *, where: str) -> str | None:
    """Choose the template for plain chats from a ``chat_template`` value: the only one, or the one named "default".

    :param where: where the value comes from, for error messages
    :raises CheckpointError: the value is neither a template nor a list of named templates, or has no default
    """
    if value is None or isinstance(value, str):
        return value
    try:
        named = {entry["name"]: entry["template"] for entry in value} if isinstance(value, list) else None
    except (TypeError, KeyError):
        named = None
    if not named or not all(isinstance(source, str) for source in named.values()):
        raise CheckpointError(f"{where}: chat_template must be a string or a list of {{name, template}} objects")
    if "default" in named:
        return str(named["default"])
    if len(named) == 1:
        return str(next(iter(named.values())))
    names = shown(list(named))
    raise CheckpointError(f"{where}: none of the chat templates {names} is the default; use with_chat_template")


def read_template(template: str | Path) -> str:
    """Return the source of a template that a user gives as text or as a file's path.

    A string with ``{%`` or ``{{`` is a template. A .json file holds the template under ``chat_template``.

    :raises CheckpointError: the file cannot be read, or holds no template; a string is neither
    """
    if isinstance(template, str):
        if "{%" in template or "{{" in template:
            return template
        if not os.path.exists(template):
            reason = "is neither a file nor a chat template, which would have {{ or {% in it"
            raise CheckpointError(f"{shown(template)} {reason}", path=Path(template))
    path = Path(template)
    if path.suffix != ".json":
        return read_text(path)
    source = choose_template(read_json(path).get("chat_template"), where=str(path))
    if source is None:
        raise CheckpointError(f"{path} has no chat_template", path=path)
    return source
