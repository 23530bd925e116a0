"""How many tokens a step may take, so that running decodes do not wait too long for a prefill chunk.

Owns two measured rates (exponentially weighted means): seconds of a step with decodes only, and prefill
tokens a second. What must always hold: a step may always take at least one block of prefill, so prompts
move on.
"""

from __future__ import annotations

#: Weight of a new measurement; the last three steps make up two thirds of the mean.
_WEIGHT = 0.3


class Pace:
    """Sizes prefill chunks: `cap` tokens a step at most, `target_s` seconds while decodes run."""

    def __init__(self, *, cap: int, target_s: float, block_size: int) -> None:
        self._cap = cap
        self._target_s = target_s
        self._block_size = block_size
        self.prefill_tokens_per_s = 0.0
        self.decode_step_s = 0.0

    def budget(self, num_decodes: int) -> int:
        """Prefill tokens that fit beside `num_decodes` decodes in one step."""
        room = self._cap - num_decodes
        if not num_decodes:
            return room
        if not self.prefill_tokens_per_s:
            return min(room, 4 * self._block_size)
        tokens = int(self.prefill_tokens_per_s * (self._target_s - self.decode_step_s))
        whole_blocks = tokens // self._block_size * self._block_size
        return min(room, max(whole_blocks, self._block_size))

    def observe(self, num_decodes: int, prefill_tokens: int, step_s: float) -> None:
        """Learn from a finished step; chunks below a block are too small to tell a rate."""
        if step_s <= 0:
            return
        if not prefill_tokens:
            self.decode_step_s = _mean(self.decode_step_s, step_s)
        elif prefill_tokens >= self._block_size:
            decode_s = self.decode_step_s if num_decodes else 0.0
            prefill_s = max(step_s - decode_s, 0.1 * step_s)
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, prefill_tokens / prefill_s)


def _mean(old: float, new: float) -> float:
    return new if not old else old + _WEIGHT * (new - old)
