"""What every handler shares: the step process, the text model, the settings, the metrics.

Owns readiness and the rules that need both the request and the loaded model (model name, room for output).
Always holds: nothing is generated before both the text model and the step process are ready; a prompt that
can never fit is refused before it reaches the step process, and `max_tokens` is cut to what fits. A step
process that says nothing for longer than a step can take is stalled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from canonicalizer.chain import chain_seed
from canonicalizer.detokenizer import Detokenizer
from canonicalizer.tokens import TextModel
from engine.config import EngineConfig
from engine.worker.front.errors import ApiError, too_long, unavailable
from engine.worker.front.generate import Generation, Prompt
from engine.worker.front.metrics import Metrics
from engine.worker.front.prompts import Prompts
from engine.worker.front.step_client import StepClient
from engine.worker.front.validate import Options

T = TypeVar("T")
_WARM_UPS = 4.0  # a step in service may take that many times the warm-up: long contexts, a busy machine
_LONGEST_STEP_S = 60.0


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """How the front answers; sizes in bytes, times in seconds.

    stall_s: silence of the step process after which it counts as stalled, unless its steps are slow.
    """

    max_body_bytes: int = 32 * 1024 * 1024
    default_max_tokens: int = 1024
    ping_s: float = 5.0
    write_timeout_s: float = 60.0
    body_timeout_s: float = 60.0
    grace_s: float = 30.0
    stall_s: float = 10.0


class Service:
    """One replica as its handlers see it."""

    def __init__(
        self, config: EngineConfig, settings: FrontSettings, client: StepClient, executor: Executor
    ) -> None:
        self.config = config
        self.settings = settings
        self.client = client
        self.metrics = Metrics()
        self.streams = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._executor = executor
        self._text: TextModel | None = None

    def set_text_model(self, text: TextModel) -> None:
        """Called once, when tokenizer and template are loaded."""
        self._text = text

    @property
    def has_text_model(self) -> bool:
        """True once tokenizer and template are loaded."""
        return self._text is not None

    @property
    def is_ready(self) -> bool:
        """True when requests can be served."""
        return self._text is not None and self.client.ready.is_set()

    @property
    def stall_limit_s(self) -> float:
        """The silence that is taken for a stall: the setting, or more where the model's steps are slow."""
        slow_s = min(_WARM_UPS * float(self.info.get("warm_up_s", 0.0)), _LONGEST_STEP_S)
        return max(self.settings.stall_s, slow_s)

    @property
    def is_stalled(self) -> bool:
        """True when the step process was ready and has fallen silent: stopped, or in a step without end."""
        return self.client.ready.is_set() and self.client.silence_s() > self.stall_limit_s

    @property
    def text(self) -> TextModel:
        """Tokenizer and template; 503 before they are loaded."""
        if self._text is None:
            raise unavailable("The model is loading.", "model_loading")
        return self._text

    @property
    def info(self) -> dict[str, Any]:
        """What the step process said of its model; 503 before it did or after it ended."""
        if self.client.failed.is_set():
            raise unavailable("The engine has stopped.", "engine_stopped")
        if self.client.info is None:
            raise unavailable("The model is loading.", "model_loading")
        return self.client.info

    @property
    def prompts(self) -> Prompts:
        """Rendering and tokenization."""
        return Prompts(self.text, self._executor, self.capacity)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding: the bound of every token id."""
        return int(self.info["vocab_size"])

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a reply, as the model and its tokenizer name them."""
        return frozenset(self.info.get("eos_ids", ())) | frozenset(self.text.eos_ids)

    @property
    def capacity(self) -> int:
        """The longest prompt plus output, in tokens: the model's context, or what the KV pool holds of it."""
        return int(self.info["context_length"])

    def check_model(self, name: str) -> None:
        """404 unless `name` is the served model."""
        if name != self.config.served_model_name:
            shown = name if len(name) <= 200 else name[:200] + "..."
            raise ApiError(404, f"The model '{shown}' does not exist.", param="model", code="model_not_found")

    def room(self, prompt_tokens: int, wanted: int | None, param: str) -> int:
        """Output tokens for a prompt: what was asked for (None: the default cap), cut to what fits."""
        room = self.capacity - prompt_tokens
        if room < 1:
            raise too_long(prompt_tokens, self.capacity, param)
        return min(room, self.settings.default_max_tokens if wanted is None else wanted)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    @contextlib.contextmanager
    def generation(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        options: Options,
        param: str,
        *,
        prompt_logprobs: bool,
    ) -> Iterator[Generation]:
        """A Generation whose engine requests are gone when the block is left, whatever happened in it."""
        for prompt in prompts:
            if not prompt.token_ids:
                raise ApiError(400, f"'{param}' has no tokens.", param=param, code="invalid_value")
        text = self.text
        extension = options.extension
        seed = None if extension is None else extension.seed
        generation = Generation(
            self.client,
            request_id,
            prompts,
            options,
            max_tokens=[self.room(len(prompt.token_ids), options.max_tokens, param) for prompt in prompts],
            chain_seed=seed if seed is not None else chain_seed(str(self.info["fingerprint"]), "all"),
            eos_ids=self.eos_ids,
            new_decoder=lambda: Detokenizer(text),
            prompt_logprobs=prompt_logprobs,
        )
        self.streams += 1
        self.idle.clear()
        try:
            yield generation
        finally:
            self.streams -= 1
            if not self.streams:
                self.idle.set()
            generation.close()
            self.metrics.tokens_done(generation.usage())
