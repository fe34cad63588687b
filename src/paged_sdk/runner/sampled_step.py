"""Collects the results of a step whose tokens are sampled on the device, and partly on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paged_sdk.kernels.transfer import HostCopies
from paged_sdk.runner.late_results import LateResults
from paged_sdk.runner.output import RunnerOutput
from paged_sdk.sampling.device_sampler import Drawn
from paged_sdk.sampling.failures import not_finite

__all__ = ["SampledStep"]


class SampledStep:
    """Implements :class:`~paged_sdk.runner.output.PendingStep` for tokens that are copied from the device to the host.

    :param late: the known results, and pending results other than tokens
    :param rows: the row of each token
    :param drawn: the tokens sampled on the device
    :param overlaps: whether the next step reads these tokens on the device
    :param early_rows: rows whose tokens or errors are in the results before the device finishes
    :param withheld_rows: rows that the host samples in :meth:`result`
    :param sample_withheld: samples them, and writes to ``late.output``
    """

    def __init__(
        self,
        late: LateResults,
        rows: Sequence[int],
        drawn: Drawn,
        *,
        overlaps: bool,
        early_rows: Sequence[int] = (),
        withheld_rows: Sequence[int] = (),
        sample_withheld: Callable[[], None] | None = None,
    ) -> None:
        self.overlaps = overlaps
        self.early_rows = early_rows
        self.withheld_rows = withheld_rows
        self._sample_withheld = sample_withheld
        self._late = late
        self._rows = rows
        self._logprob_rows = None if drawn.logprobs is None else drawn.logprobs[0]
        self._copies = HostCopies(drawn.tokens, *(() if drawn.logprobs is None else drawn.logprobs[1]))

    def early_result(self) -> RunnerOutput:
        """Return the results of the early rows. The late results of host-sampled rows are complete by then: the device
        computes them before the logits that the host has waited for.
        """
        self._late.finish(self.early_rows)
        return self._late.output

    def result(self) -> RunnerOutput:
        """Wait for the device, without holding the GIL, and return the results of all rows."""
        self._late.finish()
        if self._sample_withheld is not None:
            self._sample_withheld()
        tokens, *logprobs = self._copies.wait()
        output, token_ids = self._late.output, tokens.tolist()
        for row, token in zip(self._rows, token_ids, strict=True):
            if token >= 0:
                output.token_ids[row] = [token]
            else:
                output.failed[row] = not_finite(self._late.scheduled[row].sequence.request)
        if self._logprob_rows is not None:
            chosen, values, likeliest = logprobs
            places = self._logprob_rows.rows
            entries = self._logprob_rows.entries([token_ids[place] for place in places], (chosen, values, likeliest))
            for place, entry in zip(places, entries, strict=True):
                if token_ids[place] >= 0:
                    output.logprobs[self._rows[place]] = [entry]
        return output
