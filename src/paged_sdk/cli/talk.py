"""Loads a model and sends it one prompt, a chat, or plain text to continue."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from paged_sdk import BlockingModel, Constraint, ConstraintError, SamplingParams
from paged_sdk.cli.answer import RequestSettings, empty_conversation, show_answer, with_user_turn
from paged_sdk.cli.chat import Chat
from paged_sdk.cli.flags import excluding
from paged_sdk.cli.loading import AnyBuilder, check_arch
from paged_sdk.cli.terminal import Terminal
from paged_sdk.cli.text_options import PromptOptions

__all__ = ["talk"]


def talk(
    builder: AnyBuilder,
    options: PromptOptions,
    sampling: SamplingParams,
    terminal: Terminal,
    *,
    arch: str | None = None,
) -> None:
    """Run the command ``run``.

    :param arch: the model family to check for, if given
    :raises typer.BadParameter: options that contradict each other, or no prompt
    :raises KeyboardInterrupt: Ctrl-C
    :raises PagedError: the model cannot be loaded, or cannot answer
    """
    prompt = _prompt(options)
    constraint = None if options.json_schema is None else _constraint(options.json_schema)
    if builder.source.gguf and builder.settings.isq is not None:
        terminal.note(f"The file's already quantized weights are requantized to {builder.settings.isq.value}.")
    with terminal.loading(builder.source.location):
        model = BlockingModel(builder.build())
    adapter = next((source.name for source in builder.settings.adapters), None)
    settings = RequestSettings(sampling=sampling, adapter=adapter, constraint=constraint)
    with model:
        check_arch(model.model_type, arch)
        if prompt is None or options.interactive:
            Chat(model, terminal, system=options.system, settings=settings, images=options.image).run(prompt)
            return
        try:
            if options.raw:
                texts = model.stream_completion_request(prompt, sampling, adapter=adapter, constraint=constraint)
                show_answer(texts, terminal)
            else:
                conversation = with_user_turn(empty_conversation(options.system), prompt, options.image)
                show_answer(model.stream_chat_request(settings.chat_request(conversation)), terminal)
        except ConstraintError as error:
            raise typer.BadParameter(str(error), param_hint="--json-schema") from error


def _constraint(schema: str) -> Constraint:
    """Return the constraint of a JSON schema.

    :param schema: the schema, or the path of a file with it
    :raises typer.BadParameter: the file cannot be read, or the schema is not a JSON object
    """
    try:
        text = schema if schema.lstrip().startswith("{") else Path(schema).expanduser().read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError, RuntimeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise typer.BadParameter(f"{schema[:100]}: {why}", param_hint="--json-schema") from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{schema[:100]}: expected a JSON object", param_hint="--json-schema")
    return Constraint.json_schema(found)


def _prompt(options: PromptOptions) -> str | None:
    """Return the prompt from the command line or stdin; None for a chat at the terminal.

    :raises typer.BadParameter: no prompt, or options that contradict each other
    """
    of_chats = {"--interactive": options.interactive, "--system": options.system, "--image": options.image}
    excluding("--raw", options.raw, of_chats)
    if options.prompt is not None or options.interactive:
        return options.prompt
    try:
        text = "" if sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin is not valid text in {error.encoding}") from None
    if text:
        return text
    if options.raw or not sys.stdin.isatty():
        raise typer.BadParameter("there is no prompt: give one, or pipe one in")
    return None
