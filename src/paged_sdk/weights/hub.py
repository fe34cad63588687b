"""Resolve the name that a user gives a model to a path: a directory, a file, or a repository of the Hugging Face
Hub.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from paged_sdk.config.build import is_encoder_name
from paged_sdk.errors import ConfigError, ModelLoadError, shown
from paged_sdk.system.files import is_file
from paged_sdk.weights.gguf.split import split_parts

__all__ = ["resolve_beside", "resolve_model", "resolve_tokenizer"]

MAX_LISTED = 8
"""An error lists so many of a directory's files: a home directory may hold hundreds below it."""

# The files that a safetensors model needs; weights of other formats and frameworks are not downloaded.
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
_UNWANTED = ("*/*", "consolidated*.safetensors")
# What sentence-transformers has in directories of their own, where modules.json lists them: how texts become vectors.
_MODULES = "modules.json"
_OF_MODULES = ("[0-9]_*/*.json", "[0-9]_*/model.safetensors")
_OF_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def resolve_model(
    model: str | Path,
    *,
    filenames: Sequence[str] = (),
    revision: str | None = None,
    token: str | bool | None = None,
    gguf: bool | None = None,
) -> Path:
    """Return the directory or GGUF file of a model; download it if need be.

    :param model: a directory or file, used as it is; otherwise an id on the Hugging Face Hub. ``:Q4_K_M`` after a
        directory or an id picks the GGUF file of that quantization, in any case of letters
    :param filenames: the GGUF file within the directory or repository; of a split model one part is enough
    :param revision: branch, tag or commit of the repository
    :param token: the Hub's access token; True: the one of the login; None: that one if there is any; False: none
    :param gguf: whether a GGUF file is wanted; None: if ``filenames`` or a quantization is given, or if there are no
        safetensors
    :returns: a directory with ``config.json``, or a GGUF file (of a split model, the first part)
    :raises ConfigError: a revision of a path
    :raises ModelLoadError: there is no such model, file or quantization, several fit, or the Hub does not give it
    """
    path = _path(str(model))
    name, _, quantization = str(model).partition(":")
    is_here = os.path.exists(path) or (bool(quantization) and os.path.isdir(_path(name)))
    if is_here and revision is not None:
        raise ConfigError.of("with_hf_revision", revision, f"none: {shown(str(model))} is a path, not an id on the Hub")
    if os.path.isdir(path):
        return _in_directory(path, filenames, "", gguf)
    if os.path.exists(path):
        if filenames and path.name not in filenames:
            raise ModelLoadError(
                f"{path} is a file, and {filenames[0]!r} is to be one within a directory or a repository of the Hub: "
                "give that as the model",
                path=path,
            )
        return path
    if is_here:
        return _in_directory(_path(name), filenames, quantization, gguf)
    if name.startswith((".", "~")) or path.is_absolute() or name.count("/") > 1:
        raise ModelLoadError(f"{str(model)!r} does not exist", path=path)
    return _on_hub(_Repository(name, revision, token), filenames, quantization, gguf)


def resolve_beside(model: str, name: str, *, revision: str | None = None, token: str | bool | None = None) -> Path:
    """Return a file that goes with a model: a path, or a name in the model's directory or repository, from which it is
    downloaded if need be.

    :param model: as for :func:`resolve_model`; ``revision`` and ``token`` likewise
    :raises ModelLoadError: there is no such file, or the Hub does not give it
    """
    path = _path(name)
    if os.path.isfile(path):
        return path
    location = model.partition(":")[0]
    here = next((found for found in map(_path, (model, location)) if os.path.exists(found)), None)
    if here is not None:
        beside = (here if os.path.isdir(here) else here.parent) / name
    elif name.startswith((".", "~")) or path.is_absolute():
        raise ModelLoadError(f"{name!r} does not exist", path=path)
    else:
        beside = _Repository(location, revision, token).download([glob.escape(name)], ()) / name
    if not os.path.isfile(beside):
        raise ModelLoadError(f"{name!r} is neither a file nor one beside {model}", path=beside)
    return beside


def resolve_tokenizer(model: str, *, token: str | bool | None = None) -> Path:
    """Return the tokenizer.json of a model, with the files that belong to it beside it; download them if need be.

    :param model: a directory, or the file itself; otherwise an id on the Hugging Face Hub
    :param token: as for :func:`resolve_model`
    :raises ModelLoadError: there is none, or the Hub does not give it
    """
    path = _path(model)
    if not os.path.isdir(path):
        if os.path.exists(path):
            return path
        if model.startswith((".", "~")) or path.is_absolute() or model.count("/") > 1:
            raise ModelLoadError(f"{model!r} does not exist", path=path)
        path = _Repository(model, None, token).download(_OF_TOKENIZERS, ())
    if not is_file(path / "tokenizer.json"):
        raise ModelLoadError(f"{model} has no tokenizer.json", path=path / "tokenizer.json")
    return path / "tokenizer.json"


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # leaves alone an unknown ~user, where Path.expanduser fails


