"""Prefill rates: token-weighted, robust to nonsense."""

import pytest

from gateway.routing.rates import DEFAULT_TOKENS_PER_S, PrefillRate, pool_median


def test_small_reports_hardly_move_a_learned_rate():
    rate = PrefillRate()
    rate.learn(4_000, 2.0)
    for _ in range(10):
        rate.learn(10, 0.05)  # 200 tokens/s: mostly overhead
    assert rate.tokens_per_s == pytest.approx(1_640, rel=0.01)


def test_a_changed_machine_is_followed():
    rate = PrefillRate()
    rate.learn(4_000, 2.0)
    for _ in range(20):
        rate.learn(4_000, 8.0)
    assert rate.tokens_per_s == pytest.approx(500, rel=0.01)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(0, 1.0), (-5, 1.0), (10, 0.0), (10, -1.0), (10, float("nan"))]
)
def test_nonsense_is_ignored(tokens, seconds):
    rate = PrefillRate()
    rate.learn(tokens, seconds)
    assert rate.tokens_per_s is None


def test_median_of_the_known():
    assert pool_median([None, 100.0, 300.0, 200.0]) == 200.0
    assert pool_median([None, None]) == DEFAULT_TOKENS_PER_S
