"""Waiting queue: class first, then arrival; deadlines reported once."""

from engine.core.request import Request, SamplingParams
from engine.core.sequence import Sequence
from engine.core.waiting import WaitingQueue


def sequence(rank: int, order: int) -> Sequence:
    request = Request(f"{rank}/{order}", (1,), b"", SamplingParams())
    return Sequence(request, rank=rank, order=order, arrival_s=0.0, limit=9)


def test_urgent_classes_come_first_then_earlier_arrivals():
    queue = WaitingQueue()
    for rank, order in [(4, 1), (2, 3), (4, 2), (0, 9)]:
        queue.push(sequence(rank, order))
    assert [seq.request_id for seq in queue] == ["0/9", "2/3", "4/1", "4/2"]
    assert len(queue) == 4


def test_a_sequence_that_returns_gets_its_old_place():
    queue = WaitingQueue()
    early, late = sequence(4, 1), sequence(4, 2)
    queue.push(late)
    queue.push(early)
    queue.remove(late)
    assert list(queue) == [early]
    assert early in queue and late not in queue


def test_deadlines_pass_once_and_only_for_those_never_started():
    queue = WaitingQueue()
    waiting, started, gone = sequence(4, 1), sequence(4, 2), sequence(4, 3)
    for seq in (waiting, started, gone):
        queue.push(seq)
        queue.set_deadline(seq, 5.0)
    started.started_s = 1.0
    queue.remove(gone)
    assert queue.expired(4.9) == []
    assert queue.expired(5.0) == [waiting]
    assert queue.expired(9.0) == []
