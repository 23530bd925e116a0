"""Pins: resident under any pressure, within their budget, visible in every state."""

import pytest

from engine.core.pins import PinSpec
from engine.core.request import Request, RequestRefused, SamplingParams
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.model.fake import FakeRunner, generate

SEED = b"s" * 16


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tokens(blocks: float, start: int = 0) -> tuple[int, ...]:
    return tuple((start + 11 * i) % 991 for i in range(int(16 * blocks)))


class Engine:
    """64 blocks, of which 12 may be pinned."""

    def __init__(self, **settings: object) -> None:
        self.clock = Clock()
        config = SchedulerConfig(num_blocks=64, max_seqs=4, max_step_tokens=64, **settings)
        self.scheduler = Scheduler(config, self.clock)
        self.runner = FakeRunner(num_blocks=64)

    def pin(self, name: str, prefix: tuple[int, ...], **more: object) -> str:
        return self.scheduler.pin(PinSpec(name, prefix, SEED, **more)).state

    def request(self, name: str, prompt: tuple[int, ...], priority: int = 2) -> int:
        """Run one request to its end; its cached tokens."""
        self.scheduler.add(Request(name, prompt, SEED, SamplingParams(max_tokens=3), priority))
        outputs = self.run()[name]
        assert [output.token_id for output in outputs] == self.runner.answer(prompt, 3)
        assert outputs[0].first is not None
        return outputs[0].first.cached_tokens

    def run(self):
        outputs = generate(self.scheduler, self.runner)
        self.scheduler.check()
        return outputs

    @property
    def states(self) -> dict[str, str]:
        return {pin.id: pin.state for pin in self.scheduler.pins()}


def test_a_pin_warms_and_then_holds_its_full_blocks():
    engine = Engine()
    assert engine.pin("p", tokens(3.5), tenant="acme") == "warming"
    assert engine.run() == {}
    (status,) = engine.scheduler.pins()
    assert (status.state, status.tokens, status.blocks, status.computed_tokens) == ("resident", 56, 3, 48)
    assert (status.tenant, status.expires_in_s) == ("acme", None)
    stats = engine.scheduler.stats()
    assert (stats.pinned, stats.used, stats.pin_budget, stats.warm_tokens_total) == (3, 3, 12, 48)
    assert stats.query_tokens_total == 0
    assert engine.request("r", tokens(3.5)) == 48


def test_pinned_blocks_survive_a_storm():
    engine = Engine()
    engine.pin("p", tokens(12))
    for i in range(30):
        engine.request(f"{i}", tokens(10, start=i + 1))
        assert engine.states == {"p": "resident"}
    assert engine.scheduler.stats().evicted_blocks_total > 200
    assert engine.request("r", tokens(12) + (5,)) == 192


def test_what_is_cached_already_is_resident_at_once():
    engine = Engine()
    engine.request("r", tokens(4) + (1,))
    assert engine.pin("p", tokens(4)) == "resident"
    assert engine.scheduler.pins()[0].computed_tokens == 0


def test_a_pin_shorter_than_a_block_holds_nothing():
    engine = Engine()
    assert engine.pin("p", tokens(0.5)) == "resident"
    assert engine.scheduler.stats().used == 0


def test_over_budget_is_said_and_ends_when_room_appears():
    engine = Engine()
    assert engine.pin("a", tokens(8, 1)) == "warming"
    assert engine.pin("b", tokens(8, 2)) == "over_budget"
    engine.run()
    assert engine.states == {"a": "resident", "b": "over_budget"}
    assert engine.scheduler.unpin("a")
    assert engine.states == {"b": "warming"}
    engine.run()
    assert engine.states == {"b": "resident"}
    assert not engine.scheduler.unpin("a")


def test_shared_blocks_count_once_and_stay_for_the_other_pin():
    engine = Engine()
    assert engine.pin("a", tokens(10)) == "warming"
    assert engine.pin("b", tokens(11)) == "warming"
    engine.run()
    assert engine.scheduler.stats().pinned == 11
    engine.scheduler.unpin("a")
    engine.scheduler.check()
    assert engine.scheduler.stats().pinned == 11
    engine.scheduler.unpin("b")
    engine.scheduler.check()
    assert engine.scheduler.stats().used == 0
    assert engine.request("r", tokens(11) + (1,)) == 176, "released blocks are ordinary cached ones"


