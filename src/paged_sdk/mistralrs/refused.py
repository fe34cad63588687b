"""Stand for ways to describe a model that this engine has not."""

from __future__ import annotations

from typing import ClassVar, Final, NoReturn

from paged_sdk import ConfigError

__all__ = ["REFUSED", "Refused"]

_WEIGHED: Final = (
    "a model with LoRA adapters that requests name: X-LoRA, which weighs them for each token, is not supported"
)


class Refused:
    """Stands for a way to describe a model that this engine has not: making one is an error.

    :cvar instead: what there is in its place
    """

    instead: ClassVar[str]

    def __new__(cls, *values: object, **settings: object) -> NoReturn:
        """Say so.

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
"""Classes that Which has by their names."""
