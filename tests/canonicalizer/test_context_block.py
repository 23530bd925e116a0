"""The context block: its bytes, and a key that depends on secret and tenant."""

import re

from canonicalizer.context_block import context_block, fence_key


def test_block() -> None:
    block = context_block("a-b-c", [("Current time", "08:01"), ("Status", " M a\n?? b")])
    assert block == '\n\n<context key="a-b-c">\nCurrent time: 08:01\nStatus:\n M a\n?? b\n</context>'


def test_keys_are_three_words_and_differ_by_tenant_and_secret() -> None:
    keys = {fence_key(secret, tenant) for secret in (b"one", b"two") for tenant in map(str, range(200))}
    assert len(keys) > 395
    assert all(re.fullmatch(r"[a-z]+-[a-z]+-[a-z]+", key) for key in keys)
    assert fence_key(b"one", "7") == fence_key(b"one", "7")
