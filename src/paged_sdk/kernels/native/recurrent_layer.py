"""Describes what a decoder layer has in the place of attention to the native library: ``csrc/recurrent.h``."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.linear import check_weights
from paged_sdk.kernels.native.projection import Projection
from paged_sdk.kernels.native.recurrent import NativeGatedDelta, NativeMamba2, NativeShortConv
from paged_sdk.kernels.native.structures import Recurrent

__all__ = ["RecurrentMixing"]


@frozen(eq=False, kw_only=True)
class RecurrentMixing:
    """Holds a short convolution and what follows it, with the states of both.

    :ivar conv: the convolution, with SiLU if something follows it, and otherwise between gates
    :ivar rule: what follows the convolution; None: nothing
    :ivar rates: project to the rule's :attr:`~NativeGatedDelta.num_rates`, if it has any: one matrix, or two
    :ivar states: the inputs that the convolution keeps, ``[num_slots, kernel_size - 1 + most_drafts, channels]``; with
        a rule its states, ``[num_slots, ...]`` float32, and the inputs that it keeps of drafts, ``[num_slots,
        most_drafts, ...]`` float32
    """

    conv: NativeShortConv
    rule: NativeGatedDelta | NativeMamba2 | None = None
    rates: tuple[Projection, ...] = ()
    states: tuple[Tensor, ...]

    @property
    def input_width(self) -> int:
        """Return what the layer projects to, apart from rates: the gates and the convolution's inputs, and for
        Mamba-2 step sizes.
        """
        return 3 * self.conv.channels if self.rule is None else self.rule.input_width

    @property
    def width(self) -> int:
        """Return the width of the result."""
        return self.conv.channels if self.rule is None else self.rule.width

    @property
    def most_drafts(self) -> int:
        """Return for how many drafts of a row the states have room."""
        return self.conv.most_drafts(self.states[0])

    def check(self, hidden_size: int) -> None:
        """Check that all shapes fit.

        :raises ConfigError: they do not
        """
        if len(self.states) != (1 if self.rule is None else 3):
            raise ConfigError.of("states", len(self.states), "one tensor, and two others with a rule")
        if self.rule is not None and self.rule.channels != self.conv.channels:
            raise ConfigError.of("conv.channels", self.conv.channels, f"{self.rule.channels}, as the rule has")
        due = 0 if self.rule is None else self.rule.num_rates
        found = [each.shape for each in self.rates]
        if sum(rows for rows, _ in found) != due or any(cols != hidden_size for _, cols in found) or len(found) > 2:
            raise ConfigError.of("rates", found, f"{due} rows of {hidden_size} columns, in at most two matrices")
        if self.rates:
            check_weights([each.weight for each in self.rates])

    def describe(self, target: Recurrent) -> list[Tensor | None]:
        """Fill the C structure, and return what must outlive it besides this object and the matrices."""
        target.conv = self.conv.describe(self.states[0])
        match self.rule:
            case NativeGatedDelta() as rule:
                target.delta = rule.describe(*self.states[1:])
            case NativeMamba2() as rule:
                target.scan = rule.describe(*self.states[1:])
        target.num_rates = len(self.rates)
        return [rates.describe(place) for place, rates in zip(target.rates, self.rates, strict=False)]
