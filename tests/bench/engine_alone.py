"""The bundled engine alone, without HTTP: right first, then how fast, beside `transformers` in the same
process.

    python tests/bench/engine_alone.py [--json FILE] [--model DIR] [--threads 1 2] [--runs 5]
                                       [--parts exact fast]

Child processes, each started with the environment of the engine's own step process. `exact`: greedy output
against transformers (fp32) on 20 prompts of 5 to 1,500 tokens, and the engine against itself: cold, cached,
chunked, batched, log-probabilities compared bit for bit. `fast`, once for each number of threads: decode at
batch 1, 4 and 8, prefill of 1,024 tokens, and a 2,048-token prompt cold and cached; ours and the peer's runs
take turns, and the median of each counts (on a shared machine only the ratio carries over). Everything goes
through the scheduler.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from engine.config import EngineConfig, cpu_flags, step_environment  # noqa: E402

MODEL = Path("~/.cache/warmfront/models/smollm2-135m-instruct").expanduser()
LENGTHS = (5, 9, 17, 33, 50, 64, 65, 100, 128, 200, 256, 257, 300, 400, 512, 640, 800, 1000, 1250, 1500)
OUTPUT = 16
GAP = 1e-3
SEED = b"\0" * 16


def prompts(model_dir: Path, lengths: Iterable[int]) -> list[tuple[int, ...]]:
    """English text (docstrings of the standard library), cut to these numbers of tokens, all different."""
    from tokenizers import Tokenizer

    names = (
        "argparse",
        "asyncio",
        "collections",
        "datetime",
        "decimal",
        "email",
        "json",
        "logging",
        "pathlib",
    )
    parts: list[str] = []
    for module in map(import_module, names):
        parts += [inspect.getdoc(module) or ""]
        parts += [inspect.getdoc(value) or "" for _, value in sorted(vars(module).items()) if callable(value)]
    text = "\n\n".join(dict.fromkeys(part for part in parts if len(part) > 60))
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return [tuple(ids[97 * i : 97 * i + length]) for i, length in enumerate(lengths)]


class Engine:
    """Scheduler and runner in this process."""

    def __init__(self, runner: Any, *, max_seqs: int = 16, max_step_tokens: int = 256) -> None:
        from engine.core.scheduler import Scheduler, SchedulerConfig

        self.runner = runner
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=runner.num_blocks,
                block_size=runner.block_size,
                max_seqs=max_seqs,
                max_step_tokens=max_step_tokens,
                target_step_s=10.0,
                context_length=runner.context_length,
                vocab_size=runner.vocab_size,
            )
        )

    def run(self, requests: Iterable[Any]) -> tuple[dict[str, list[Any]], list[float]]:
        """Outputs of each request, and the seconds of each step."""
        outputs: dict[str, list[Any]] = {}
        for request in requests:
            self.scheduler.add(request)
            outputs[request.request_id] = []
        steps: list[float] = []
        while (plan := self.scheduler.plan()) is not None:
            start = time.perf_counter()
            sampled = self.runner.execute(plan)
            steps.append(time.perf_counter() - start)
            for output in self.scheduler.commit(plan, sampled, steps[-1]):
                outputs[output.request_id].append(output)
        self.scheduler.drain_events()
        return outputs, steps


def request(name: str, token_ids: Sequence[int], max_tokens: int, logprobs: int | None = None) -> Any:
    from engine.core.request import Request, SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=logprobs)
    return Request(name, tuple(token_ids), SEED, params)


def transformers_model(model_dir: Path) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def peer_greedy(model: Any, batch: list[tuple[int, ...]], count: int) -> tuple[list[Any], list[float]]:
    """transformers' own greedy loop with its cache: logits of each step, and the seconds of each step."""
    import torch

    ids, cache, logits, seconds = torch.tensor(batch), None, [], []
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer releases call the argument `cache`
        for _ in range(count):
            start = time.perf_counter()
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            seconds.append(time.perf_counter() - start)
            logits.append(out.logits[:, -1])
    return logits, seconds


# ---- children


