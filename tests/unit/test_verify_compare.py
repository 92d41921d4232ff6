"""When two answers are equal, when a difference is the reference's own, and what is said about it: cases by hand."""

from __future__ import annotations

import math

import pytest

from bench.verify.compare import Scores, Verdict, classify, compare, spread, worst

NEXT = math.nextafter


def scores(
    outputs: list[int], logprobs: list[float | None], *, inputs: list[float | None] | None = None, prompt: int = 100
) -> Scores:
    given = [-0.5, -0.25] if inputs is None else inputs
    return Scores(
        prompt_tokens=prompt,
        first_scored=prompt - len(given),
        input_logprobs=given,
        output_ids=outputs,
        output_logprobs=logprobs,
    )


REFERENCE = scores([7, 8, 9], [-1.0, -2.0, -3.0])


def test_the_same_bits_are_equal() -> None:
    found = compare(REFERENCE, scores([7, 8, 9], [-1.0, -2.0, -3.0]))
    assert found.equal
    assert (found.first_position, found.max_logprob_difference) == (None, 0.0)


def test_one_bit_of_one_number_is_a_difference() -> None:
    found = compare(REFERENCE, scores([7, 8, 9], [-1.0, NEXT(-2.0, 0), -3.0]))
    assert not found.equal
    assert (found.first_token, found.first_logprob) == (None, 101)
    assert found.max_logprob_difference == 2**-52  # one unit in the last place just below two


def test_positions_count_from_the_start_of_the_prompt() -> None:
    """Two prompt tokens are scored, at 98 and 99; the output begins at 100."""
    assert compare(REFERENCE, scores([7, 8, 9], [-1.0, -2.0, -3.0], inputs=[-0.5, -0.375])).first_position == 99
    assert compare(REFERENCE, scores([6, 8, 9], [-1.0, -2.0, -3.0])).first_position == 100


def test_numbers_behind_another_token_are_not_compared() -> None:
    """At 101 the answers speak of other tokens: only 98, 99 and 100 are comparable."""
    found = compare(REFERENCE, scores([7, 4, 9], [-1.125, -5.0, -8.0]))
    assert (found.first_token, found.first_logprob, found.max_logprob_difference) == (101, 100, 0.125)


def test_a_shorter_answer_differs_where_it_ends() -> None:
    assert compare(REFERENCE, scores([7, 8], [-1.0, -2.0])).first_token == 102
    assert compare(scores([7, 8], [-1.0, -2.0]), REFERENCE).first_token == 102


@pytest.mark.parametrize("other", [None, -1.0])
def test_a_missing_number_equals_nothing(other: float | None) -> None:
    found = compare(scores([7], [None]), scores([7], [other]))
    assert (found.first_logprob, found.max_logprob_difference) == (100, math.inf)


def test_answers_to_other_requests_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(100, 98, 2\) and \(101, 99, 2\)"):
        compare(REFERENCE, scores([7, 8, 9], [-1.0, -2.0, -3.0], prompt=101))
    with pytest.raises(ValueError, match="one request"):
        compare(REFERENCE, scores([7, 8, 9], [-1.0, -2.0, -3.0], inputs=[-0.25]))


def test_an_answer_equal_to_any_repeat_is_equal() -> None:
    repeats = [REFERENCE, scores([7, 8, 9], [-1.0, -2.0, -3.5])]
    assert classify(repeats, repeats[1]).verdict is Verdict.EQUAL


def test_repeats_that_agree_leave_no_room() -> None:
    outcome = classify([REFERENCE] * 5, scores([7, 8, 9], [-1.0, -2.0, NEXT(-3.0, 0)]))
    assert outcome.verdict is Verdict.DIFFERENT
    assert outcome.comparison.first_position == 102


@pytest.mark.parametrize(
    ("last", "verdict"),
    [(-3.25, Verdict.WITHIN), (-2.75, Verdict.WITHIN), (-4.0, Verdict.WITHIN), (-4.25, Verdict.DIFFERENT)],
)
def test_a_difference_no_larger_than_the_repeats_own_is_within(last: float, verdict: Verdict) -> None:
    """The repeats end with -3 and -3.5: half a unit apart. -4 is half a unit from the nearer one, -4.25 is more."""
    repeats = [REFERENCE, scores([7, 8, 9], [-1.0, -2.0, -3.5])]
    assert spread(repeats) == 0.5
    assert classify(repeats, scores([7, 8, 9], [-1.0, -2.0, last])).verdict is verdict


def test_tokens_that_no_repeat_has_are_different_whatever_the_bound() -> None:
    other = scores([7, 8, 5], [-1.0, -2.0, -3.0])
    assert classify([REFERENCE], other, bound=100.0).verdict is Verdict.DIFFERENT
    varied = scores([7, 8, 5], [-1.0, -2.0, -2.5])
    assert classify([REFERENCE, varied], other, bound=1.0).verdict is Verdict.WITHIN


def test_a_bound_counts_where_the_repeats_show_nothing() -> None:
    near = scores([7, 8, 9], [-1.0, -2.0, -3.0625])
    assert classify([REFERENCE], near, bound=0.0625).verdict is Verdict.WITHIN
    assert classify([REFERENCE], near, bound=0.03).verdict is Verdict.DIFFERENT
    assert classify([REFERENCE], scores([7, 8, 9], [-1.0, -2.0, None]), bound=1e9).verdict is Verdict.DIFFERENT


def test_the_closest_repeat_is_reported() -> None:
    """Against the first repeat it parts at 100, against the second at 102."""
    repeats = [scores([1, 8, 9], [-1.0, -2.0, -3.0]), REFERENCE]
    assert classify(repeats, scores([7, 8, 1], [-1.0, -2.0, -3.0])).comparison.first_token == 102


def test_worst_of_verdicts() -> None:
    assert worst([]) is Verdict.NOT_EXERCISED
    assert worst([Verdict.EQUAL, Verdict.WITHIN]) is Verdict.WITHIN
    assert worst([Verdict.DIFFERENT, Verdict.NOT_EXERCISED, Verdict.EQUAL]) is Verdict.DIFFERENT
