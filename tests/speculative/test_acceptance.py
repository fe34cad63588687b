"""What is believed of guesses, after some were right or wrong."""

from __future__ import annotations

from paged_sdk.speculative.acceptance import FAR, NEAR, START, Acceptance, TextAcceptance, evidence


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


def test_a_text_that_does_not_repeat_is_known_by_any_kind_of_guess() -> None:
    shared = Acceptance()
    for kind in range(len(shared.rates)):
        for count in range(2000):
            shared.note(kind, right=count % 20 > 0)
    text = TextAcceptance(shared)
    for kind in (evidence(NEAR, 0), evidence(FAR, 2), evidence(NEAR, 1)) * 2:
        text.note(kind, right=False)
    for kind in (evidence(FAR, 20), evidence(NEAR, 3)):  # no guess of these kinds was wrong
        assert text.rates[kind] < 0.6 < 0.94 < shared.rates[kind]


def test_a_new_text_is_doubted_until_guesses_are_right() -> None:
    shared = Acceptance()
    text = TextAcceptance(shared)
    kind = evidence(NEAR, 3)
    assert text.rates[kind] < shared.rates[kind] - 0.1
    for _ in range(4):
        text.note(evidence(FAR, 4), right=True)
    assert text.rates[kind] > shared.rates[kind]


def test_a_text_that_changes_is_believed_again() -> None:
    text = TextAcceptance(Acceptance())
    kind = evidence(FAR, 20)
    for _ in range(300):
        text.note(kind, right=False)
    assert text.rates[kind] < 0.05
    for _ in range(60):
        text.note(kind, right=True)
    assert text.rates[kind] > 0.9
    assert all(0 < rate < 1 for rate in text.rates)