def check_exact(model_dir: Path, threads: int) -> list[dict[str, Any]]:
    from engine.model.runner import Runner

    runner = Runner(model_dir, mode="exact", num_blocks=600, threads=threads)
    runner.warm_up()
    peer = transformers_model(model_dir)
    texts = prompts(model_dir, LENGTHS)
    cold: list[list[Any]] = []
    equal = dict.fromkeys(("cached", "chunked", "batched"), 0)
    agreeing = compared = close = 0
    for index, text in enumerate(texts):
        engine = Engine(runner)
        ours = engine.run([request("cold", text, OUTPUT, 20)])[0]["cold"]
        cold.append(ours)
        equal["cached"] += _bits(engine.run([request("x", text, OUTPUT, 20)])[0]["x"]) == _bits(ours)
        logits, _ = peer_greedy(peer, [text], OUTPUT)
        agrees = True
        for output, expected in zip(ours, logits, strict=True):
            top = expected[0].topk(2).values
            if output.token_id != int(expected[0].argmax()):
                agrees = float(top[0] - top[1]) <= GAP
                close += agrees
                break
            compared += 1
        agreeing += agrees
        say(f"exact {index + 1}/{len(texts)}: {len(text)} tokens, {'equal' if agrees else 'DIFFERENT'}")
    del peer
    say(f"{compared} tokens equal; {close} prompts left transformers' path at a top-2 gap <= {GAP}")

    for index, text in enumerate(texts):
        chunked = Engine(runner, max_seqs=8, max_step_tokens=64 + index)
        equal["chunked"] += _bits(chunked.run([request("x", text, OUTPUT, 20)])[0]["x"]) == _bits(cold[index])
        others = [request(f"o{i}", texts[i], OUTPUT) for i in range(4) if i != index]
        batched = Engine(runner).run([*others[:2], request("x", text, OUTPUT, 20), *others[2:]])[0]["x"]
        equal["batched"] += _bits(batched) == _bits(cold[index])
    name = "exact: prompts greedy-equal to transformers where the top-2 gap > 1e-3"
    rows = [row(name, "prompts", [agreeing], len(texts), ">=", len(texts))]
    for way, count in equal.items():
        rows.append(
            row(f"exact: prompts bit-equal {way} / cold", "prompts", [count], len(texts), ">=", len(texts))
        )
    return rows


def _bits(outputs: list[Any]) -> list[Any]:
    return [(output.token_id, output.logprob, output.finish_reason) for output in outputs]


