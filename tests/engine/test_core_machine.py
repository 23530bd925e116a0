"""The whole core under random use: invariants after every step, every answer equal to the unloaded one."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from engine.core.pins import PinSpec
from engine.core.request import Request, RequestRefused, SamplingParams
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.core.sequence import TokenOutput
from engine.model.fake import FakeRunner

SEEDS = (b"s" * 16, b"t" * 16)
BLOCK = 4

#: Prompts start with one of few prefixes, so that sharing, duplicates and full hits are common.
prompts = st.builds(
    lambda prefix, length, tail: tuple((prefix * 31 + i) % 61 for i in range(length)) + tuple(tail),
    st.integers(0, 2),
    st.sampled_from([1, 3, 4, 8, 15, 16, 24, 40]),
    st.lists(st.integers(0, 60), max_size=6),
)


class CoreMachine(RuleBasedStateMachine):
    """Adds, aborts, steps, failures, pins and clears in any order, on a pool that is too small."""

    @initialize(
        blocks=st.sampled_from([14, 20, 40]),
        slots=st.sampled_from([1, 3, 6]),
        step=st.sampled_from([10, 16, 64]),
        expected=st.sampled_from([1, 8, 64]),
        weak_hash=st.booleans(),
    )
    def start(self, blocks: int, slots: int, step: int, expected: int, weak_hash: bool) -> None:
        self.now = 0.0
        config = SchedulerConfig(
            num_blocks=blocks,
            block_size=BLOCK,
            max_seqs=slots,
            max_step_tokens=max(step, slots + BLOCK),
            context_length=80,
            vocab_size=64,
            expected_output=expected,
            queue_limit=12,
            warm_retry_s=0.1,
        )
        self.scheduler = Scheduler(config, lambda: self.now)
        self.runner = FakeRunner(num_blocks=blocks, block_size=BLOCK, vocab_size=64)
        if weak_hash:
            self._weaken()
        self.asked: dict[str, Request] = {}
        self.got: dict[str, list[int]] = {}
        self.done: set[str] = set()
        self.resident: set[bytes] = set()
        self.count = 0

    def _weaken(self) -> None:
        """Chain hashes of four values: nearly every two chains collide."""
        tables = self.scheduler._tables

        def chain(seq, blocks):
            while len(seq.hashes) < blocks:
                at = len(seq.hashes) * BLOCK
                seq.hashes.append(bytes([sum(seq.tokens[at : at + BLOCK]) % 4]) * 16)
            return seq.hashes

        tables.chain = chain  # the instance's own
        tables.hashes_of = lambda seed, ids: tuple(
            bytes([sum(ids[at : at + BLOCK]) % 4]) * 16 for at in range(0, len(ids) // BLOCK * BLOCK, BLOCK)
        )

    @rule(
        prompt=prompts,
        seed=st.sampled_from(SEEDS),
        max_tokens=st.sampled_from([1, 2, 5, 17, 40]),
        priority=st.integers(0, 3),
        ignore_eos=st.booleans(),
        deadline_ms=st.sampled_from([None, None, 200]),
        scored=st.sampled_from([None, None, None, 0]),
    )
    def add(self, prompt, seed, max_tokens, priority, ignore_eos, deadline_ms, scored) -> None:
        self.count += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, prompt_logprobs=scored)
        request = Request(f"r{self.count}", prompt, seed, params, priority, deadline_ms=deadline_ms)
        try:
            self.scheduler.add(request)
        except RequestRefused as refusal:
            assert refusal.code in ("queue_full", "context_length_exceeded")
        else:
            self.asked[request.request_id] = request
            self.got[request.request_id] = []

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.now += 0.03
            plan = self.scheduler.plan()
            self._drop_refused()
            if plan is None:
                return
            assert plan.num_tokens <= self.scheduler.config.max_step_tokens
            self._take(self.scheduler.commit(plan, self.runner.execute(plan), 0.01))
            self.scheduler.check()

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 10**6))
    def abort(self, pick: int) -> None:
        name = sorted(self.asked)[pick % len(self.asked)]
        assert self.scheduler.abort(name)
        del self.asked[name]
        assert not self.scheduler.abort(name)

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 10**6))
    def abort_during_a_step(self, pick: int) -> None:
        plan = self.scheduler.plan()
        self._drop_refused()
        if plan is None or not self.asked:
            return
        sampled = self.runner.execute(plan)
        self.abort(pick)
        self._take(self.scheduler.commit(plan, sampled, 0.01))

    @rule()
    def failing_step(self) -> None:
        plan = self.scheduler.plan()
        self._drop_refused()
        if plan is None:
            return
        self.runner.execute(plan)
        for output in self.scheduler.fail(plan, "broken"):
            assert output.finish_reason == "error"
            del self.asked[output.request_id]

    @rule(name=st.sampled_from("pqr"), prefix=prompts, ttl_s=st.sampled_from([None, 0.2, 5.0]))
    def pin(self, name: str, prefix: tuple[int, ...], ttl_s: float | None) -> None:
        status = self.scheduler.pin(PinSpec(name, prefix, SEEDS[0], ttl_s))
        assert status.state in ("warming", "resident", "over_budget")

    @rule(name=st.sampled_from("pqr"))
    def unpin(self, name: str) -> None:
        known = name in {pin.id for pin in self.scheduler.pins()}
        assert self.scheduler.unpin(name) == known

    @rule()
    def clear(self) -> None:
        self.scheduler.clear()
        assert self.scheduler.stats().cached == 0

    @invariant()
    def everything_adds_up(self) -> None:
        self.scheduler.check()
        stats = self.scheduler.stats()
        assert stats.free + stats.cached + stats.used == stats.total
        assert stats.pinned <= stats.pin_budget
        self._replay_events()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if not self.scheduler.has_work:
                break
            self.step(1)
        assert not self.asked, f"never finished: {sorted(self.asked)}"
        held = {block for pin in self.scheduler._pins for block in pin.blocks}
        assert self.scheduler.stats().used == len(held)
        self.everything_adds_up()

    def _take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            assert output.finish_reason in (None, "length")
            assert output.token_id is not None
            tokens = self.got[output.request_id]
            tokens.append(output.token_id)
            if output.finish_reason is None:
                continue
            request = self.asked.pop(output.request_id)
            limit = self.scheduler.config.max_len - len(request.token_ids)
            wanted = min(request.params.max_tokens, limit)
            assert tokens == self.runner.answer(request.token_ids, wanted)

    def _drop_refused(self) -> None:
        for name, refusal in self.scheduler.drain_refused():
            assert refusal.code == "deadline_exceeded"
            assert not self.got[name]
            del self.asked[name]

    def _replay_events(self) -> None:
        """The events tell exactly which hashes the cache holds, parents before children."""
        for event in self.scheduler.drain_events():
            match event:
                case BlockStored(hashes, parent, token_ids, block_size):
                    assert len(token_ids) == len(hashes) * block_size
                    assert parent is None or parent in self.resident
                    assert not self.resident & set(hashes)
                    self.resident |= set(hashes)
                case BlockRemoved(hashes):
                    assert self.resident >= set(hashes)
                    self.resident -= set(hashes)
                case AllBlocksCleared():
                    self.resident.clear()
        assert self.resident == set(self.scheduler._tables.cache._index)


CoreMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCore = CoreMachine.TestCase