def test_the_same_pin_again_only_starts_its_time_anew():
    engine = Engine()
    engine.pin("p", tokens(2), ttl_s=10)
    engine.run()
    engine.clock.now = 8
    assert engine.pin("p", tokens(2), ttl_s=10) == "resident"
    assert engine.scheduler.pins()[0].expires_in_s == 10
    engine.clock.now = 17
    engine.scheduler.plan()
    assert engine.states == {"p": "resident"}
    engine.clock.now = 18
    engine.scheduler.plan()
    assert engine.states == {}
    assert engine.scheduler.stats().used == 0


def test_another_prefix_under_the_same_id_replaces_the_first():
    engine = Engine()
    engine.pin("p", tokens(2))
    engine.run()
    assert engine.pin("p", tokens(3, start=5)) == "warming"
    engine.run()
    assert engine.scheduler.stats().pinned == 3


def test_unpinning_while_warming_stops_the_prefill():
    engine = Engine()
    engine.pin("p", tokens(8))
    assert engine.scheduler.plan() is not None
    engine.scheduler.unpin("p")
    engine.scheduler.check()
    assert engine.scheduler.stats().used == 0
    assert engine.scheduler.plan() is None


def test_clear_sends_pins_back_to_warming_and_they_return():
    engine = Engine()
    engine.pin("p", tokens(4))
    engine.run()
    engine.pin("q", tokens(5, start=9))
    engine.scheduler.plan()
    engine.scheduler.clear()
    engine.scheduler.check()
    assert engine.states == {"p": "warming", "q": "warming"}
    assert engine.scheduler.stats().pinned == 0
    engine.run()
    assert engine.states == {"p": "resident", "q": "resident"}
    assert engine.request("r", tokens(4) + (1,)) == 64


def test_warming_goes_after_standard_and_before_batch():
    engine = Engine()
    engine.scheduler.add(Request("batch", tokens(8, 1), SEED, SamplingParams(max_tokens=1), 3))
    engine.pin("p", tokens(8, 2))
    engine.scheduler.add(Request("standard", tokens(8, 3), SEED, SamplingParams(max_tokens=1), 2))
    order = []
    while (plan := engine.scheduler.plan()) is not None:
        order += [item.seq.request_id for item in plan.items if item.seq.request_id not in order]
        engine.scheduler.commit(plan, engine.runner.execute(plan), 0.01)
    assert order == ["standard", "pin p", "batch"]


def test_a_failed_warming_is_tried_again_later():
    engine = Engine(warm_retry_s=5.0)
    engine.pin("p", tokens(4))
    plan = engine.scheduler.plan()
    assert engine.scheduler.fail(plan, "broken") == []
    engine.scheduler.check()
    assert engine.scheduler.plan() is None
    assert engine.states == {"p": "warming"}
    engine.clock.now = 5.1
    engine.run()
    assert engine.states == {"p": "resident"}


def test_a_warming_pin_waits_for_a_request_that_fills_its_blocks():
    engine = Engine()
    engine.scheduler.add(Request("r", tokens(8), SEED, SamplingParams(max_tokens=2), 2))
    engine.pin("p", tokens(8))
    engine.run()
    (status,) = engine.scheduler.pins()
    assert (status.state, status.computed_tokens) == ("resident", 0)


def test_a_pin_whose_hashes_collide_keeps_trying_and_says_warming(monkeypatch):
    monkeypatch.setattr(
        "engine.core.block_table.block_hashes",
        lambda seed, data, size=16, parent=None: [bytes([i]) * 16 for i in range(len(data) // (4 * size))],
    )
    engine = Engine()
    engine.request("r", tokens(2, 1) + (1,))
    engine.pin("p", tokens(2, 2))
    engine.run()
    assert engine.states == {"p": "warming"}


@pytest.mark.parametrize(
    ("prefix", "code"),
    [((1, -5), "invalid_request"), (tuple([1] * 8192), "context_length_exceeded")],
)
def test_what_cannot_be_pinned_is_refused(prefix, code):
    engine = Engine(vocab_size=1000)
    with pytest.raises(RequestRefused) as refusal:
        engine.pin("p", prefix)
    assert refusal.value.code == code
    assert engine.states == {}
