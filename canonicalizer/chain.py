"""The block-hash chain: which 16-token blocks a prompt is made of, by name.

    seed = xxh3_128(fingerprint NUL cache_scope)
    h_0  = xxh3_128(seed || tokens[0:16]),  h_i = xxh3_128(h_{i-1} || tokens[16 i : 16 i + 16])

Tokens are int32, little endian. What must hold: a hash names its block *and* everything before it, so two
prompts share a hash only where they share the whole prefix, the model and the cache scope; gateway and engine
compute equal hashes because both use this file. Only full blocks have a hash.
"""

from __future__ import annotations

from dataclasses import dataclass

from xxhash import xxh3_128_digest

BLOCK_SIZE = 16
HASH_BYTES = 16
TOKEN_BYTES = 4


def chain_seed(fingerprint: str, cache_scope: str) -> bytes:
    """The 16 bytes that start the chain of one model (fingerprint) for one cache scope."""
    return xxh3_128_digest(f"{fingerprint}\0{cache_scope}".encode())


def block_hashes(
    seed: bytes, tokens: bytes, block_size: int = BLOCK_SIZE, parent: bytes | None = None
) -> list[bytes]:
    """Hashes of the full blocks of `tokens` (int32 LE), 16 bytes each; a partial last block has none.

    `parent` is the hash of the block just before `tokens`; without it `tokens` starts the prompt.
    """
    width = block_size * TOKEN_BYTES
    digest = xxh3_128_digest
    last = seed if parent is None else parent
    hashes = []
    for start in range(0, len(tokens) - width + 1, width):
        last = digest(last + tokens[start : start + width])
        hashes.append(last)
    return hashes


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt's tokens (int32 LE) with the hashes of its full blocks; `extend` gives a longer one."""

    seed: bytes
    block_size: int = BLOCK_SIZE
    tokens: bytes = b""
    hashes: tuple[bytes, ...] = ()

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // TOKEN_BYTES

    def extend(self, tokens: bytes) -> Chain:
        """This chain with `tokens` (int32 LE) appended; only blocks that became full are hashed.

        Raises `ValueError` when `tokens` is not a whole number of int32.
        """
        if len(tokens) % TOKEN_BYTES:
            raise ValueError(f"tokens are {len(tokens)} bytes long, not a multiple of {TOKEN_BYTES}")
        whole = self.tokens + tokens
        hashed = len(self.hashes) * self.block_size * TOKEN_BYTES
        parent = self.hashes[-1] if self.hashes else None
        rest = whole[hashed:] if hashed else whole
        added = block_hashes(self.seed, rest, self.block_size, parent)
        return Chain(self.seed, self.block_size, whole, (*self.hashes, *added))
