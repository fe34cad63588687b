"""What rank 0 sends to the other ranks arrives there as it was."""

from __future__ import annotations

import marshal

import numpy as np
from attrs import evolve, fields

from paged_sdk.parallel.messages import StepReader, StepWriter
from paged_sdk.types.media import ImageSpan, PromptMedia
from paged_sdk.types.step import Step, StepRow


def test_every_field_of_a_row_arrives() -> None:
    image = ImageSpan(first_token=1, num_tokens=2, places=np.array([1, 2]), digest=b"", inputs={})
    row = StepRow(
        seq_id=7,
        start=3,
        token_ids=(5, 6),
        kv_ids=range(2, 4),
        num_prompt_tokens=4,
        kv_version=8,
        num_logits=2,
        num_drafts=1,
        is_long=True,
        adapter=9,
        adapter_start=1,
        media=PromptMedia(spans=(image,)),
        state_slot=3,
        second_part=2,
    )
    unset = [each.name for each in fields(StepRow) if getattr(row, each.name) == each.default]
    assert not unset, "the test must set every field"
    step = Step(rows=[row], copies=[(1, 2, 3)], state_copies=[(6, 7)], released=[4], finished_seq_ids=[5])
    message = marshal.loads(marshal.dumps(StepWriter().message(step, None)))
    got, inserted = StepReader().read(message)
    assert inserted is None
    (of_row,) = got.rows
    assert of_row.media is not None
    assert [span.places.tolist() for span in of_row.media.spans] == [[1, 2]]
    assert evolve(of_row, media=None) == evolve(row, token_ids=[5, 6], kv_ids=[2, 3], media=None)
    assert evolve(got, rows=[]) == evolve(step, rows=[])
