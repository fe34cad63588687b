"""Defines placeholders for mistral.rs's kinds of models that this engine does not support."""

from __future__ import annotations

from typing import ClassVar, Final, NoReturn

from paged_sdk import ConfigError

__all__ = ["REFUSED", "Refused"]

_WEIGHED: Final = (
    "a model with LoRA adapters that requests name: X-LoRA, which weighs them for each token, is not supported"
)


class Refused:
    """Is the base of placeholders for unsupported kinds of models: instantiating one raises an error.

    :cvar instead: what to use instead, for the error
    """

    instead: ClassVar[str]

    def __new__(cls, *values: object, **settings: object) -> NoReturn:
        """Refuse to make an instance.

        :raises ConfigError: always
        """
        raise ConfigError.of("which", cls.__qualname__, cls.instead)


def _refused(name: str, instead: str) -> type[Refused]:
    return type(name, (Refused,), {"__module__": __name__, "instead": instead})


REFUSED: Final = (
    _refused("LoraGGUF", "Which.GGUF(..., adapters=[LoraAdapter(alias, source)]), whose requests name their adapter"),
    _refused("LoraGGML", "Which.GGUF or Which.Lora with adapters: files of before GGUF have none"),
    _refused("XLora", f"Which.Lora, {_WEIGHED}"),
    _refused("XLoraGGUF", f"Which.GGUF(..., adapters=[...]), {_WEIGHED}"),
    _refused("XLoraGGML", f"Which.GGUF(..., adapters=[...]), {_WEIGHED}"),
    _refused("DiffusionPlain", "a model that writes text: no images are made"),
    _refused("Speech", "a model that writes text: no speech is made"),
)
"""Placeholders, which become attributes of Which."""
