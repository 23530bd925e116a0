"""The package's public names, pinned, and what importing them must not bring in."""

import subprocess
import sys

import canonicalizer


def test_public_names() -> None:
    assert canonicalizer.__all__ == [
        "BLOCK_SIZE",
        "Canonical",
        "Chain",
        "ChatTemplate",
        "Context",
        "Detokenizer",
        "Divergence",
        "Edit",
        "EditError",
        "Entry",
        "Learner",
        "Proposal",
        "ReplayMemory",
        "Rule",
        "Ruleset",
        "RulesetError",
        "Segment",
        "TemplateError",
        "TextModel",
        "UnusualEscapes",
        "apply_edits",
        "apply_proved",
        "block_hashes",
        "canonicalize",
        "chain_seed",
        "fence_key",
        "first_divergence",
        "ruleset_from",
        "undo",
    ]
    assert all(hasattr(canonicalizer, name) for name in canonicalizer.__all__)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import canonicalizer, sys; print({'torch', 'transformers', 'aiohttp', 'gateway'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
