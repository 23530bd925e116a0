"""Pure functions from a request to its canonical prompt, its tokens and its block hashes. See README.md.

No I/O, no clock, no randomness. Only the names below are public.
"""

from canonicalizer.chain import BLOCK_SIZE, Chain, block_hashes, chain_seed
from canonicalizer.context_block import fence_key
from canonicalizer.detokenizer import Detokenizer
from canonicalizer.divergence import Divergence, first_divergence
from canonicalizer.edits import Edit, EditError, UnusualEscapes, apply_edits, apply_proved, undo
from canonicalizer.learn import Learner, Proposal, ruleset_from
from canonicalizer.memory import Entry, ReplayMemory
from canonicalizer.messages import TemplateError
from canonicalizer.pipeline import Canonical, Context, canonicalize
from canonicalizer.rules import Rule, Ruleset, RulesetError
from canonicalizer.template import ChatTemplate
from canonicalizer.tokens import Segment, TextModel

__all__ = [
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
