"""Slots, queues and the order of dispatch."""

from __future__ import annotations

import asyncio
import random

import pytest

from gateway.admission import PoolGate, Ticket
from gateway.errors import ApiError
from policies import PriorityClass


def classes(*, timeout_s: float = 5.0, limit: int = 100, batch_share: float = 0.2) -> list[PriorityClass]:
    return [
        PriorityClass("interactive", 0, 0.5, limit, timeout_s),
        PriorityClass("standard", 1, 0.2, limit, timeout_s),
        PriorityClass("batch", 2, batch_share, limit, timeout_s),
    ]


async def waiting(gate: PoolGate, class_name: str) -> asyncio.Task[Ticket]:
    task = asyncio.create_task(gate.admit(class_name))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_a_free_slot_is_given_at_once() -> None:
    gate = PoolGate(classes(), lambda: 2)
    first, second = await gate.admit("batch"), await gate.admit("batch")
    assert gate.in_use == 2
    first.release()
    first.release()
    assert gate.in_use == 1
    second.release()
    gate.check()


async def test_rank_decides_who_is_next() -> None:
    gate = PoolGate(classes(batch_share=0.0), lambda: 1)
    held = await gate.admit("interactive")
    batch = await waiting(gate, "batch")
    standard = await waiting(gate, "standard")
    interactive = await waiting(gate, "interactive")
    assert gate.waiting == {"interactive": 1, "standard": 1, "batch": 1}
    held.release()
    order = []
    for _ in range(3):
        done, _ = await asyncio.wait(
            {batch, standard, interactive} - set(order), timeout=1, return_when="FIRST_COMPLETED"
        )
        (task,) = done
        order.append(task)
        task.result().release()
    assert order == [standard, interactive, batch] or order == [interactive, standard, batch]
    assert order[-1] is batch
    gate.check()


async def test_each_class_gets_its_share_under_contention() -> None:
    gate = PoolGate(classes(), lambda: 10)
    held = [await gate.admit("interactive") for _ in range(10)]
    tasks = [await waiting(gate, name) for name in ["interactive"] * 30 + ["batch"] * 30]
    for ticket in held:
        ticket.release()
    await asyncio.sleep(0)
    running = [task for task in tasks if task.done()]
    batch = sum(task in tasks[30:] for task in running)
    assert len(running) == 10
    assert batch == 2  # its share of ten
    for task in tasks:
        (await task).release()
    assert gate.in_use == 0
    gate.check()


async def test_a_full_queue_refuses() -> None:
    gate = PoolGate(classes(limit=1), lambda: 1)
    ticket = await gate.admit("batch")
    task = await waiting(gate, "batch")
    with pytest.raises(ApiError) as refused:
        await gate.admit("batch")
    assert (refused.value.status, refused.value.code) == (503, "queue_full")
    ticket.release()
    (await task).release()


async def test_patience_ends() -> None:
    gate = PoolGate(classes(timeout_s=0.02), lambda: 1)
    ticket = await gate.admit("batch")
    with pytest.raises(ApiError) as refused:
        await gate.admit("standard")
    assert refused.value.code == "queue_timeout"
    assert gate.waiting["standard"] == 0
    ticket.release()
    gate.check()


async def test_cancelled_waiters_leave_no_trace() -> None:
    gate = PoolGate(classes(), lambda: 1)
    ticket = await gate.admit("batch")
    tasks = [await waiting(gate, "standard") for _ in range(3)]
    tasks[0].cancel()
    ticket.release()  # goes to the second, whose task is cancelled before it runs
    tasks[1].cancel()
    await asyncio.gather(*tasks[:2], return_exceptions=True)
    (await tasks[2]).release()
    assert gate.in_use == 0
    gate.check()


async def test_a_limit_that_grows_lets_waiters_in() -> None:
    limit = 0
    gate = PoolGate(classes(), lambda: limit)
    task = await waiting(gate, "batch")
    assert not task.done()
    limit = 1
    gate.dispatch()
    (await task).release()


async def test_a_new_policys_classes_take_over() -> None:
    gate = PoolGate(classes(), lambda: 1)
    ticket = await gate.admit("batch")
    gate.replace_classes([PriorityClass("urgent", 0, 1.0, 10, 1.0), PriorityClass("batch", 1, 0.0, 0, 1.0)])
    with pytest.raises(ApiError):
        await gate.admit("batch")
    task = await waiting(gate, "urgent")
    ticket.release()
    (await task).release()
    gate.check()


async def test_random_traffic_keeps_the_invariant() -> None:
    rng = random.Random(7)
    gate = PoolGate(classes(timeout_s=0.01), lambda: 3)

    async def one(name: str) -> None:
        try:
            ticket = await gate.admit(name)
        except ApiError:
            return
        try:
            await asyncio.sleep(rng.random() * 0.004)
        finally:
            ticket.release()

    tasks = [asyncio.create_task(one(rng.choice(["interactive", "standard", "batch"]))) for _ in range(300)]
    for task in rng.sample(tasks, 80):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert gate.in_use == 0
    assert not any(gate.waiting.values())
    gate.check()
