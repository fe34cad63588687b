"""What is believed of guesses, after some were right or wrong."""

from __future__ import annotations

from paged_sdk.speculative.acceptance import FAR, NEAR, START, Acceptance, evidence


def test_more_agreeing_tokens_are_more_evidence() -> None:
    rates = Acceptance().rates
    for origin in (NEAR, FAR):
        assert sorted(found := [rates[evidence(origin, run)] for run in range(60)]) == found
    assert evidence(NEAR, 30) == evidence(FAR, 30) == evidence(START, 30)


def test_a_text_differs_from_others_soon_and_tells_them_slowly() -> None:
    shared = Acceptance()
    one, other = Acceptance(shared), Acceptance(shared)
    kind = evidence(FAR, 20)
    before = shared.rates[kind]
    for _ in range(20):
        one.note(kind, right=False)
    other.note(kind, right=True)
    assert one.rates[kind] < 0.2
    assert before / 3 < shared.rates[kind] < before
    assert other.rates[kind] > shared.rates[kind]
    assert Acceptance(shared).rates[kind] == shared.rates[kind]


def test_what_was_long_ago_is_forgotten() -> None:
    shared = Acceptance()
    for right in (False, True):
        for _ in range(2000):
            shared.note(0, right=right)
        assert abs(shared.rates[0] - right) < 0.01
