"""Load a model and talk to it: once, in a chat, or as plain text."""

from __future__ import annotations

from paged_sdk import BlockingModel, SamplingParams
from paged_sdk.cli.answer import asked, chat_request, opening, show_answer
from paged_sdk.cli.chat import Chat
from paged_sdk.cli.flags import AnyBuilder, PromptFlags, check_arch
from paged_sdk.cli.terminal import Terminal

__all__ = ["talk"]


def talk(
    builder: AnyBuilder,
    flags: PromptFlags,
    sampling: SamplingParams,
    terminal: Terminal,
    *,
    arch: str | None = None,
) -> None:
    """Do what the command line says.

    :param arch: the family that the model has to be of
    :raises typer.BadParameter: flags that contradict each other, or no prompt
    :raises KeyboardInterrupt: Ctrl-C
    :raises PagedError: the model cannot be loaded, or cannot answer
    """
    prompt = flags.read()
    if builder.source.gguf and builder.settings.isq is not None:
        terminal.note(f"What the file holds quantized is decoded and quantized again, to {builder.settings.isq.value}.")
    with terminal.loading(builder.source.location):
        model = BlockingModel(builder.build())
    adapter = next((source.name for source in builder.settings.adapters), None)
    with model:
        check_arch(model.architecture, arch)
        if prompt is None or flags.interactive:
            chat = Chat(model, terminal, system=flags.system, sampling=sampling, adapter=adapter, images=flags.image)
            chat.run(prompt)
        elif flags.raw:
            show_answer(model.stream_completion_request(prompt, sampling, adapter=adapter), terminal)
        else:
            conversation = asked(opening(flags.system), prompt, flags.image)
            show_answer(model.stream_chat_request(chat_request(conversation, sampling, adapter)), terminal)
