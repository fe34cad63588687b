"""Resolve a user's name of a model (a directory, a file, or a repository of the Hugging Face Hub) to a local path."""

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
from paged_sdk.weights.pickles import PICKLE_IS_REFUSED, find_pickle

__all__ = ["check_exists", "resolve_beside", "resolve_model", "resolve_tokenizer"]

MAX_LISTED = 8
"""The most file names that an error lists: a home directory may hold hundreds of GGUF files."""

# The files that a safetensors model needs; weights of other formats and frameworks are not downloaded.
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "tiktoken.model")
_UNWANTED = ("*/*", "consolidated*.safetensors")
# modules.json lists sentence-transformers' modules (pooling, dense layers), each in a directory of its own.
_MODULES = "modules.json"
_OF_MODULES = ("[0-9]_*/*.json", "[0-9]_*/model.safetensors")
_OF_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def resolve_model(
    model: str | Path,
    *,
    filename: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    gguf: bool | None = None,
) -> Path:
    """Return the directory or GGUF file of a model; download it if necessary.

    :param model: a path of a directory or file, or an id on the Hugging Face Hub. ``:Q4_K_M`` after a directory or an
        id selects the GGUF file of that quantization (case-insensitive)
    :param filename: the GGUF file within the directory or repository, or any part of a split model
    :param revision: branch, tag or commit of the repository
    :param token: the Hub's access token; True: the login's, which must exist; None: the login's, if any; False: none
    :param gguf: whether to look for a GGUF file; None: if ``filename`` or a quantization is given, or if there are no
        safetensors
    :returns: a directory with ``config.json``, or a GGUF file (the first part of a split model)
    :raises ConfigError: a revision is given for a path
    :raises ModelLoadError: no such model, file or quantization exists, several match, or the Hub refuses access
    """
    path = _path(str(model))
    name, _, quantization = str(model).partition(":")
    check_exists(model)
    is_here = _is_here(str(model))
    if is_here and revision is not None:
        raise ConfigError.of("with_hf_revision", revision, f"none: {shown(str(model))} is a path, not an id on the Hub")
    if os.path.isdir(path):
        return _in_directory(path, filename, "", gguf)
    if os.path.exists(path):
        if filename is not None and path.name not in split_parts(filename):
            raise ModelLoadError(
                f"{path} is a file, but {filename!r} names a file within a directory or a Hub repository: pass "
                "that directory or repository as the model",
                path=path,
            )
        return path
    if is_here:
        return _in_directory(_path(name), filename, quantization, gguf)
    return _on_hub(_Repository(name, revision, token), filename, quantization, gguf)


def check_exists(model: str | Path) -> None:
    """Check that a model exists, unless its name may be an id on the Hub.

    :raises ModelLoadError: it does not
    """
    name = str(model)
    if not _is_here(name) and not _is_hub_id(name.partition(":")[0]):
        raise _missing(name, _path(name))


def _is_here(model: str) -> bool:
    """Return whether a model is a path, or a directory and a quantization."""
    directory, _, quantization = model.partition(":")
    return os.path.exists(_path(model)) or (bool(quantization) and os.path.isdir(_path(directory)))


def resolve_beside(model: str, name: str, *, revision: str | None = None, token: str | bool | None = None) -> Path:
    """Return a file that accompanies a model, such as its image encoder; download it if necessary.

    :param model: as for :func:`resolve_model`; ``revision`` and ``token`` likewise
    :param name: a path, or a name within the model's directory or repository
    :raises ModelLoadError: the file does not exist, or the Hub refuses access
    """
    path = _path(name)
    if os.path.isfile(path):
        return path
    location = model.partition(":")[0]
    here = next((found for found in map(_path, (model, location)) if os.path.exists(found)), None)
    if here is not None:
        beside = (here if os.path.isdir(here) else here.parent) / name
    elif _begins_as_path(name):
        raise _missing(name, path)
    else:
        beside = _Repository(location, revision, token).download([glob.escape(name)], ()) / name
    if not os.path.isfile(beside):
        raise ModelLoadError(f"{name!r} is neither a path of a file nor a file of {model}", path=path)
    return beside


