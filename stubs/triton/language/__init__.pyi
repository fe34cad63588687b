"""A kernel's body is Triton's own language, checked by Triton's compiler: here everything in it is Any."""

from typing import Any, TypeAlias

constexpr: TypeAlias = Any
tensor: TypeAlias = Any

def __getattr__(name: str) -> Any: ...
