"""Routing: replicas, what they hold, what they owe, and which of them a request goes to."""

from gateway.routing.choice import POLICY_NAMES
from gateway.routing.cost import Candidate, CostWeights
from gateway.routing.events import KvEventSubscriber
from gateway.routing.index import PrefixIndex
from gateway.routing.monitor import ReplicaMonitor
from gateway.routing.pool import PoolState
from gateway.routing.replica import Replica, Timings
from gateway.routing.router import Decision, Dispatch, NoReplica, RouteQuery, Router

__all__ = [
    "POLICY_NAMES",
    "Candidate",
    "CostWeights",
    "Decision",
    "Dispatch",
    "KvEventSubscriber",
    "NoReplica",
    "PoolState",
    "PrefixIndex",
    "Replica",
    "ReplicaMonitor",
    "RouteQuery",
    "Router",
    "Timings",
]
