"""Runs a chat at the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paged_sdk import (
    BlockingModel,
    ContextLengthError,
    NumericalError,
    RequestError,
)
from paged_sdk.cli.answer import RequestSettings, empty_conversation, show_answer, with_user_turn
from paged_sdk.cli.terminal import Terminal

__all__ = ["Chat"]

HELP = """\
/system TEXT  start over with this system message
/reset        start over
/help         show this
/exit         leave (or Ctrl-D)
Ctrl-C        end the answer"""


class Chat:
    """Holds a conversation at the terminal. Each turn resends all messages; the prefix cache keeps their KV.

    :param system: the system message, if any
    :param images: images of the first turn, also after starting over
    """

    def __init__(
        self,
        model: BlockingModel,
        terminal: Terminal,
        *,
        system: str | None,
        settings: RequestSettings,
        images: Sequence[Path] = (),
    ) -> None:
        self._model = model
        self._terminal = terminal
        self._settings = settings
        self._first_images = self._images = images
        self._empty_conversation = empty_conversation(system)
        self._messages = self._empty_conversation

    def run(self, first: str | None) -> None:
        """Read and answer messages until the user leaves.

        :param first: a first message, sent before any is read
        :raises PagedError: the model cannot continue
        """
        self._terminal.note(f"{self._model.name}. /help lists the commands.")
        if first is not None:
            self.say(first)
        while True:
            try:
                line = self._terminal.read_line().strip()
                if line == "/exit":
                    return
                self._take(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._terminal.note("\nCtrl-D or /exit leaves.")

    def say(self, text: str) -> None:
        """Send one turn. A failed turn leaves the conversation unchanged; a canceled one keeps the answer so far, if
        any.

        :raises PagedError: the model cannot continue
        """
        messages = with_user_turn(self._messages, text, self._images)
        stream = self._model.stream_chat_request(self._settings.chat_request(messages))
        try:
            show_answer(stream, self._terminal)
        except KeyboardInterrupt:
            self._terminal.note("(canceled)")
        except (RequestError, NumericalError) as error:
            over = ", or start over with /reset" if isinstance(error, ContextLengthError) else ""
            self._terminal.error(f"{self._terminal.told(error)}{over}")
            return
        answer = stream.response_so_far().choices[0]
        if answer.message.content or answer.finish_reason != "canceled":
            self._messages, self._images = messages.add_messages(answer.message), ()

    def _take(self, line: str) -> None:
        """Handle a typed line: a command or a message."""
        command, _, rest = line.partition(" ")
        match command:
            case "":
                pass
            case "/help":
                self._terminal.reply(HELP)
            case "/reset":
                self._start_over()
            case "/system":
                self._empty_conversation = empty_conversation(rest.strip() or None)
                self._start_over()
            case _ if command.startswith("/"):
                self._terminal.reply(f"Unknown command {command}; /help lists the commands.")
            case _:
                self.say(line)

    def _start_over(self) -> None:
        self._messages, self._images = self._empty_conversation, self._first_images
