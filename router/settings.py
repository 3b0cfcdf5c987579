"""What can be changed while the router runs: a partial configuration over that of its file.

The file is the base; a document (``state.setting_book``) overrides it key by key, in the same
shape. The types are those of the file, so are the ranges. A policy of another kind than the file's
is taken whole from the document. What only a start can change is refused by name.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct, structs

from policies.hold import HoldSettings
from policies.hot import HotSettings
from policies.union import AnyPolicy
from router.admission_setting import AdmissionSettings
from router.canary_setting import CanarySettings, Guardrails, canary_fault
from router.config import Config, ConfigError, Name, check_config
from router.ejection import EjectionSettings
from router.expected import explained
from router.health_setting import HealthSettings
from router.shadow_policy import ShadowSettings
from state.model import ReplicaId

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Values = dict[str, Any]

SECTIONS: Final = ("policy", "hot_prefix", "hold", "admission", "health", "ejection", "shadow")
"""Keys of the configuration of which a document may have parts."""
DRAINS: Final = "drains"
HAND_OVERS: Final = "hand_overs"
CANARY: Final = "canary"
FIXED: Final = (
    "hot_prefix.half_life_s",
    "hot_prefix.max_nodes",
    "hot_prefix.max_blocks",
    "admission.learned",
    "admission.learning",
    "admission.overload.memory_bytes",
)
"""What is built in at the start: learned state would be lost, or memory not be given back."""
MOST_DRAINS: Final = 1_024
_GUARDRAILS: Final = msgspec.to_builtins(Guardrails())
FILE: Final = "file"
DOCUMENT: Final = "document"


class LiveSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values in force of all that can be changed; ``drains`` are names of replicas.

    Of those, ``hand_overs`` hand over what they hold.

    ``canary.policy`` is the whole of the candidate: what the document has of it is over the policy.
    """

    policy: AnyPolicy
    hot_prefix: HotSettings
    hold: HoldSettings
    admission: AdmissionSettings
    health: HealthSettings
    ejection: EjectionSettings
    shadow: ShadowSettings
    canary: CanarySettings | None = None
    drains: Annotated[tuple[Name, ...], Meta(max_length=MOST_DRAINS)] = ()
    hand_overs: Annotated[tuple[Name, ...], Meta(max_length=MOST_DRAINS)] = ()


class Change(Struct, frozen=True, kw_only=True):
    """One key whose value in force is another one; None: the key is not there on that side."""

    key: str
    before: Any = None
    after: Any = None


