"""The scheduler's settings as one frozen value; every limit that admission enforces is derived here.

What must always hold: a request whose blocks fit in `capacity_blocks` can run when nothing else does, because
pins never hold more than `pin_budget_blocks`. So nothing that was accepted can wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes in tokens or blocks, shares of the pool in [0, 1), times in seconds.

    `max_step_tokens` caps decodes and prefill chunk of one step together; `target_step_s` is how long a step
    with running decodes should take. `expected_output` is the least output that admission assumes for a
    request that may produce more. `warm_rank` is where pins warm: after standard (4), before batch (6).
    """

    num_blocks: int
    block_size: int = 16
    max_seqs: int = 16
    max_step_tokens: int = 256
    target_step_s: float = 0.2
    context_length: int = 8192
    vocab_size: int = 1 << 31
    watermark: float = 0.05
    pin_budget: float = 0.20
    queue_limit: int = 512
    expected_output: int = 256
    max_preemptions: int = 2
    warm_rank: int = 5
    warm_retry_s: float = 5.0
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.max_seqs + self.block_size:
            raise ValueError(
                f"max_step_tokens {self.max_step_tokens} leaves no room for a prefill chunk beside "
                f"{self.max_seqs} decodes; it must be at least {self.max_seqs + self.block_size}"
            )
        if self.num_blocks < 1 or self.capacity_blocks < 1:
            raise ValueError(f"a pool of {self.num_blocks} blocks leaves none outside the pin budget")

    @property
    def pin_budget_blocks(self) -> int:
        """Blocks that pins may hold together."""
        return int(self.num_blocks * self.pin_budget)

    @property
    def capacity_blocks(self) -> int:
        """Blocks that one request may count on, whatever is pinned."""
        return self.num_blocks - self.pin_budget_blocks

    @property
    def watermark_blocks(self) -> int:
        """Blocks kept free of admissions, for outputs longer than expected."""
        return int(self.num_blocks * self.watermark)

    @property
    def max_len(self) -> int:
        """Longest sequence, prompt and output: the context length, or what the pool can hold of it.

        The last token of a sequence is never written to the pool, hence the one beyond capacity.
        """
        return min(self.context_length, self.capacity_blocks * self.block_size + 1)


def rank_of(priority: int) -> int:
    """Position of a priority class in the order of service; odd ranks lie between classes."""
    return 2 * priority
