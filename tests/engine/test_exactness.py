"""`exact` mode in a process started as the engine starts its own: equal bits however a sequence is computed.

The test starts this file as a program, because MKL reads its settings once, when torch is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig, cpu_flags, step_environment
from engine.core.request import Request, SamplingParams
from engine.core.sequence import Sequence, SequenceStep, StepPlan
from engine.model.random_model import Shape, write_random_model
from engine.model.runner import Runner

LENGTHS = (1, 63, 64, 65, 200)
WAYS = 12


@pytest.mark.parametrize("threads", [1, 2])
def test_whole_chunked_cached_and_batched_are_equal_bit_for_bit(tmp_path: Path, threads: int) -> None:
    write_random_model(tmp_path, Shape(hidden_size=320, intermediate_size=1280, num_layers=3), seed=6)
    config = EngineConfig(mode="exact", threads=threads)
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(threads)],
        env=step_environment(config, os.environ, cpu_flags())
        | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    digests: dict[str, list[str]] = json.loads(done.stdout)
    assert len(digests) == len(LENGTHS)
    for length, found in digests.items():
        assert len(found) == WAYS + 1
        assert set(found) == {found[0]}, f"{length} tokens: {len(set(found))} different results"


class Probe:
    """Computes sequences in many ways and digests the logits of their last position."""

    def __init__(self, directory: Path, threads: int) -> None:
        self.runner = Runner(directory, mode="exact", num_blocks=256, threads=threads)
        self.rng = random.Random(11)
        self.neighbour = self.sequence(self.tokens(250))
        self.computed = 0

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(512) for _ in range(count))

    def sequence(self, prompt: tuple[int, ...]) -> Sequence:
        params = SamplingParams(temperature=0.0, logprobs=20)
        seq = Sequence(
            Request("probe", prompt, b"\0" * 16, params), rank=0, order=0, arrival_s=0.0, limit=999
        )
        seq.block_table = self.rng.sample(range(100, 256), -(-len(prompt) // 16))
        return seq

    def digest(self, prompt: tuple[int, ...], largest: int, batched: bool) -> str:
        """Prompt computed in random chunks of up to `largest`, beside another sequence when `batched`."""
        seq = self.sequence(prompt)
        start = 0
        while start < len(prompt):
            count = min(self.rng.randint(1, largest), len(prompt) - start)
            items = [SequenceStep(seq, start, count, start + count == len(prompt))]
            if batched:
                step = self.rng.randint(1, 9)
                self.computed = 0 if self.computed + step > 250 else self.computed
                self.neighbour.block_table = list(range(20))
                items.insert(self.rng.randint(0, 1), SequenceStep(self.neighbour, self.computed, step, True))
                self.computed += step
            results = self.runner.execute(StepPlan(tuple(items), sum(item.count for item in items), 0))
            start += count
        result = next(token for item, token in zip(items, results, strict=True) if item.seq is seq)
        assert result is not None
        return hashlib.sha256(repr((result.token_id, result.logprob, result.top)).encode()).hexdigest()

    def digests(self, length: int) -> list[str]:
        prompt = self.tokens(length)
        found = [self.digest(prompt, 10**6, False)]
        for way in range(WAYS):
            largest = self.rng.choice([1, 7, 64, 97]) if length < 100 else self.rng.choice([30, 64, 97])
            found.append(self.digest(prompt, largest, way % 2 == 0))
        return found


if __name__ == "__main__":
    probe = Probe(Path(sys.argv[1]), int(sys.argv[2]))
    assert torch.get_num_threads() == int(sys.argv[2])
    print(json.dumps({str(length): probe.digests(length) for length in LENGTHS}))
