"""Every policy there is: the closed union that the configuration decodes by its ``kind``."""

from __future__ import annotations

from typing import TypeAlias

from policies.least_loaded import LeastLoaded
from policies.power_of_two import PowerOfTwo
from policies.round_robin import RoundRobin
from policies.uniform import Uniform
from policies.weighted import Weighted

AnyPolicy: TypeAlias = Weighted | RoundRobin | Uniform | LeastLoaded | PowerOfTwo