def resolve_tokenizer(model: str, *, token: str | bool | None = None) -> Path:
    """Return the path of a model's tokenizer.json; download it, with the tokenizer's other files, if necessary.

    :param model: a directory, the file itself, or an id on the Hugging Face Hub
    :param token: as for :func:`resolve_model`
    :raises ModelLoadError: the model has no tokenizer.json, or the Hub refuses access
    """
    path = _path(model)
    if not os.path.isdir(path):
        if os.path.exists(path):
            return path
        if not _is_hub_id(model):
            raise _missing(model, path)
        path = _Repository(model, None, token).download(_OF_TOKENIZERS, ())
    if not is_file(path / "tokenizer.json"):
        raise ModelLoadError(f"{model} has no tokenizer.json", path=path / "tokenizer.json")
    return path / "tokenizer.json"


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # keeps an unknown ~user, where Path.expanduser raises


def _begins_as_path(name: str) -> bool:
    """Return whether a name begins as only paths do."""
    return name.startswith((".", "~")) or os.path.isabs(name)


def _is_hub_id(name: str) -> bool:
    """Return whether a name that is no existing path may be an id on the Hub (``namespace/name``).

    A file's name is none. One in a directory may be: there are repositories whose names end in ``.gguf``.
    """
    is_file_name = "/" not in name and name.lower().endswith(".gguf")
    return not _begins_as_path(name) and not is_file_name and name.count("/") <= 1


def _missing(name: str, path: Path) -> ModelLoadError:
    """Return the error for a name that can only be a path. A relative one is mostly right, seen from elsewhere."""
    return ModelLoadError(f"{name!r} does not exist{'' if path.is_absolute() else _seen_from_here()}", path=path)


def _seen_from_here() -> str:
    """Return where relative paths begin, for the text of an error; empty if that directory is gone."""
    try:
        return f" in {os.getcwd()}"
    except OSError:
        return ""


