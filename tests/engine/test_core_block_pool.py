"""Block pool: who holds a block, and which one is reused next."""

import pytest

from engine.core.block_pool import BlockList, BlockPool, OutOfBlocks, Retention


def cached(pool: BlockPool, kind: Retention, count: int) -> list[int]:
    """`count` blocks taken and given back in order, worth `kind`."""
    blocks = [pool.take() for _ in range(count)]
    for block in blocks:
        pool.retain(block, kind)
        pool.release(block)
    return blocks


def test_a_list_keeps_order_and_removes_from_the_middle():
    blocks = BlockList(4)
    for block in (2, 0, 3):
        blocks.push_back(block)
    blocks.push_front(1)
    blocks.remove(0)
    assert list(blocks) == [1, 2, 3]
    assert len(blocks) == 3
    assert 0 not in blocks and 2 in blocks
    assert blocks.front() == 1


def test_an_empty_list_answers_its_sentinel():
    assert BlockList(3).front() == 3


def test_blocks_are_numbered_from_zero_and_run_out():
    pool = BlockPool(3)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    assert (pool.free, pool.cached, pool.used, pool.available) == (0, 0, 3, 0)
    with pytest.raises(OutOfBlocks, match="all 3 blocks are held"):
        pool.take()


def test_the_last_freed_scratch_block_is_reused_first():
    pool = BlockPool(3)
    a, b = pool.take(), pool.take()
    pool.release(a)
    pool.release(b)
    assert [pool.take(), pool.take(), pool.take()] == [b, a, 2]


def test_scratch_goes_before_cached_and_cached_by_age():
    pool = BlockPool(4, prompt_lead=0)
    first, second = cached(pool, Retention.PROMPT, 2)
    assert (pool.free, pool.cached) == (2, 2)
    assert pool.take() not in (first, second)
    assert pool.take() not in (first, second)
    assert [pool.take(), pool.take()] == [first, second]


def test_prompt_blocks_outlive_output_blocks_released_up_to_their_lead_later():
    pool = BlockPool(6, prompt_lead=2)
    prompts = cached(pool, Retention.PROMPT, 2)
    blocks = [pool.take() for _ in range(4)]
    for block in blocks:
        pool.retain(block, Retention.OUTPUT)
        pool.release(block)
    # prompts were released at ticks 1, 2 and count as 3, 4; outputs at 3..6: equal ticks favour the prompt
    assert pool.eviction_order() == [blocks[0], prompts[0], blocks[1], prompts[1], blocks[2], blocks[3]]
    assert [pool.take() for _ in range(6)] == [blocks[0], prompts[0], blocks[1], prompts[1], *blocks[2:]]


def test_holding_takes_a_block_out_of_reuse_until_the_last_release():
    pool = BlockPool(2)
    (block,) = cached(pool, Retention.OUTPUT, 1)
    pool.hold(block)
    pool.hold(block)
    assert pool.refs(block) == 2
    pool.release(block)
    assert pool.used == 1
    pool.release(block)
    assert (pool.used, pool.cached) == (0, 1)


def test_retention_is_only_raised():
    pool = BlockPool(1)
    block = pool.take()
    pool.retain(block, Retention.PROMPT)
    pool.retain(block, Retention.OUTPUT)
    assert pool.retention(block) is Retention.PROMPT


def test_taking_a_cached_block_makes_it_scratch_again():
    pool = BlockPool(1)
    (block,) = cached(pool, Retention.PROMPT, 1)
    assert pool.take() == block
    assert pool.retention(block) is Retention.SCRATCH
    pool.release(block)
    assert (pool.free, pool.cached) == (1, 0)


def test_discarding_frees_a_cached_block_and_marks_a_held_one():
    pool = BlockPool(2)
    (block,) = cached(pool, Retention.PROMPT, 1)
    pool.discard(block)
    assert (pool.free, pool.cached) == (2, 0)
    held = pool.take()
    pool.retain(held, Retention.PROMPT)
    pool.discard(held)
    pool.release(held)
    assert pool.free == 2
    pool.check()


def test_check_notices_a_block_released_twice():
    pool = BlockPool(2)
    block = pool.take()
    pool.release(block)
    pool._refs[block] = -1
    with pytest.raises(AssertionError, match="released more often"):
        pool.check()
