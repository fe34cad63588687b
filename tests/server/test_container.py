"""What the Dockerfile has Docker run: whether the server is well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from paged_sdk.testing import fake_model
from serving import serving

DOCKERFILE: Final = Path(__file__).parents[2] / "Dockerfile"
NOBODY: Final = "http://127.0.0.1:9"


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY"])
def test_the_health_check_is_of_the_server_itself_and_of_no_proxy(variable: str) -> None:
    (line,) = [line for line in DOCKERFILE.read_text().splitlines() if line.startswith("    CMD")]
    python, *arguments = json.loads(line.split("CMD", 1)[1])
    assert python == "python"
    with serving(fake_model(error=RuntimeError("device lost"))) as served:
        command = [sys.executable, *(each.replace("8000", str(served.port)) for each in arguments)]

        def is_healthy() -> bool:
            found = subprocess.run(command, env={variable: NOBODY}, timeout=60, stderr=subprocess.DEVNULL, check=False)
            return found.returncode == 0

        assert is_healthy()
        assert served.post().status_code == 503
        assert not is_healthy()
    assert not is_healthy()
