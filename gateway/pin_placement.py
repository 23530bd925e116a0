"""Placement of pins: which replicas hold which pinned prefix.

Pure: the same pins, replicas and earlier placement always give the same answer. A placed pin stays
where it is as long as its replica is listed, because requests find it there through the prefix index.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import xxhash

from gateway.routing.choice import rendezvous_order


@dataclass(frozen=True, slots=True)
class DesiredPin:
    """A prefix to keep resident.

    token_ids: the canonical prefix. seed: 16 bytes, the start of its hash chain. hashes: the chain's full
    blocks (16 bytes each). replicas: how many hold it, or "all". ttl_s: None keeps it until it is no
    longer desired.
    """

    name: str
    tenant: str
    pool: str
    token_ids: tuple[int, ...]
    seed: bytes
    hashes: tuple[bytes, ...]
    ttl_s: float | None = None
    replicas: int | Literal["all"] = 1

    id: str = field(init=False)  # names the content: a pin whose tokens change gets another one

    def __post_init__(self) -> None:
        digest = xxhash.xxh3_64_hexdigest(self.seed + array("q", self.token_ids).tobytes())
        name = "".join(char if char.isalnum() or char in "-_." else "_" for char in self.name[:150])
        object.__setattr__(self, "id", f"{name}-{digest}")


def place(
    pins: Sequence[DesiredPin], replica_ids: Sequence[str], placed: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Pin id -> replica ids. What is `placed` on a listed replica stays; the rest goes where fewest tokens
    are pinned.

    Long pins are placed first, ties go by rendezvous order, so equal pins spread evenly and always the
    same way.
    """
    load = dict.fromkeys(replica_ids, 0)
    result: dict[str, list[str]] = {}
    for pin in pins:
        wanted = len(load) if pin.replicas == "all" else min(pin.replicas, len(load))
        result[pin.id] = [id for id in placed.get(pin.id, ()) if id in load][:wanted]
        for id in result[pin.id]:
            load[id] += len(pin.token_ids)
    for pin in sorted(pins, key=lambda pin: (-len(pin.token_ids), pin.id)):
        wanted = len(load) if pin.replicas == "all" else min(pin.replicas, len(load))
        order = {id: rank for rank, id in enumerate(rendezvous_order(pin.id.encode(), list(load)))}
        while len(result[pin.id]) < wanted:
            free = [id for id in load if id not in result[pin.id]]
            chosen = min(free, key=lambda id: (load[id], order[id]))
            result[pin.id].append(chosen)
            load[chosen] += len(pin.token_ids)
    return result
