"""What others' test programs for these APIs say of the server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from paged_sdk import VisionModelBuilder
from paged_sdk.testing import FakeRequest, fake_model
from serving import Serving, serving
from tiny_vision import make_vision_checkpoint

NAME: Final = "o3-claude-4"
"""Some checks are left out for models by other names."""

IMAGES: Final = {"openai-chat": "chat-image-input", "open-responses": "image-input", "anthropic": "anth-image-input"}
REFUSED: Final = {
    "openai-chat": {"chat-reasoning-summary": "it sends the field reasoning, which chats do not have"},
    "open-responses": {},
    "anthropic": {},
}
"""What is refused with status 400, and why."""


def reply(request: FakeRequest) -> str:
    if request.options.shown_tools:
        call = {"name": request.options.shown_tools[0].name, "arguments": {"location": "Paris"}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"
    # Of events of thoughts it knows those of Open Responses alone, which are not called as OpenAI's are.
    thoughts = "<think>Easy.</think>" if "reasoning" in request.messages[-1].content else ""
    return thoughts + "Hello there, friend!"


def checks(served: Serving, form: str, model: str, *more: str) -> dict[str, Any]:
    """Return what llm-comply says of an API, by the names of its checks."""
    arguments = ["-u", f"{served.url}/v1", "-k", "none", "-m", model, "--format", form, "--json", *more]
    command = [sys.executable, "-c", "from llm_comply.cli import main; main()", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return {result["id"]: result for result in json.loads(finished.stdout)["results"]}


@pytest.mark.long
def test_llm_comply(tmp_path: Path) -> None:
    pytest.importorskip("llm_comply")
    make_vision_checkpoint("llava", tmp_path)
    seeing = VisionModelBuilder(tmp_path).with_dtype("float32").with_force_cpu().with_num_threads(1)
    with serving({NAME: lambda: fake_model(reply), "seeing": seeing.build}) as served:
        for form, image in IMAGES.items():
            results = {**checks(served, form, NAME), **checks(served, form, "seeing", "--filter", image)}
            assert len(results) > 6
            assert {result["status"] for result in results.values()} <= {"passed", "failed"}
            failed = {name: result for name, result in results.items() if result["status"] == "failed"}
            assert failed.keys() == REFUSED[form].keys(), failed
            assert all("HTTP 400 (expected [200])" in result["errors"] for result in failed.values()), failed
