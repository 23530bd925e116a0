"""Scheduler: what each step computes, who waits, who is preempted, what is reported."""

from collections.abc import Iterable

import pytest

from engine.core.pins import PinSpec
from engine.core.request import Request, RequestRefused, SamplingParams
from engine.core.scheduler import SampledToken, Scheduler, SchedulerConfig, StepPlan, TokenOutput
from engine.core.sequence import Status, TokenLogprob
from engine.model.fake import FakeRunner, generate

SEED = b"s" * 16


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def prompt(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple((start + 7 * i) % 997 for i in range(length))


class Engine:
    """A scheduler with a fake runner and a clock of its own."""

    def __init__(self, **settings: object) -> None:
        defaults = {"num_blocks": 64, "max_seqs": 4, "max_step_tokens": 64, "context_length": 512}
        self.clock = Clock()
        self.config = SchedulerConfig(**{**defaults, **settings})
        self.scheduler = Scheduler(self.config, self.clock)
        self.runner = FakeRunner(num_blocks=self.config.num_blocks, block_size=self.config.block_size)
        self.outputs: dict[str, list[TokenOutput]] = {}

    def add(self, name: str, tokens: Iterable[int], max_tokens: int = 4, **more: object) -> None:
        params = {key: more.pop(key) for key in list(more) if key in SamplingParams.__slots__}
        asked = SamplingParams(max_tokens=max_tokens, **params)
        self.scheduler.add(Request(name, tuple(tokens), more.pop("chain", SEED), asked, **more))

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.clock.now += 0.5
            for output in self.scheduler.commit(plan, self.runner.execute(plan), 0.01):
                self.outputs.setdefault(output.request_id, []).append(output)
        self.scheduler.check()
        return plan

    def run(self) -> None:
        while self.step() is not None:
            pass

    def tokens(self, name: str) -> list[int | None]:
        return [output.token_id for output in self.outputs[name]]

    def names(self, plan: StepPlan | None) -> list[str]:
        assert plan is not None
        return [item.seq.request_id for item in plan.items]


def counts(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    assert plan is not None
    return [(item.seq.request_id, item.start, item.count, item.samples) for item in plan.items]


# ---- a request alone


def test_an_answer_is_the_runners_and_ends_with_length():
    engine = Engine()
    engine.add("a", prompt(20), max_tokens=5)
    engine.run()
    assert engine.tokens("a") == engine.runner.answer(prompt(20), 5)
    assert [output.finish_reason for output in engine.outputs["a"]] == [None] * 4 + ["length"]
    assert engine.scheduler.stats().used == 0
    assert not engine.scheduler.has_work


def test_a_long_prompt_is_computed_in_chunks_that_end_at_block_boundaries():
    engine = Engine(max_step_tokens=40)
    engine.add("a", prompt(75), max_tokens=2)
    assert counts(engine.step()) == [("a", 0, 32, False)]
    assert counts(engine.step()) == [("a", 32, 32, False)]
    assert counts(engine.step()) == [("a", 64, 11, True)]
    assert counts(engine.step()) == [("a", 75, 1, True)]


def test_a_stop_token_ends_the_answer_but_not_before_min_tokens():
    engine = Engine()
    answer = engine.runner.answer(prompt(20), 8)
    assert answer[1] != answer[4]
    stops = frozenset({answer[1], answer[4]})
    engine.add("a", prompt(20), max_tokens=8, stop_token_ids=stops)
    engine.add("b", prompt(20), max_tokens=8, stop_token_ids=stops, min_tokens=3)
    engine.run()
    assert engine.tokens("a") == answer[:2]
    assert engine.tokens("b") == answer[:5]
    assert engine.outputs["a"][-1].finish_reason == engine.outputs["b"][-1].finish_reason == "stop"


def test_the_context_ends_an_answer():
    engine = Engine(context_length=32)
    engine.add("a", prompt(30), max_tokens=50)
    engine.run()
    assert engine.tokens("a") == engine.runner.answer(prompt(30), 2)
    assert engine.outputs["a"][-1].finish_reason == "length"


@pytest.mark.parametrize("length", [(64 - 13 - 1) * 16 - 1, (64 - 13) * 16 - 1, (64 - 12) * 16 - 1, 52 * 16])
def test_prompts_around_the_pools_size_run_whatever_is_pinned(length):
    engine = Engine(context_length=4096)
    engine.scheduler.pin(PinSpec("p", prompt(12 * 16, start=500), SEED))
    engine.run()
    engine.add("a", prompt(length), max_tokens=2)
    engine.run()
    assert engine.tokens("a")[0] == engine.runner.answer(prompt(length), 1)[0]
    with pytest.raises(RequestRefused, match="KV pool"):
        engine.add("b", prompt(52 * 16 + 1))


def test_max_tokens_zero_computes_the_prompt_alone():
    engine = Engine()
    engine.add("a", prompt(20), max_tokens=0, prompt_logprobs=0)
    engine.run()
    (output,) = engine.outputs["a"]
    assert (output.token_id, output.finish_reason) == (None, "length")
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 20


def test_logprobs_are_passed_on():
    engine = Engine()
    engine.add("a", prompt(8), max_tokens=1, logprobs=2)
    engine.run()
    (output,) = engine.outputs["a"]
    assert output.logprob == TokenLogprob(-0.5, ((output.token_id, -0.5), (output.token_id + 1, -1.5)))
    assert output.prompt_logprobs is None


def test_prompt_logprobs_cover_every_position_across_chunks_cached_or_not():
    engine = Engine(max_step_tokens=32)
    engine.add("a", prompt(70), max_tokens=1)
    engine.run()
    engine.add("b", prompt(70), max_tokens=2, prompt_logprobs=1)
    engine.run()
    first, second = engine.outputs["b"]
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 70
    assert first.prompt_logprobs[0] is None
    assert [entry.top[0][0] for entry in first.prompt_logprobs[1:]] == list(prompt(70)[1:])
    assert second.prompt_logprobs is None
    assert first.first is not None and first.first.cached_tokens == 0
    assert engine.tokens("b")[0] == engine.tokens("a")[0]


def test_timings_say_where_the_time_went():
    engine = Engine(max_seqs=1, max_step_tokens=32)
    engine.add("a", prompt(16), max_tokens=2)
    engine.add("b", prompt(48, start=3), max_tokens=1)
    engine.run()
    timings = engine.outputs["b"][0].first
    assert timings is not None
    assert (timings.queue_s, timings.prefill_s) == (1.0, 1.0)
    assert (timings.cached_tokens, timings.prefill_tokens) == (0, 48)
    assert engine.outputs["a"][1].first is None


# ---- prefix cache


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_a_repeated_prompt_computes_its_last_block_only_and_answers_the_same(length):
    engine = Engine()
    for name in "abc":
        engine.add(name, prompt(length), max_tokens=20)
        engine.run()
    assert engine.tokens("a") == engine.tokens("b") == engine.tokens("c")
    cached = [engine.outputs[name][0].first.cached_tokens for name in "abc"]
    assert cached == [0] + [(length - 1) // 16 * 16] * 2
    assert engine.scheduler.stats().hit_tokens_total == sum(cached)
    assert engine.scheduler.stats().query_tokens_total == 3 * length


def test_the_next_turn_finds_the_answer_too():
    engine = Engine()
    engine.add("a", prompt(32), max_tokens=33)
    engine.run()
    longer = prompt(32) + tuple(engine.tokens("a")) + prompt(9, start=5)
    engine.add("b", longer, max_tokens=3)
    engine.run()
    assert engine.outputs["b"][0].first.cached_tokens == 64
    assert engine.tokens("b") == engine.runner.answer(longer, 3)


def test_another_seed_shares_nothing():
    engine = Engine()
    engine.add("a", prompt(40))
    engine.run()
    engine.add("b", prompt(40), chain=b"t" * 16)
    engine.run()
    assert engine.outputs["b"][0].first.cached_tokens == 0


def test_a_duplicate_waits_for_the_first_and_then_shares_its_blocks():
    engine = Engine(max_step_tokens=32)
    engine.add("a", prompt(96), max_tokens=9)
    engine.add("b", prompt(96) + (1, 2), max_tokens=3)
    engine.add("c", prompt(30, start=9), max_tokens=2)
    engine.step()
    assert [seq.request_id for seq in engine.scheduler._waiting] == ["b", "c"]
    engine.run()
    assert engine.outputs["b"][0].first.cached_tokens == 96
    assert engine.outputs["b"][0].first.prefill_tokens == 2
    assert engine.tokens("b") == engine.runner.answer(prompt(96) + (1, 2), 3)
    assert engine.scheduler.stats().computed_tokens_total == 96 + 8 + 2 + 2 + 30 + 1


def test_a_waiting_duplicate_does_not_hold_up_those_behind_it():
    engine = Engine(max_step_tokens=64)
    engine.add("a", prompt(48), max_tokens=2)
    engine.add("b", prompt(48), max_tokens=2)
    engine.add("c", prompt(10, start=9), max_tokens=2)
    assert engine.names(engine.step()) == ["a", "c"]


def test_a_duplicate_goes_on_when_the_first_is_aborted():
    engine = Engine(max_step_tokens=32)
    engine.add("a", prompt(96))
    engine.add("b", prompt(96))
    engine.step()
    assert engine.scheduler.abort("a")
    engine.run()
    assert engine.tokens("b") == engine.runner.answer(prompt(96), 4)
    assert engine.outputs["b"][0].first.cached_tokens == 32


def test_an_urgent_duplicate_does_not_wait_for_a_less_urgent_one():
    engine = Engine(max_step_tokens=32)
    engine.add("batch", prompt(96), priority=3, max_tokens=2)
    engine.step()
    engine.add("urgent", prompt(96), priority=0, max_tokens=2)
    assert engine.names(engine.step()) == ["urgent"]
    engine.run()
    assert engine.tokens("urgent") == engine.tokens("batch")
    assert engine.scheduler.stats().used == 0


def test_clear_forgets_cached_blocks_while_running_requests_go_on():
    engine = Engine()
    engine.add("a", prompt(40), max_tokens=30)
    engine.step()
    before = engine.scheduler.stats().epoch
    engine.scheduler.clear()
    engine.scheduler.check()
    assert engine.scheduler.stats().epoch == before + 1
    engine.add("b", prompt(40), max_tokens=2)
    engine.run()
    assert engine.outputs["b"][0].first.cached_tokens == 0
    assert engine.tokens("a") == engine.runner.answer(prompt(40), 30)
    assert engine.tokens("b") == engine.tokens("a")[:2]


def test_a_hash_collision_keeps_the_later_chain_out_of_the_cache(monkeypatch):
    def weak(seed, tokens, block_size=16, parent=None):
        return [bytes([tokens[at] % 2]) * 16 for at in range(0, len(tokens) // 64 * 64, 64)]

    monkeypatch.setattr("engine.core.block_table.block_hashes", weak)
    engine = Engine()
    prompts = [prompt(50, start=start) for start in range(8)]
    for round_ in range(2):
        for i, tokens in enumerate(prompts):
            engine.add(f"{round_}/{i}", tokens, max_tokens=6)
        engine.run()
    for i, tokens in enumerate(prompts):
        assert engine.tokens(f"0/{i}") == engine.tokens(f"1/{i}") == engine.runner.answer(tokens, 6)
    assert engine.scheduler.stats().collisions_total > 0


# ---- batching and order


def test_running_decodes_come_first_and_the_chunk_takes_what_is_left():
    engine = Engine(max_step_tokens=64)
    engine.add("a", prompt(20), max_tokens=9)
    engine.step()
    engine.add("b", prompt(200, start=1), max_tokens=2)
    plan = engine.step()
    assert counts(plan) == [("a", 20, 1, True), ("b", 0, 48, False)]
    assert (plan.num_tokens, plan.num_decodes) == (49, 1)


def test_a_step_never_exceeds_its_cap():
    engine = Engine(max_seqs=8, max_step_tokens=24, num_blocks=128)
    for i in range(12):
        engine.add(f"{i}", prompt(5 + 9 * i, start=i), max_tokens=6)
    while (plan := engine.step()) is not None:
        assert plan.num_tokens <= 24
        assert plan.num_tokens == sum(item.count for item in plan.items)
        assert all(item.count > 0 for item in plan.items)
    assert len(engine.outputs) == 12


def test_a_more_urgent_prompt_is_computed_before_one_that_is_underway():
    engine = Engine(max_step_tokens=32)
    engine.add("slow", prompt(200), priority=3, max_tokens=2)
    engine.step()
    engine.add("fast", prompt(30, start=1), priority=1, max_tokens=2)
    assert engine.names(engine.step())[0] == "fast"
    engine.run()
    assert engine.tokens("slow") == engine.runner.answer(prompt(200), 2)


def test_slots_limit_what_runs():
    engine = Engine(max_seqs=2)
    for i in range(3):
        engine.add(f"{i}", prompt(8, start=i))
    assert engine.names(engine.step()) == ["0", "1"]
    stats = engine.scheduler.stats()
    assert (stats.running, stats.waiting, stats.free_slots, stats.prefill_tokens_pending) == (2, 1, 0, 8)


# ---- preemption


def test_a_higher_class_takes_a_slot_from_the_newest_of_the_lowest_class():
    engine = Engine(max_seqs=3)
    engine.add("standard", prompt(20, 1), max_tokens=30)
    engine.add("old batch", prompt(20, 2), max_tokens=30, priority=3)
    engine.add("new batch", prompt(20, 3), max_tokens=30, priority=3)
    engine.step()
    engine.add("chat", prompt(20, 4), max_tokens=5, priority=1)
    assert set(engine.names(engine.step())) == {"chat", "standard", "old batch"}
    engine.run()
    for i, name in enumerate(["standard", "old batch", "new batch"], start=1):
        assert engine.tokens(name) == engine.runner.answer(prompt(20, i), 30)
    stats = engine.scheduler.stats()
    assert stats.preemptions_total == 1
    assert stats.hit_tokens_total == 0, "what a preempted request finds again is not a hit"
    assert stats.query_tokens_total == 80


def test_equal_classes_never_preempt_each_other_for_a_slot():
    engine = Engine(max_seqs=1)
    engine.add("a", prompt(20, 1), max_tokens=8)
    engine.step()
    engine.add("b", prompt(20, 2), max_tokens=8)
    engine.run()
    assert engine.scheduler.stats().preemptions_total == 0
    assert list(engine.outputs) == ["a", "b"]


def test_after_two_preemptions_a_request_keeps_its_slot():
    engine = Engine(max_seqs=1)
    engine.add("batch", prompt(20), max_tokens=12, priority=3)
    for i in range(3):
        engine.step()
        engine.add(f"chat {i}", prompt(20, i + 1), max_tokens=1, priority=0)
        engine.step()
    assert list(engine.outputs) == ["batch", "chat 0", "chat 1"]
    engine.run()
    assert list(engine.outputs)[-1] == "chat 2"
    assert engine.tokens("batch") == engine.runner.answer(prompt(20), 12)
    assert engine.scheduler.stats().preemptions_total == 2


def test_blocks_are_taken_from_lower_classes_too():
    engine = Engine(num_blocks=40, max_seqs=8, max_step_tokens=256)
    for i in range(3):
        engine.add(f"batch {i}", prompt(160, i), max_tokens=20, priority=3, ignore_eos=True)
    engine.step()
    engine.add("chat", prompt(200, 9), max_tokens=20, priority=1)
    engine.step()
    assert engine.scheduler.stats().preemptions_total > 0
    engine.run()
    assert engine.tokens("chat") == engine.runner.answer(prompt(200, 9), 20)
    for i in range(3):
        assert engine.tokens(f"batch {i}") == engine.runner.answer(prompt(160, i), 20)


def test_outputs_longer_than_expected_still_all_finish():
    engine = Engine(num_blocks=20, max_seqs=8, expected_output=4, pin_budget=0.0, max_step_tokens=128)
    for i in range(8):
        engine.add(f"{i}", prompt(30, i), max_tokens=120)
    engine.run()
    for i in range(8):
        assert engine.tokens(f"{i}") == engine.runner.answer(prompt(30, i), 120)
    stats = engine.scheduler.stats()
    assert stats.preemptions_total > 0
    assert stats.recomputed_tokens_total < stats.computed_tokens_total
    assert (stats.used, stats.total) == (0, stats.free + stats.cached)


def test_immune_sequences_give_way_only_when_nothing_else_can_move():
    engine = Engine(
        num_blocks=9, max_seqs=3, expected_output=1, pin_budget=0.0, max_preemptions=0, watermark=0
    )
    for i in range(3):
        engine.add(f"{i}", prompt(30, i), max_tokens=60)
    engine.run()
    for i in range(3):
        assert engine.tokens(f"{i}") == engine.runner.answer(prompt(30, i), 60)
    assert engine.scheduler.stats().preemptions_total > 0


def test_the_oldest_running_request_is_never_the_victim():
    engine = Engine(num_blocks=66, max_seqs=24, max_step_tokens=512, expected_output=16, pin_budget=0.0)
    for i in range(24):
        engine.add(f"{i}", prompt(300, i), max_tokens=200)
    first = next(iter(engine.scheduler._waiting))
    engine.run()
    assert first.preemptions == 0
    assert {output[-1].finish_reason for output in engine.outputs.values()} == {"length"}
    assert engine.tokens("23") == engine.runner.answer(prompt(300, 23), 200)


# ---- refusals, aborts, failures


def test_refusals_name_their_reason():
    engine = Engine(queue_limit=2, max_seqs=1)
    engine.add("a", prompt(8))
    with pytest.raises(RequestRefused, match="'a' is in use") as refusal:
        engine.add("a", prompt(8))
    assert refusal.value.code == "duplicate_request"
    engine.add("b", prompt(8))
    with pytest.raises(RequestRefused, match="2 requests wait already") as refusal:
        engine.add("c", prompt(8))
    assert refusal.value.code == "queue_full"
    assert engine.scheduler.stats().refused_total == 2
    engine.run()
    engine.add("a", prompt(8))
    engine.run()
    assert engine.tokens("a")[:4] == engine.tokens("a")[4:]


def test_a_deadline_refuses_only_what_was_not_started():
    engine = Engine(max_seqs=1)
    engine.add("a", prompt(8), max_tokens=6, deadline_ms=1)
    engine.step()
    engine.add("b", prompt(8, 1), deadline_ms=600)
    engine.run()
    assert len(engine.outputs["a"]) == 6
    assert "b" not in engine.outputs
    ((name, refusal),) = engine.scheduler.drain_refused()
    assert (name, refusal.code) == ("b", "deadline_exceeded")
    assert "600 ms" in str(refusal)
    assert engine.scheduler.drain_refused() == []


def test_an_abort_frees_the_blocks_wherever_the_request_is():
    engine = Engine(max_seqs=2, max_step_tokens=32)
    for i in range(3):
        engine.add(f"{i}", prompt(80, i), max_tokens=40)
    for _ in range(6):
        engine.step()
    statuses = [engine.scheduler._sequences[f"{i}"].status for i in range(3)]
    assert statuses == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    for i in range(3):
        assert engine.scheduler.abort(f"{i}")
        engine.scheduler.check()
    assert not engine.scheduler.abort("0")
    assert engine.scheduler.stats().used == 0
    assert engine.step() is None


def test_an_abort_between_plan_and_commit_is_not_undone():
    engine = Engine()
    engine.add("a", prompt(20))
    engine.add("b", prompt(20, 1))
    plan = engine.scheduler.plan()
    sampled = engine.runner.execute(plan)
    engine.scheduler.abort("a")
    outputs = engine.scheduler.commit(plan, sampled, 0.01)
    assert [output.request_id for output in outputs] == ["b"]
    engine.scheduler.check()


def test_a_failed_step_ends_its_requests_and_no_others():
    engine = Engine(max_seqs=2)
    for i in range(3):
        engine.add(f"{i}", prompt(20, i))
    plan = engine.scheduler.plan()
    engine.scheduler.abort("1")
    (output,) = engine.scheduler.fail(plan, "out of memory")
    assert output == TokenOutput("0", None, "error", message="out of memory")
    assert engine.scheduler.stats().cached == 0, "blocks of a failed step are never reused"
    engine.run()
    assert list(engine.outputs) == ["2"]


def test_a_token_that_is_not_finite_ends_its_request_with_an_error():
    engine = Engine()
    engine.add("a", prompt(20))
    plan = engine.scheduler.plan()
    (output,) = engine.scheduler.commit(plan, [SampledToken(-1)], 0.01)
    assert (output.token_id, output.finish_reason) == (None, "error")
    assert "not finite" in str(output.message)
    engine.scheduler.check()


def test_results_must_match_the_plan():
    engine = Engine()
    engine.add("a", prompt(20))
    plan = engine.scheduler.plan()
    with pytest.raises(ValueError, match="0 results for the 1 items"):
        engine.scheduler.commit(plan, [], 0.01)


def test_stats_add_up():
    engine = Engine()
    for i in range(6):
        engine.add(f"{i}", prompt(40, i % 3), max_tokens=5)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.free + stats.cached + stats.used == stats.total == 64
    assert stats.generated_tokens_total == 30
    assert stats.finished_total == 6
    parts = stats.prefill_tokens_total + stats.decode_tokens_total + stats.warm_tokens_total
    assert stats.computed_tokens_total == parts
    assert stats.prefill_tokens_total == stats.query_tokens_total - stats.hit_tokens_total


def test_generate_drives_a_scheduler_to_its_end():
    engine = Engine()
    engine.add("a", prompt(20))
    outputs = generate(engine.scheduler, engine.runner)
    assert [output.token_id for output in outputs["a"]] == engine.runner.answer(prompt(20), 4)


def test_a_sequence_describes_itself_in_logs():
    engine = Engine()
    engine.add("a", prompt(20))
    plan = engine.step()
    assert plan is not None
    assert repr(plan.items[0].seq) == "Sequence('a', running, 20/21 computed, 2 blocks)"
