"""Writes what was drawn so that a person can read it."""

from __future__ import annotations

from typing import Any

from attrs import NOTHING, Factory, fields, has

from combinations.configuration import Configuration
from combinations.script import Script

__all__ = ["described"]


def described(configuration: Configuration, script: Script) -> str:
    """Describe a combination: all of the model, and of each request what is not as usual."""
    model = ", ".join(f"{each.name}={getattr(configuration, each.name)!r}" for each in fields(Configuration))
    adapters = ", ".join(f"{name}: {content}" for name, content in script.adapters.items())
    lines = [f"model: {model}", f"adapters: {adapters or 'none'}"]
    lines.append(f"event loop: {script.backend}; requests come {'together' if script.come_together else 'one by one'}")
    return "\n".join([*lines, *(f"  {_short(event)}" for event in script.events)])


def _short(value: Any) -> str:
    """Return a value as its class writes it, but for what is left at its default."""
    if not has(type(value)):
        return repr(value)
    told = []
    for each in fields(type(value)):
        own, usual = getattr(value, each.name), each.default
        usual = usual.factory() if isinstance(usual, Factory) and not usual.takes_self else usual  # type: ignore[arg-type]
        if each.init and each.repr and (usual is NOTHING or own != usual):
            told.append(f"{each.name}={_short(own)}")
    return f"{type(value).__name__}({', '.join(told)})"