class SettingRules:
    """Judges documents against one router's file. ``keeps_placements``: it was started for that."""

    def __init__(self, config: Config, *, keeps_placements: bool = False) -> None:
        self._config = config
        self._keeps_placements = keeps_placements
        self.base: Values = {
            section: msgspec.to_builtins(getattr(config, section)) for section in SECTIONS
        } | {DRAINS: [], HAND_OVERS: []}

    def in_force(self, settings: Mapping[str, Any]) -> LiveSettings:
        """Return the values with ``settings`` over the file; raises ConfigError."""
        for key, _ in leaves(settings):
            for fixed in FIXED:
                if key == fixed or key.startswith(f"{fixed}."):
                    message = f"{fixed}: expected in the configuration file only; it needs a start"
                    raise ConfigError(message)
        resolved = self._resolved(settings)
        try:
            live = msgspec.convert(resolved, LiveSettings, strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(explained(error, LiveSettings, resolved)) from None
        self._check_policy("policy.kind", live.policy)
        if live.canary is not None:
            self._check_policy("canary.policy.kind", live.canary.policy)
            fault = canary_fault(live.canary, has_tenants=bool(self._config.tenants))
            if fault is not None:
                raise ConfigError(fault)
        if len(set(live.drains)) != len(live.drains):
            message = "drains: a replica occurs twice"
            raise ConfigError(message)
        check_config(self.config_of(live))
        return live

    def _resolved(self, settings: Mapping[str, Any]) -> Values:
        """Return all values, the candidate's policy whole among them."""
        values = over(self.base, settings)
        canary = values.get(CANARY)
        if isinstance(canary, dict) and isinstance(canary.get("policy"), dict):
            usual = {"policy": values["policy"], "guardrails": _GUARDRAILS}
            values[CANARY] = {
                **canary,
                **over(usual, {key: canary[key] for key in usual if key in canary}),
            }
        return values

    def _check_policy(self, key: str, policy: AnyPolicy) -> None:
        if getattr(policy, "uses_placements", False) and not self._keeps_placements:
            message = (
                f"{key}: expected one that does not keep placements of its own, unless the "
                "router was started with such a one"
            )
            raise ConfigError(message)

    def config_of(self, live: LiveSettings) -> Config:
        """Return the whole configuration with the values in force."""
        return structs.replace(
            self._config, **{section: getattr(live, section) for section in SECTIONS}
        )

    def patched(self, settings: Mapping[str, Any], patch: Mapping[str, Any]) -> Values:
        """Return ``settings`` after a JSON merge patch; null takes a key back to the file.

        Keys of a policy go with its kind: another kind begins without them, and a document that
        has some names the kind that they belong to. Of the file's kind it has no more than them.
        """
        before = dict(settings)
        policy = patch.get("policy")
        if isinstance(policy, dict) and policy:
            held = before.get("policy", {})
            kind = held.get("kind", self.base["policy"]["kind"])
            if policy.get("kind", kind) != kind:
                before.pop("policy", None)
            elif "kind" not in policy:
                patch = {**patch, "policy": {"kind": kind, **policy}}
                after = _merged(before, patch)
                if after["policy"] == {"kind": self.base["policy"]["kind"]}:
                    del after["policy"]  # else a file with another policy would not count
                return after
        return _merged(before, patch)

    def sources(self, settings: Mapping[str, Any]) -> dict[str, str]:
        """Return where the value in force of each key comes from."""
        told = {key for key, _ in leaves(settings)}
        values = over(self.base, settings)
        return {key: DOCUMENT if key in told else FILE for key, _ in leaves(values)}

    def difference(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
        """Return what changes in force when one document follows another."""
        was = dict(leaves(self._whole(before)))
        now = dict(leaves(self._whole(after)))
        keys = sorted(was.keys() | now.keys())
        return [
            Change(key=key, before=was.get(key), after=now.get(key))
            for key in keys
            if was.get(key) != now.get(key)
        ]

    def _whole(self, settings: Mapping[str, Any]) -> Values:
        """Return all values, those that a policy of another kind leaves out among them."""
        values = over(self.base, settings)
        with suppress(msgspec.ValidationError):  # of a document that is refused, as it stands
            policy: AnyPolicy = msgspec.convert(values["policy"], AnyPolicy)
            values["policy"] = msgspec.to_builtins(policy)
        return values


def drained(live: LiveSettings) -> frozenset[ReplicaId]:
    """Return the replicas that get nothing new."""
    return frozenset(ReplicaId(name) for name in live.drains)


def over(base: Mapping[str, Any], settings: Mapping[str, Any]) -> Values:
    """Return ``base`` with ``settings`` over it, key by key; a policy of another kind as it is."""
    merged: Values = dict(base)
    for key, value in settings.items():
        below = merged.get(key)
        is_other_kind = (
            key == "policy"
            and isinstance(value, dict)
            and isinstance(below, dict)
            and value.get("kind", below.get("kind")) != below.get("kind")
        )
        if isinstance(value, dict) and isinstance(below, dict) and not is_other_kind:
            merged[key] = over(below, value)
        else:
            merged[key] = value
    return merged


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that is no object, by its dotted key."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _merged(target: Mapping[str, Any], patch: Mapping[str, Any]) -> Values:
    """Apply a JSON merge patch (RFC 7396); what it leaves empty goes."""
    merged: Values = dict(target)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            below = merged.get(key)
            if not isinstance(below, dict) or value.get("kind", below.get("kind")) != below.get(
                "kind"
            ):
                below = {}  # keys go with their kind
            inner = _merged(below, value)
            merged.pop(key, None)
            if inner:
                merged[key] = inner
        else:
            merged[key] = value
    return merged
