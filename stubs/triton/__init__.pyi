"""What the kernels call of Triton, which ships no types."""

from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from . import language as language

_P = ParamSpec("_P")
_T = TypeVar("_T")

__version__: str

class JITFunction(Generic[_P]):
    """A kernel: ``kernel[grid](*arguments, **constants_and_options)`` launches it."""

    def __getitem__(
        self, grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]
    ) -> Callable[..., Any]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

@overload
def jit(fn: Callable[_P, Any]) -> JITFunction[_P]: ...
@overload
def jit(
    *, do_not_specialize: Iterable[int | str] | None = None, noinline: bool | None = None
) -> Callable[[Callable[_P, Any]], JITFunction[_P]]: ...
def constexpr_function(f: Callable[_P, _T]) -> Callable[_P, _T]: ...
def cdiv(x: int, y: int) -> int: ...
def next_power_of_2(n: int) -> int: ...
