"""Means, paired differences, and the sentence about batch sizes."""

import math

import pytest
from scipy.special import stdtrit

from fullbatch.evaluation.metric_names import named_numbers
from fullbatch.trials.comparison import guessing_of
from fullbatch.trials.statistics import Guessing, Spread, half_interval, match, paired, student_t

# Means 4, 6, 8 at 64, 128, 512, each with the standard deviation sqrt(0.02).
BASELINE = {size: Spread((mean - 0.1, mean + 0.1)) for size, mean in ((64, 4.0), (128, 6.0), (512, 8.0))}


def said(*values, baseline=BASELINE, up=True):
    return match("neuclip", 128, Spread(values), "openclip", baseline, up)


def test_mean_and_spread():
    assert Spread((1.0, 2.0, 6.0)).mean == 3.0
    assert Spread((1.0, 2.0, 6.0)).sd == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert Spread((1.0,)).sd is None


def test_the_interval_of_a_mean_is_by_students_t():
    for degrees in range(1, 201):
        assert student_t(degrees, 0.95) == pytest.approx(stdtrit(degrees, 0.975), rel=1e-9, abs=1e-9), degrees
    assert student_t(1, 0.5) == pytest.approx(1.0)
    assert half_interval(2.0, 4) == pytest.approx(stdtrit(3, 0.975))


def test_differences_are_seed_by_seed():
    difference = paired({0: 3.0, 1: 5.0, 2: 9.0}, {1: 4.0, 0: 1.0})
    assert difference.values == (2.0, 1.0)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_it_matches_within_one_combined_deviation():
    found = said(7.9, 8.1)
    assert (found.matches, found.text) == (512, "neuclip at 128 matches openclip at 512")
    combined = math.hypot(math.sqrt(0.02), math.sqrt(0.02))
    assert said(8.0 + combined - 0.1 - 1e-9, 8.0 + combined + 0.1 - 1e-9).matches == 512
    assert said(8.0 + combined - 0.1 + 1e-9, 8.0 + combined + 0.1 + 1e-9).matches is None


def test_it_beats_every_tested_size():
    found = said(8.9, 9.1)
    assert (found.matches, found.about) == (None, None)
    assert found.text == "neuclip at 128 beats openclip at every tested batch size (up to 512)"
    only = said(8.9, 9.1, baseline={128: BASELINE[128]})
    assert only.text == "neuclip at 128 beats openclip at 128, the only one tested"


def test_it_stays_below():
    assert said(2.9, 3.1).text == "neuclip at 128 stays below openclip at 64"


def test_between_two_sizes_it_is_interpolated_over_the_logarithm():
    found = said(6.9, 7.1)
    assert found.matches is None and found.about == pytest.approx(256.0)
    assert found.text == "neuclip at 128 lies between openclip at 128 and at 512, about 256"


def test_a_wide_spread_is_said():
    found = said(5.0, 9.0)
    assert found.matches == 128
    assert found.text == "neuclip at 128 matches openclip at 128 (and is within the spread of 512 too)"


def test_what_is_near_to_all_says_nothing():
    found = said(1.0, 12.0)
    assert found.matches is None
    assert found.text == "neuclip at 128 cannot be told apart from openclip at 64, 128 and 512: the spread is larger"


def test_one_seed_never_matches():
    found = said(8.0)
    assert found.matches is None
    level = "neuclip at 128 lies level with openclip at 512"
    assert found.text == f"{level}; one seed of neuclip at 128, so the spread is not known"
    single = {size: Spread((spread.mean,)) for size, spread in BASELINE.items()}
    between = said(7.0, 7.0, baseline=single).text
    assert between.endswith("about 256; one seed of openclip at 128 and 512, so the spread is not known")
    beats = said(9.0, baseline=single).text
    cells = "of neuclip at 128 and of openclip at 64, 128 and 512"
    assert beats.startswith("neuclip at 128 beats") and beats.endswith(
        f"; one seed {cells}, so the spread is not known"
    )