def measure_fast(model_dir: Path, threads: int, runs: int) -> list[dict[str, Any]]:
    import torch

    from engine.model.runner import Runner

    start = time.perf_counter()
    runner = Runner(model_dir, dtype="fp32", num_blocks=600, threads=threads, max_tokens_per_step=256)
    load_s = time.perf_counter() - start
    runner.warm_up()
    rss_mb = _resident_mb()
    peer = transformers_model(model_dir)
    torch.set_num_threads(threads)
    suffix = f", {threads} thread{'s' if threads > 1 else ''}"
    rows = [row("load time" + suffix, "s", [load_s], 3.0, "<=", 3.0)]
    rows.append(row("resident after warm-up" + suffix, "MB", [rss_mb], 1200.0, "<=", 1200.0))
    decode_steps = 24
    for batch in (1, 4, 8):
        texts = prompts(model_dir, [64] * batch)

        def ours(texts: list[tuple[int, ...]] = texts) -> float:
            requests = [request(str(i), text, decode_steps) for i, text in enumerate(texts)]
            steps = Engine(runner).run(requests)[1]
            return len(texts) / statistics.median(steps[-decode_steps // 2 :])

        def theirs(texts: list[tuple[int, ...]] = texts) -> float:
            steps = peer_greedy(peer, texts, decode_steps)[1]
            return len(texts) / statistics.median(steps[-decode_steps // 2 :])

        rows.append(compare(f"decode, batch {batch}{suffix}", "tok/s", ours, theirs, runs))
    long = prompts(model_dir, [1024])[0]

    def prefill() -> float:
        return 1024 / sum(Engine(runner).run([request("p", long, 1)])[1])

    rows.append(
        compare(
            "prefill 1,024" + suffix,
            "tok/s",
            prefill,
            lambda: 1024 / peer_greedy(peer, [long], 1)[1][0],
            runs,
        )
    )
    longer = prompts(model_dir, [2048])[0]
    cold: list[float] = []
    cached: list[float] = []
    for _ in range(runs):
        engine = Engine(runner)
        cold.append(1e3 * sum(engine.run([request("c", longer, 1)])[1]))
        cached.append(1e3 * sum(engine.run([request("c", longer, 1)])[1]))
    first = statistics.median(cold)
    rows.append(row("2,048 tokens cached, to first token" + suffix, "ms", cached, first, "<=", first / 10))
    return rows


def _resident_mb() -> float:
    """Resident memory less the mapped checkpoint, which the page cache holds once for all replicas."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    return float(fields["RssAnon"].split()[0]) / 1024


def compare(
    name: str, unit: str, ours: Callable[[], float], theirs: Callable[[], float], runs: int
) -> dict[str, Any]:
    """Speeds measured in turns, after one unmeasured run of each; must not be below the peer's."""
    ours()
    theirs()
    pairs = [(ours(), theirs()) for _ in range(runs)]
    peer = statistics.median(pair[1] for pair in pairs)
    return row(name, unit, [pair[0] for pair in pairs], peer, ">=", peer)


def row(name: str, unit: str, values: Sequence[float], peer: float, op: str, limit: float) -> dict[str, Any]:
    ours = statistics.median(values)
    return {
        "name": name,
        "unit": unit,
        "ours": round(ours, 3),
        "spread": [round(min(values), 3), round(max(values), 3)],
        "peer": round(peer, 3),
        "limit": round(limit, 3),
        "ratio": round(ours / peer, 4),
        "must": {"op": op, "value": round(limit, 3)},
        "ok": ours <= limit if op == "<=" else ours >= limit,
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- parent


def child(mode: str, model_dir: Path, threads: int, runs: int) -> list[dict[str, Any]]:
    config = EngineConfig(mode="exact" if mode == "exact" else "fast", threads=threads)
    command = [sys.executable, __file__, "--child", mode, "--model", str(model_dir), "--runs", str(runs)]
    done = subprocess.run(
        [*command, "--threads", str(threads)],
        env=step_environment(config, os.environ, cpu_flags()),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument(
        "--model", type=Path, default=MODEL, metavar="DIR", help="model directory, with tokenizer.json"
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="threads to measure `fast` with"
    )
    parser.add_argument("--runs", type=int, default=5, help="measured runs of each figure")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("exact", "fast"),
        default=["exact", "fast"],
        help="what to measure (both)",
    )
    parser.add_argument("--child", choices=("exact", "fast"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "exact":
        print(json.dumps(check_exact(args.model, args.threads[0])))
        return 0
    if args.child == "fast":
        print(json.dumps(measure_fast(args.model, args.threads[0], args.runs)))
        return 0
    rows = child("exact", args.model, max(args.threads), args.runs) if "exact" in args.parts else []
    for threads in args.threads if "fast" in args.parts else ():
        say(f"fast, {threads} thread(s)")
        rows += child("fast", args.model, threads, args.runs)
    print(f"{'':72} {'ours':>9} {'(spread)':>20} {'peer':>9} {'ratio':>7} {'must':>12}")
    for line in rows:
        spread = f"({line['spread'][0]:.1f} - {line['spread'][1]:.1f})"
        must = f"{line['must']['op']} {line['must']['value']:.1f}"
        mark = "ok" if line["ok"] else "MISSED"
        what = f"{line['name']} [{line['unit']}]"
        figures = f"{line['ours']:>9.2f} {spread:>20} {line['peer']:>9.2f} {line['ratio']:>7.2f}"
        print(f"{what:72} {figures} {must:>12} {mark}")
    if args.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.platform()}"
        command = "python tests/bench/engine_alone.py " + " ".join(sys.argv[1:])
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        document = {"machine": machine, "command": command, "date": date, "rows": rows}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(line["ok"] for line in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
