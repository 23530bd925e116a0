"""Where each row of a step belongs: which sequence, which positions, which slots of the paged cache.

Built once a step from plain integers and shared by all layers. A span is one sequence's rows; its blocks
cover every position up to its last row. Blocks that happen to follow each other in the pool are read in
place, others are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [row, row + count) of a step: positions [context, context + count) of one sequence.

    `blocks` [ceil((context + count) / block_size)] int64 is the block table as far as it is needed;
    `first_slot` is the slot of position 0 when those blocks are consecutive, else None.
    """

    row: int
    count: int
    context: int
    blocks: Tensor
    first_slot: int | None

    @property
    def length(self) -> int:
        """Positions that the last row attends to."""
        return self.context + self.count


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step: `slots` [rows] int64 is where each row's key and value go; `positions` [rows] int64."""

    spans: tuple[Span, ...]
    positions: Tensor
    slots: Tensor

    def narrowed(self, rows: Sequence[int]) -> AttentionBatch:
        """The batch of only `rows` (ascending), each as a span of one; the others' keys must be in the
        cache.
        """
        spans: list[Span] = []
        owners = iter(self.spans)
        span = next(owners, None)
        for new_row, row in enumerate(rows):
            while span is not None and row >= span.row + span.count:
                span = next(owners, None)
            if span is None:
                raise IndexError(f"row {row} is beyond the batch")
            context = span.context + row - span.row
            spans.append(Span(new_row, 1, context, span.blocks, span.first_slot))
        chosen = torch.tensor(rows, dtype=torch.int64)
        return AttentionBatch(tuple(spans), self.positions[chosen], self.slots[chosen])


def attention_batch(items: Sequence[tuple[Sequence[int], int, int]], block_size: int) -> AttentionBatch:
    """The batch of `items` = (block table, first position, number of rows), in row order.

    ValueError when a table is too short for its rows.
    """
    spans: list[Span] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    row = 0
    for table, context, count in items:
        length = context + count
        needed = -(-length // block_size)
        if len(table) < needed:
            raise ValueError(
                f"{length} positions need {needed} blocks of {block_size}; the table has {len(table)}"
            )
        blocks = np.array(table[:needed], dtype=np.int64)
        consecutive = needed == 1 or bool((np.diff(blocks) == 1).all())
        where = np.arange(context, length, dtype=np.int64)
        positions.append(where)
        slots.append(blocks[where // block_size] * block_size + where % block_size)
        first_slot = int(blocks[0]) * block_size if consecutive else None
        spans.append(Span(row, count, context, torch.from_numpy(blocks), first_slot))
        row += count
    return AttentionBatch(
        spans=tuple(spans),
        positions=torch.from_numpy(np.concatenate(positions)),
        slots=torch.from_numpy(np.concatenate(slots)),
    )