def test_seeds_of_other_cells_do_not_matter():
    def one_seed_at(size):
        return {**BASELINE, size: Spread((BASELINE[size].mean,))}

    assert said(6.9, 7.1, baseline=one_seed_at(64)).text.endswith("about 256")
    assert said(6.9, 7.1, baseline=one_seed_at(512)).text.endswith(
        "; one seed of openclip at 512, so the spread is not known"
    )
    assert said(2.9, 3.1, baseline=one_seed_at(512)).text == "neuclip at 128 stays below openclip at 64"
    assert "one seed of openclip at 64," in said(2.9, 3.1, baseline=one_seed_at(64)).text
    assert "one seed of openclip at 64," in said(8.9, 9.1, baseline=one_seed_at(64)).text, "it beats that one too"


def test_where_less_is_better():
    ranks = {64: Spread((9.9, 10.1)), 128: Spread((4.9, 5.1))}
    assert "beats openclip at every" in said(1.9, 2.1, baseline=ranks, up=False).text
    assert said(19.0, 19.2, baseline=ranks, up=False).text == "neuclip at 128 is worse than openclip at 64"
    assert said(7.4, 7.6, baseline=ranks, up=False).about == pytest.approx(2**6.5)


def test_a_baseline_that_does_not_rise():
    falling = {64: Spread((7.9, 8.1)), 128: Spread((5.9, 6.1)), 512: Spread((8.9, 9.1))}
    assert said(6.9, 7.1, baseline=falling).about == pytest.approx(2**6.5)
    assert said(2.0, 2.1, baseline=falling).text == "neuclip at 128 stays below openclip at 128"


# One answer in a hundred is right by guessing, 400 images are asked for: 1 % ± 0.5 % of one run is nothing.
GUESSING = Guessing(0.01, 400)
AT_CHANCE = {64: Spread((0.009, 0.012)), 128: Spread((0.011, 0.01))}


def guessed(*values, baseline=AT_CHANCE, guessing=GUESSING):
    return match("neuclip", 128, Spread(values), "openclip", baseline, True, guessing)


def test_two_arms_at_chance_do_not_match():
    neither = "neither neuclip at 128 nor openclip at 64 and 128 is above chance (1 %)"
    for values in ((0.01, 0.011), (0.014, 0.0141), (0.008, 0.0081), (0.012,)):
        found = guessed(*values)
        assert (found.matches, found.about, found.text) == (None, None, neither), values
    assert guessed(0.01, 0.011, guessing=None).text.startswith("neuclip at 128 cannot be told apart"), "not known"


def test_a_baseline_above_chance_is_named():
    rising = {**AT_CHANCE, 512: Spread((0.2, 0.21))}
    assert guessed(0.01, 0.011, baseline=rising).text == (
        "neither neuclip at 128 nor openclip at 64 and 128 is above chance (1 %); openclip at 512 is"
    )
    only = {512: Spread((0.2, 0.21))}
    assert guessed(0.01, 0.011, baseline=only).text == "neuclip at 128 stays below openclip at 512"


def test_what_is_above_chance_may_beat_what_is_not():
    assert guessed(0.2, 0.21).text == "neuclip at 128 beats openclip at every tested batch size (up to 128)"


def test_above_chance_is_beyond_the_noise_of_guessing_and_the_spread_of_seeds():
    assert not GUESSING.beaten_by(Spread((0.0199,))) and GUESSING.beaten_by(Spread((0.0201,))), "two deviations"
    assert GUESSING.beaten_by(Spread((0.018, 0.018))), "of two runs less"
    assert not GUESSING.beaten_by(Spread((0.005, 0.05))), "a collapsed model guesses one class: right or wrong by luck"


def test_a_run_whose_results_are_lost_has_no_numbers():
    """results.json may be damaged; then it reads as nothing."""
    assert named_numbers({}) == {} and guessing_of({}, "retrieval:x mean_r1") is None