def _reason(error: BaseException) -> str:
    """Return what the first of the exceptions says that caused one another, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _in_directory(directory: Path, filename: str | None, quantization: str, gguf: bool | None) -> Path:
    wanted = bool(filename or quantization) if gguf is None else gguf
    # A ggjt file, llama.cpp's format before GGUF, may have any name.
    if filename is not None and not filename.endswith(".gguf") and is_file(directory / filename):
        return directory / filename
    if not wanted and (gguf is False or os.path.lexists(directory / "config.json")):
        return directory
    try:
        files = _gguf_files(directory)
    except OSError as error:
        raise ModelLoadError(f"{directory} cannot be read: {error.strerror or error}", path=directory) from error
    if not files and not wanted:
        return directory
    if not files and not os.path.lexists(directory / "config.json"):
        raise ModelLoadError(
            f"{directory} is not a model: it has neither a GGUF file nor a config.json", path=directory
        )
    return directory / _selected(files, filename, quantization, directory)[0]


def _gguf_files(directory: Path) -> list[str]:
    """Return the GGUF files in a directory and below, relative to it, but for those in hidden directories: a project's
    ``.venv`` may hold the embedded model.

    :raises OSError: the directory cannot be read; others in it that cannot are passed over
    """

    def check(error: OSError) -> None:
        if error.filename == os.fspath(directory):
            raise error

    found: list[Path] = []
    for folder, folders, names in os.walk(directory, onerror=check):
        folders[:] = [each for each in folders if not each.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(".gguf")]
    return [path.relative_to(directory).as_posix() for path in sorted(found) if is_file(path)]


def _on_hub(repository: _Repository, filename: str | None, quantization: str, gguf: bool | None) -> Path:
    if gguf or (gguf is None and (filename or quantization)):
        return _gguf_on_hub(repository, filename, quantization)
    directory = repository.download(_WANTED, _UNWANTED)
    if any(directory.glob("*.safetensors")):
        return repository.download(_OF_MODULES, ()) if is_file(directory / _MODULES) else directory
    names = repository.files()
    if gguf is None and any(name.endswith(".gguf") for name in names):
        return _gguf_on_hub(repository, None, quantization)
    if (pickle := find_pickle(names)) is not None:
        raise ModelLoadError(f"{repository.name} has only {pickle}, {PICKLE_IS_REFUSED}", path=repository.name)
    raise ModelLoadError(f"{repository.name} holds no safetensors weights", path=repository.name)


def _gguf_on_hub(repository: _Repository, filename: str | None, quantization: str) -> Path:
    if filename is None:
        files = _selected(repository.files(), None, quantization, repository.name)
    else:  # requested without a listing, so that it loads without a network once it is cached
        files = split_parts(filename)
    directory = repository.download([glob.escape(name) for name in files], ())
    if not is_file(directory / files[0]):
        _selected(repository.files(), files[0], quantization, repository.name)
        raise ModelLoadError(f"{files[0]} of {repository.name} could not be downloaded", path=repository.name)
    return directory / files[0]


def _selected(files: Sequence[str], filename: str | None, quantization: str, where: str | Path) -> list[str]:
    """Return all parts of the GGUF model that the user selected.

    :param files: the files to choose from
    :param filename: the model's file, or any part of it
    :param quantization: without ``filename``, selects the model whose name has this quantization; empty: there must be
        one model
    :param where: the directory, or the name of the repository
    :raises ModelLoadError: there is no such file, or several; of a directory, it has the path that does not exist
    """
    models = {tuple(split_parts(name)) for name in files if name.endswith(".gguf") and not is_encoder_name(name)}
    names = sorted(parts[0] for parts in models)
    more = "" if len(names) <= MAX_LISTED else f" and {len(names) - MAX_LISTED} more"
    there_is = f"available: {', '.join(names[:MAX_LISTED])}{more}"
    if filename is not None:
        fitting = {parts for parts in models if filename in parts}
        wanted = f"file {filename!r}"
    elif quantization:
        tag = re.compile(rf"(?<![a-z0-9]){re.escape(quantization)}(?![a-z0-9_])", re.IGNORECASE)
        fitting = {parts for parts in models if tag.search(parts[0])}
        wanted = f"GGUF file of quantization {quantization!r}"
    else:
        fitting = models
        wanted = "GGUF file"
    missing = where if filename is None or isinstance(where, str) else where / filename
    if not names:
        found = "GGUF file" if filename is None else f"{wanted}, nor another GGUF file"
        raise ModelLoadError(f"{where} has no {found}: TextModelBuilder loads Hugging Face checkpoints", path=missing)
    if not fitting:
        raise ModelLoadError(f"{where} has no {wanted}; {there_is}", path=missing)
    if len(fitting) > 1:
        raise ModelLoadError(f"{where} has more than one {wanted}, so name one; {there_is}", path=where)
    return list(*fitting)


@frozen
class _Repository:
    """Downloads a model repository from the Hub. huggingface_hub is imported on first use: importing it takes 0.2 s."""

    name: str
    revision: str | None
    token: str | bool | None

    def download(self, wanted: Sequence[str], unwanted: Sequence[str]) -> Path:
        """Download the files that match the patterns, and return the local snapshot's directory."""
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
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        with self._explained():
            try:
                info = HfApi().model_info(self.name, revision=self.revision, token=self.token)
            except HfHubHTTPError:
                raise
            except Exception as error:  # of whichever HTTP library is in use: the Hub did not answer
                try:
                    cached = Path(snapshot_download(self.name, revision=self.revision, local_files_only=True))
                except LocalEntryNotFoundError as missing:
                    raise missing from error
                return [path.relative_to(cached).as_posix() for path in cached.rglob("*")]
        return [file.rfilename for file in info.siblings or ()]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a download's exceptions into :class:`ModelLoadError`, with advice.

        Only one that is not explained is its cause: mostly a path is misspelt, and the tracebacks of the HTTP library
        would be 75 lines above the one that says so.
        """
        from huggingface_hub import errors

        try:
            yield
        except errors.GatedRepoError:
            raise self._error(
                "is gated: accept its conditions on its page on the Hub, and give a token of that account"
            ) from None
        except errors.RepositoryNotFoundError:
            raise self._error(
                f"is neither an existing path{_seen_from_here()} nor a visible repository on the Hub: check the name; "
                "a private repository needs a token"
            ) from None
        except errors.RevisionNotFoundError:
            raise self._error(f"has no revision {self.revision!r}") from None
        except errors.HFValidationError:
            raise self._error(f"is neither an existing path{_seen_from_here()} nor a Hub id (namespace/name)") from None
        except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
            raise self._error(
                f"does not exist{_seen_from_here()}, is not in the Hub's cache, and the Hub cannot be reached "
                f"({_reason(error)}): correct the path, or connect"
            ) from None
        except Exception as error:  # an error of the HTTP library, the disk, or the Hub's storage
            raise self._error(f"could not be downloaded: {error}") from error

    def _error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.name!r} {what}", path=self.name)
