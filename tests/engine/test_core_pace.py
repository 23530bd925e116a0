"""Pace: chunk sizes from measured rates."""

from engine.core.pace import Pace


def test_an_idle_engine_takes_the_whole_cap():
    assert Pace(cap=256, target_s=0.2, block_size=16).budget(0) == 256


def test_before_any_measurement_chunks_beside_decodes_are_small():
    assert Pace(cap=256, target_s=0.2, block_size=16).budget(3) == 64


def test_a_chunk_fills_the_target_time_in_whole_blocks():
    pace = Pace(cap=256, target_s=0.2, block_size=16)
    pace.observe(4, 0, 0.05)
    pace.observe(0, 200, 0.2)
    assert pace.prefill_tokens_per_s == 1000
    assert pace.decode_step_s == 0.05
    assert pace.budget(4) == 144


def test_a_chunk_is_never_less_than_a_block_nor_more_than_the_cap():
    pace = Pace(cap=64, target_s=0.1, block_size=16)
    pace.observe(4, 0, 0.5)
    pace.observe(0, 160, 0.1)
    assert pace.budget(4) == 16
    fast = Pace(cap=64, target_s=0.1, block_size=16)
    fast.observe(0, 64, 0.001)
    assert fast.budget(10) == 54


def test_a_mixed_step_is_charged_for_its_decodes():
    pace = Pace(cap=256, target_s=0.2, block_size=16)
    pace.observe(4, 0, 0.1)
    pace.observe(4, 100, 0.2)
    assert round(pace.prefill_tokens_per_s) == 1000
    pace.observe(4, 100, 0.05)
    assert pace.prefill_tokens_per_s > 1000, "a step faster than its decodes still counts"


def test_rates_move_towards_new_measurements_and_ignore_useless_ones():
    pace = Pace(cap=256, target_s=0.2, block_size=16)
    pace.observe(1, 0, 0.1)
    pace.observe(1, 0, 0.2)
    assert abs(pace.decode_step_s - 0.13) < 1e-9
    pace.observe(1, 3, 0.2)
    pace.observe(1, 64, 0.0)
    assert pace.prefill_tokens_per_s == 0
