"""Every policy there is: the closed union that the configuration decodes by its ``kind``."""

from __future__ import annotations

from typing import Final, TypeAlias, get_args

from policies.baselines.aibrix import AIBrix
from policies.baselines.bounded_hash import BoundedHash
from policies.baselines.dynamo import Dynamo
from policies.baselines.kthena import Kthena
from policies.baselines.least_work import LeastWork
from policies.baselines.llm_d import LlmD, LlmDPrecise, LlmDSticky
from policies.baselines.loadaware import LoadAware
from policies.baselines.mooncake import Mooncake
from policies.baselines.preble import Preble
from policies.baselines.session_hash import SessionHash
from policies.baselines.smg import SmgEvent, SmgTree
from policies.expected_ttft import ExpectedTtft
from policies.least_loaded import LeastLoaded
from policies.power_of_two import PowerOfTwo
from policies.round_robin import RoundRobin
from policies.uniform import Uniform
from policies.weighted import Weighted

AnyPolicy: TypeAlias = (
    Weighted
    | ExpectedTtft
    | RoundRobin
    | Uniform
    | LeastLoaded
    | PowerOfTwo
    | LeastWork
    | SessionHash
    | BoundedHash
    | SmgTree
    | SmgEvent
    | LoadAware
    | LlmD
    | LlmDPrecise
    | LlmDSticky
    | Dynamo
    | Preble
    | Mooncake
    | AIBrix
    | Kthena
)

KINDS: Final[tuple[str, ...]] = tuple(
    sorted(policy.__struct_config__.tag for policy in get_args(AnyPolicy))
)
"""What a policy may be called in the configuration."""