def _in_directory(directory: Path, filenames: Sequence[str], quantization: str, gguf: bool | None) -> Path:
    wanted = bool(filenames or quantization) if gguf is None else gguf
    # What llama.cpp wrote before GGUF has names of any kind.
    if filenames and not filenames[0].endswith(".gguf") and is_file(directory / filenames[0]):
        return directory / filenames[0]
    if not wanted and (gguf is False or os.path.lexists(directory / "config.json")):
        return directory
    try:
        files = [path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*.gguf")) if is_file(path)]
    except OSError as error:
        raise ModelLoadError(f"{directory} cannot be read: {error.strerror or error}", path=directory) from error
    if not files and not wanted:
        return directory
    if not files and not os.path.lexists(directory / "config.json"):
        raise ModelLoadError(
            f"{directory} is not a model: it has neither a GGUF file nor a config.json", path=directory
        )
    return directory / _selected(files, filenames, quantization, str(directory))[0]


def _on_hub(repository: _Repository, filenames: Sequence[str], quantization: str, gguf: bool | None) -> Path:
    if gguf or (gguf is None and (filenames or quantization)):
        # Named files are requested without a listing, so that they load without a network once they are cached.
        files = split_parts(filenames[0]) if filenames else None
        return _gguf_on_hub(repository, files, quantization)
    directory = repository.download(_WANTED, _UNWANTED)
    if any(directory.glob("*.safetensors")):
        return repository.download(_OF_MODULES, ()) if is_file(directory / _MODULES) else directory
    names = repository.files()
    if gguf is None and any(name.endswith(".gguf") for name in names):
        return _gguf_on_hub(repository, None, quantization)
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise ModelLoadError(
            f"{repository.name} has only {pickles[0]}, a pickle, which can run any code when it is loaded and is "
            "refused: convert it to safetensors, or use a repository that has them",
            path=repository.name,
        )
    raise ModelLoadError(f"{repository.name} holds no safetensors weights", path=repository.name)


def _gguf_on_hub(repository: _Repository, files: list[str] | None, quantization: str) -> Path:
    if files is None:
        files = _selected(repository.files(), (), quantization, repository.name)
    directory = repository.download([glob.escape(name) for name in files], ())
    if not is_file(directory / files[0]):
        _selected(repository.files(), files, quantization, repository.name)
        raise ModelLoadError(f"{files[0]} of {repository.name} could not be downloaded", path=repository.name)
    return directory / files[0]


def _selected(files: Sequence[str], filenames: Sequence[str], quantization: str, where: str) -> list[str]:
    """Return all parts of the one GGUF model that is meant.

    :param files: the files to choose from
    :param filenames: the first names the model, if there is any
    :param quantization: otherwise, picks the model by its name; empty: there must be one model only
    :param where: for messages
    """
    models = {tuple(split_parts(name)) for name in files if name.endswith(".gguf") and not is_encoder_name(name)}
    names = sorted(parts[0] for parts in models)
    more = "" if len(names) <= MAX_LISTED else f" and {len(names) - MAX_LISTED} more"
    there_is = f"there is {', '.join(names[:MAX_LISTED])}{more}"
    if filenames:
        fitting = {parts for parts in models if filenames[0] in parts}
        wanted = f"file {filenames[0]!r}"
    elif quantization:
        tag = re.compile(rf"(?<![a-z0-9]){re.escape(quantization)}(?![a-z0-9_])", re.IGNORECASE)
        fitting = {parts for parts in models if tag.search(parts[0])}
        wanted = f"GGUF file of quantization {quantization!r}"
    else:
        fitting = models
        wanted = "GGUF file"
    if not names:
        raise ModelLoadError(f"{where} has no GGUF file: TextModelBuilder loads Hugging Face checkpoints", path=where)
    if not fitting:
        raise ModelLoadError(f"{where} has no {wanted}: {there_is}", path=where)
    if len(fitting) > 1:
        raise ModelLoadError(f"{where} has more than one {wanted}, so give its name: {there_is}", path=where)
    return list(*fitting)


@frozen
class _Repository:
    """Downloads a model repository of the Hub. huggingface_hub is imported late, because that takes some 0.2 s."""

    name: str
    revision: str | None
    token: str | bool | None

    def download(self, wanted: Sequence[str], unwanted: Sequence[str]) -> Path:
        """Return the local snapshot, with the files that fit the patterns brought up to date."""
        from huggingface_hub import snapshot_download

        with self._explained():
            return Path(
                snapshot_download(
                    self.name,
                    revision=self.revision,
                    token=self.token,
                    allow_patterns=list(wanted),
                    ignore_patterns=list(unwanted),
                )
            )

    def files(self) -> list[str]:
        """List all files of the repository, or the cached ones if the Hub cannot be reached."""
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError

        with self._explained():
            try:
                info = HfApi().model_info(self.name, revision=self.revision, token=self.token)
            except HfHubHTTPError:
                raise
            except Exception:  # any error of the HTTP library in use: no answer from the Hub
                cached = Path(snapshot_download(self.name, revision=self.revision, local_files_only=True))
                return [path.relative_to(cached).as_posix() for path in cached.rglob("*")]
        return [file.rfilename for file in info.siblings or ()]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the download into :class:`ModelLoadError` that say what to do."""
        from huggingface_hub import errors

        try:
            yield
        except errors.GatedRepoError as error:
            raise self._error(
                "is gated: accept its conditions on its page on the Hub, and give a token of that account"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise self._error(
                "is neither an existing path nor a visible repository on the Hub: check the name; a private repository "
                "needs a token"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise self._error(f"has no revision {self.revision!r}") from error
        except errors.HFValidationError as error:
            raise self._error("is neither an existing path nor a Hub id (namespace/name)") from error
        except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
            raise self._error(
                "is not an existing path, is not in the local cache, and the Hub cannot be reached (no network, or "
                "offline mode): connect, or give a local directory or file"
            ) from error
        except Exception as error:  # an error of the HTTP library, the disk, or the Hub's storage
            raise self._error(f"could not be downloaded: {error}") from error

    def _error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.name!r} {what}", path=self.name)
