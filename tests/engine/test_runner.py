"""The runner on a small random model: plans in, tokens out, and what it does with bad ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.request import Request, SamplingParams
from engine.core.sequence import Sequence, SequenceStep, Status, StepPlan, TokenLogprob
from engine.model import runner as runner_module
from engine.model.random_model import Shape, write_random_model
from engine.model.runner import Runner, resolve_dtype
from engine.model.store import ModelError

PROMPT = tuple(range(40, 90))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_random_model(directory, Shape(), seed=3)
    return directory


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> Runner:
    return Runner(model_dir, dtype="fp32", num_blocks=64, block_size=4, max_tokens_per_step=64)


@pytest.fixture(autouse=True)
def _flush_denormals_only_in_the_runner() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)


def sequence(prompt: tuple[int, ...] = PROMPT, blocks: range = range(16), **params: Any) -> Sequence:
    request = Request(
        f"r{blocks.start}", prompt, b"\0" * 16, SamplingParams(**{"temperature": 0.0, **params})
    )
    seq = Sequence(request, rank=0, order=0, arrival_s=0.0, limit=1000)
    seq.block_table = list(blocks)
    return seq


def plan(*items: SequenceStep) -> StepPlan:
    return StepPlan(items, sum(item.count for item in items), sum(item.count == 1 for item in items))


def generate(runner: Runner, seq: Sequence, count: int) -> list[int]:
    """Greedy tokens, the prompt in one step."""
    start = 0
    for _ in range(count):
        (token,) = runner.execute(plan(SequenceStep(seq, start, len(seq.tokens) - start, True)))
        assert token is not None
        start = len(seq.tokens)
        seq.tokens.append(token.token_id)
    return seq.tokens[seq.prompt_len :]


def test_facts_about_the_model(runner: Runner) -> None:
    assert (runner.vocab_size, runner.context_length, runner.eos_ids) == (512, 1024, frozenset({2}))
    assert runner.kv_bytes_per_block == 2 * 4 * 2 * 2 * 32 * 4  # layers, block, k and v, heads, dim, bytes
    assert runner.fingerprint.endswith("-fp32")
    runner.warm_up()


def test_a_mixed_batch_gives_each_sequence_its_own_tokens(runner: Runner) -> None:
    prompts = [PROMPT, PROMPT[:17], (5, 6, 7), (9,)]
    alone = [generate(runner, sequence(prompt), 6) for prompt in prompts]
    seqs = [sequence(prompt, range(16 * i, 16 * i + 16)) for i, prompt in enumerate(prompts)]
    runner.execute(
        plan(*[SequenceStep(seq, 0, seq.prompt_len - 1, False) for seq in seqs if seq.prompt_len > 1])
    )
    for _ in range(6):
        tokens = runner.execute(plan(*[SequenceStep(seq, len(seq.tokens) - 1, 1, True) for seq in seqs]))
        for seq, token in zip(seqs, tokens, strict=True):
            assert token is not None
            seq.tokens.append(token.token_id)
    assert [seq.tokens[seq.prompt_len :] for seq in seqs] == alone


def test_only_sampling_items_yield_tokens(runner: Runner) -> None:
    first, second = sequence(), sequence(blocks=range(16, 32))
    results = runner.execute(plan(SequenceStep(first, 0, 30, False), SequenceStep(second, 0, 50, True)))
    assert results[0] is None
    assert results[1] is not None
    assert runner.execute(plan(SequenceStep(first, 30, 10, False))) == [None]


def test_prompt_logprobs_do_not_depend_on_the_chunks(runner: Runner) -> None:
    whole = runner.execute(plan(SequenceStep(sequence(prompt_logprobs=3), 0, 50, True)))[0]
    assert whole is not None
    assert whole.prompt_logprobs is not None
    seq = sequence(prompt_logprobs=3)
    entries: list[TokenLogprob | None] = []
    for start, count in [(0, 20), (20, 1), (21, 29)]:
        (part,) = runner.execute(plan(SequenceStep(seq, start, count, start + count == 50)))
        assert part is not None
        assert part.prompt_logprobs is not None
        assert (part.token_id == -1) == (start + count < 50)
        entries.extend(part.prompt_logprobs)
    assert len(entries) == len(whole.prompt_logprobs) == 50
    assert entries[0] is None
    assert whole.prompt_logprobs[0] is None
    for entry, expected in zip(entries[1:], whole.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert expected is not None
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert [token for token, _ in entry.top] == [token for token, _ in expected.top]


def test_prompt_logprobs_agree_with_sampling(runner: Runner) -> None:
    seq = sequence(prompt_logprobs=1)
    runner.execute(plan(SequenceStep(seq, 0, 50, True)))
    shorter = sequence(PROMPT[:-1], logprobs=1)
    (token,) = runner.execute(plan(SequenceStep(shorter, 0, 49, True)))
    (scored,) = runner.execute(plan(SequenceStep(sequence(prompt_logprobs=1), 0, 50, True)))
    assert token is not None
    assert scored is not None
    assert scored.prompt_logprobs is not None
    last = scored.prompt_logprobs[-1]
    assert last is not None
    assert last.top[0][0] == token.token_id
    assert last.top[0][1] == pytest.approx(token.logprob, abs=1e-4)


def test_an_abandoned_prompt_leaves_nothing_behind(runner: Runner) -> None:
    gone = sequence(prompt_logprobs=1)
    runner.execute(plan(SequenceStep(gone, 0, 10, False)))
    gone.status = Status.FINISHED
    other = sequence(prompt_logprobs=1, blocks=range(16, 32))
    runner.execute(plan(SequenceStep(other, 0, 10, False)))
    assert list(runner._tails) == ["r16"]
    runner.execute(plan(SequenceStep(other, 10, 40, True)))
    assert not runner._tails


def test_not_finite_logits_fail_one_sequence(tmp_path: Path) -> None:
    write_random_model(tmp_path, Shape(tied=False), seed=3)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, path)
    broken = Runner(tmp_path, dtype="fp32", num_blocks=64, block_size=4)
    good, bad = sequence(), sequence((3, 7, 5), range(16, 32))
    tokens = broken.execute(plan(SequenceStep(bad, 0, 3, True), SequenceStep(good, 0, 50, True)))
    assert tokens[0] is not None
    assert tokens[0].token_id == -1
    assert tokens[1] is not None
    assert tokens[1].token_id >= 0


@pytest.mark.parametrize("token_id", [-1, 512, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_named(runner: Runner, token_id: int) -> None:
    seq = sequence((1, 2, token_id, 4))
    message = rf"request r0: token id {token_id} at position 2 is outside the vocabulary \(0 to 511\)"
    with pytest.raises(ValueError, match=message):
        runner.execute(plan(SequenceStep(seq, 0, 4, True)))


def test_rows_beyond_tokens_context_or_blocks_are_refused(runner: Runner) -> None:
    with pytest.raises(ValueError, match="rows 40 to 59 go beyond its 50 tokens"):
        runner.execute(plan(SequenceStep(sequence(), 40, 20, True)))
    with pytest.raises(ValueError, match="the model's 1024 positions"):
        runner.execute(plan(SequenceStep(sequence((1,) * 1030), 1020, 10, True)))
    with pytest.raises(ValueError, match="50 positions need 13 blocks of 4; the table has 2"):
        runner.execute(plan(SequenceStep(sequence(blocks=range(2)), 0, 50, True)))


def test_dtype_follows_the_cpu_and_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "cpu_flags", lambda: frozenset({"avx512f", "amx_bf16"}))
    assert resolve_dtype("auto", "fast") == "bf16"
    assert resolve_dtype("auto", "exact") == "fp32"
    assert resolve_dtype("fp32", "fast") == "fp32"
    monkeypatch.setattr(runner_module, "cpu_flags", lambda: frozenset({"avx512f"}))
    assert resolve_dtype("auto", "fast") == "fp32"
    with pytest.raises(ModelError, match="exact mode computes in fp32"):
        resolve_dtype("bf16", "exact")


def test_bf16_runs_end_to_end(model_dir: Path) -> None:
    half = Runner(model_dir, dtype="bf16", num_blocks=16, block_size=4)
    half.warm_up()
    assert half.kv_bytes_per_block == 2 * 4 * 2 * 2 * 32 * 2
    assert len(generate(half, sequence(), 3)) == 3


def test_exact_mode_refuses_a_process_that_is_not_reproducible(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "rows_are_independent", lambda: False)
    with pytest.raises(ModelError, match="MKL_CBWR"):
        Runner(model_dir, mode="exact", num_blocks=8)
