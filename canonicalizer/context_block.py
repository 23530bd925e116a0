"""The context block: where moved values are stated, and the key that keeps anyone else from writing one.

    <user's own text>

    <context key="amber-lake-stone">
    Current time: 2026-03-02T09:14:07Z
    Request id: 3fcb4b70-f79a-4ffc-a71b-9592244ececa
    </context>

The key is three common words from an HMAC of the gateway's secret and the tenant, so it can't be guessed;
where it occurs in a request already, nothing is done. A block's bytes depend on its key and its lines
alone.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

_WORD_LIST = (
    "arch aunt back ball band bank base bath beam bean bear bell belt bench bird blue boat book boot "
    "box branch bread bridge broad brush bush camp card cart case castle cat cell chain chair chart "
    "child circle city class clay cloud coal coast coat coin cold corn court craft crop cross cup dark "
    "deck deep dish doctor dog door dream dry dust ear earth east edge egg engine eye face farm field "
    "film fire fish flag floor flower foot forest fox frame fresh fruit gate glass gold grain grass "
    "green ground guide hair hall hand hat heart hill horn horse house ice ink iron jar jet key king "
    "lake land leaf letter library light line lion lock log machine map market metal milk mill moon "
    "mouse music nail neck nest net night north nose note ocean oil orange oven page paper park path "
    "pen pine pipe planet plant plate port pot rail rain red ring river road rock room root rose salt "
    "sand school sea seed shell ship shore sky snow song south spring square star station stone storm "
    "street sugar summer sun "
)
_WORDS = tuple(_WORD_LIST.split())


def fence_key(secret: bytes, tenant: str) -> str:
    """Three words for this tenant, e.g. `amber-lake-stone`; about 24 bits, secret as long as `secret` is."""
    digest = hmac.new(secret, b"fence\0" + tenant.encode(), hashlib.sha256).digest()
    picks = (int.from_bytes(digest[at : at + 4], "big") % len(_WORDS) for at in (0, 4, 8))
    return "-".join(_WORDS[pick] for pick in picks)


def context_block(key: str, lines: Iterable[tuple[str, str]]) -> str:
    """The text to append for (label, value) lines; a value of several lines starts below its label."""
    stated = "\n".join(
        f"{label}:\n{value}" if "\n" in value else f"{label}: {value}" for label, value in lines
    )
    return f'\n\n<context key="{key}">\n{stated}\n</context>'
