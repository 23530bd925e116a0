"""The HTTP front process of one engine replica: OpenAI requests in, tokens to the step process, text out.

Nothing in this package may import torch or transformers: the front starts in a fraction of a second,
answers `/health` while the weights load, and never shares a thread with the step loop.

A request's way: `app` (routes) -> `validate` (every field by name) -> `prompts` (render, tokenize) ->
`generate` (choices over `step_client`) -> `output` (detokenize, stop strings) -> `responses` or `stream`.
"""
