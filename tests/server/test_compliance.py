"""What others' test programs for this API say of the server."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from paged_sdk.testing import FakeRequest, fake_model
from serving import serving

NOT_DONE = {"chat-image-input": "a fake model takes no images; test_images.py has a real one"}


def reply(request: FakeRequest) -> str:
    if request.options.shown_tools:
        call = {"name": request.options.shown_tools[0].name, "arguments": {"location": "Paris"}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"
    return "Hello there, friend!"


@pytest.mark.long
def test_llm_comply() -> None:
    pytest.importorskip("llm_comply")
    with serving({"fake": lambda: fake_model(reply)}) as served:
        arguments = ["-u", f"{served.url}/v1", "-k", "none", "-m", "fake", "--format", "openai-chat", "--json"]
        command = [sys.executable, "-c", "from llm_comply.cli import main; main()", *arguments]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    results: list[dict[str, Any]] = json.loads(finished.stdout)["results"]
    assert len(results) > 6
    failed = {result["id"]: result for result in results if result["status"] == "failed"}
    assert failed.keys() == NOT_DONE.keys(), failed
