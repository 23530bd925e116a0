"""What a sampled token means for its sequence: one more token, the first one's timings, or the end.

Pure but for the sequence it is given. What must always hold: a sequence ends exactly once, with the first
reason that applies: a stop token (not before `min_tokens`), then `max_tokens` or the length limit.
"""

from __future__ import annotations

from engine.core.sequence import FinishReason, SampledToken, Sequence, Timings, TokenLogprob, TokenOutput


def accept_token(seq: Sequence, token: SampledToken, now_s: float) -> TokenOutput:
    """Append the token to `seq` (unless it wants none) and say what to send, with the reason if it ends."""
    params = seq.request.params
    first = prompt_logprobs = None
    if not seq.first_sampled:
        seq.first_sampled = True
        first = _timings(seq, now_s)
        if params.prompt_logprobs is not None:
            prompt_logprobs = tuple(seq.prompt_logprobs)
    if params.max_tokens == 0:
        return TokenOutput(seq.request_id, None, "length", None, prompt_logprobs, first)
    if token.token_id < 0:
        message = "the model's output was not finite; the request cannot go on"
        return TokenOutput(seq.request_id, None, "error", None, prompt_logprobs, first, message)
    seq.tokens.append(token.token_id)
    logprob = None if token.logprob is None else TokenLogprob(token.logprob, token.top)
    reason = _finish_reason(seq, token.token_id)
    return TokenOutput(seq.request_id, token.token_id, reason, logprob, prompt_logprobs, first)


def _finish_reason(seq: Sequence, token_id: int) -> FinishReason | None:
    params = seq.request.params
    if token_id in params.stop_token_ids and seq.num_output >= params.min_tokens:
        return "stop"
    return "length" if len(seq.tokens) >= seq.limit else None


def _timings(seq: Sequence, now_s: float) -> Timings:
    started_s = now_s if seq.started_s is None else seq.started_s
    return Timings(started_s - seq.arrival_s, now_s - started_s, seq.cached_tokens, seq.prefill_tokens)
