"""What coding agents send with every request: Claude Code 2.1.197, and Codex 0.171.0 without its hosted tools."""

from __future__ import annotations

from typing import Any, Final

import pytest

from paged_sdk import InvalidRequestError
from paged_sdk.wire.messages import read_messages
from paged_sdk.wire.responses import read_responses

MARK: Final = {"cache_control": {"type": "ephemeral"}}
SCHEMA: Final = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
    "additionalProperties": False,
}
CLAUDE_CODE: Final[dict[str, Any]] = {
    "model": "m",
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Rules."}, {"type": "text", "text": "List.", **MARK}],
        },
        {"role": "system", "content": "Agents."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", "is_error": False, **MARK},
            ],
        },
    ],
    "system": [{"type": "text", "text": "Be short."}, {"type": "text", "text": "You edit files.", **MARK}],
    "tools": [{"name": "Bash", "description": "Runs a command.", "input_schema": SCHEMA}],
    "metadata": {"user_id": "{}"},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
CODEX: Final[dict[str, Any]] = {
    "model": "m",
    "stream": True,
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You edit files."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List files."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": None},
        {"type": "function_call", "name": "exec_command", "arguments": '{"command": "ls"}', "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "a.py"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": SCHEMA,
        }
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"session_id": "s"},
}


def test_claude_code() -> None:
    call = read_messages(CLAUDE_CODE)
    roles = [message.role.value for message in call.request.messages]
    assert roles == ["system", "user", "system", "assistant", "tool"]
    assert call.request.messages[3].reasoning_content == "Hm."
    assert [tool.name for tool in call.request.options.shown_tools] == ["Bash"]
    assert (call.is_streamed, call.max_tokens, call.request.options.enable_thinking) == (True, 32000, True)


def test_codex() -> None:
    call = read_responses(CODEX)
    roles = [message.role.value for message in call.request.messages]
    assert roles == ["developer", "user", "assistant", "tool"]
    assert call.request.messages[2].reasoning_content == "Hm."
    assert [tool.name for tool in call.request.options.shown_tools] == ["exec_command"]


@pytest.mark.parametrize("kind", ["namespace", "web_search"])
def test_tools_of_codex_that_the_server_would_run_are_refused_by_name(kind: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_responses({**CODEX, "tools": [*CODEX["tools"], {"type": kind, "name": "x"}]})
    assert caught.value.field == "tools[1].type"
