"""The router's configuration: one YAML file decoded into frozen values, every key checked.

Unknown keys are refused. A wrong value ends with ``ConfigError``, which names the path of the key.
"""

from __future__ import annotations

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from policies.expected_ttft import ExpectedTtft
from policies.hold import HoldSettings
from policies.hot import HotSettings
from policies.union import AnyPolicy
from prompt.turn import DEFAULT_BODY_BYTES
from router.access_log import AccessLogSettings
from router.adapter import AdapterSettings
from router.admission_setting import AdmissionSettings
from router.billing_setting import BillingSettings
from router.decision_log import DecisionLogSettings
from router.discovery.setting import DiscoverySettings, DnsName
from router.ejection import EjectionSettings
from router.endpoint import Endpoint
from router.expected import explained
from router.health_setting import HealthSettings
from router.hedge_setting import HedgeSettings
from router.kv_source import KvTransferSettings
from router.placement_setting import PlacementSettings
from router.public_setting import PublicPrefixes, public_fault
from router.quarantine import QuarantineSettings
from router.recording import RecordingSettings, recording_fault
from router.registration_setting import RegistrationSettings, registration_fault
from router.retry_setting import RetrySettings
from router.shadow_policy import ShadowSettings, shadow_fault
from router.supervisor.share import share_fault
from router.tenant import Label, TenantSettings, tenant_fault
from router.tls_setting import ListenerTls
from router.tracing import TracingSettings
from router.warm_setting import WarmUpSettings, warm_up_fault
from state.client import check_url
from state.model import NAME_PATTERN, UNIX_SCHEME
from state.residency import MIN_BYTES
from state.tls import ClientTls

Name = Annotated[
    str,
    Meta(
        pattern=NAME_PATTERN,
        description="a name of up to 128 letters, digits and . _ : @ - without a sign in front",
    ),
]
PositiveFloat = Annotated[float, Meta(gt=0)]
PositiveInt = Annotated[int, Meta(ge=1)]

ExtraPath = Annotated[
    str,
    Meta(
        pattern=r"\A(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*){0,16}(/\*|/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)\Z",
        description="a plain path such as /v1/audio/speech or /v1/*",
    ),
]
"""A path without a query, and without a segment that begins with a dot; ``/*`` at its end stands
for every such path that begins so."""
SocketMode = Annotated[
    str, Meta(pattern=r"\A0?[0-7]{3}\Z", description='a file mode in quotes, such as "0660"')
]
EngineKey = Annotated[
    str, Meta(pattern=r"\A[\x21-\x7e]+\Z", description="a key of ASCII characters without spaces")
]
TokensFrom = Literal["engine", "bytes", "off"]

DEFAULT_LISTEN = "127.0.0.1:8080"
DEFAULT_ADMIN = "127.0.0.1:8081"


class ConfigError(Exception):
    """The configuration is wrong; the text names the key and what was expected."""


class StaticReplica(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica by its address. Without a sidecar its residency is guessed from what is sent there.

    ``kv_capacity_tokens`` is the size of its KV cache: a guess of the wrong size misleads. By
    default it is what the engine tells of it, or 400,000.
    """

    url: str
    name: Name | None = None
    kv_capacity_tokens: PositiveInt | None = None


class ModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to read prompts of one model.

    ``tokenizer`` is a directory with tokenizer.json and chat template; ``tokens`` says what to do
    without one, other than ``tokens.source`` does.
    """

    name: str
    tokenizer: str | None = None
    tokens: TokensFrom | None = None


class TokenSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where tokens of models without a tokenizer directory come from.

    ``source``: asked of an engine that tells what it holds (``engine``), bytes in their place
    (``bytes``), or none: such a model's requests go by load (``off``). A request waits for an
    engine for ``patience_s`` and ``patience_per_mib_s`` for each MiB of its body, but at most for
    ``patience_cap_s``.
    """

    source: TokensFrom = "engine"
    patience_s: PositiveFloat = 0.025
    patience_per_mib_s: Annotated[float, Meta(ge=0)] = 0.75
    patience_cap_s: PositiveFloat = 0.4


class StateSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where shared state lives. Without ``redis`` a private Valkey server is started.

    ``lookup``: decide on a copy of the index in this process, or ask the store per request. The
    copy takes at most ``mirror_bytes`` of memory, 1 GiB for 4.7 million blocks and more.
    """

    redis: str | None = None
    lookup: Literal["mirror", "direct"] = "mirror"
    mirror_bytes: Annotated[int, Meta(ge=MIN_BYTES)] = 1 << 30
    chain_seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


class UpstreamTimes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadlines towards the replicas, in seconds, and the key that they want to see.

    ``api_key`` goes with the router's own questions, and with clients' requests in place of their
    keys where those are tenants'. ``tls`` is for those behind ``https://``.
    """

    connect_timeout_s: PositiveFloat = 1.0
    first_byte_timeout_s: PositiveFloat = 300.0
    chunk_idle_timeout_s: PositiveFloat = 120.0
    write_stall_timeout_s: PositiveFloat = 60.0
    pool_idle_s: PositiveFloat = 3.0
    api_key: EngineKey | None = None
    tls: ClientTls = ClientTls()

    def __repr__(self) -> str:
        """Leave the key out."""
        return f"UpstreamTimes(connect_timeout_s={self.connect_timeout_s}, ...)"


class LimitSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client may send, and how long it may take.

    ``connections`` bounds those that are open on one listener, ``connections_per_address`` those
    from one address; more are answered with 503. Not counted by address are loopback and
    ``trusted_proxies``, whose X-Forwarded-For is believed. ``buffered_bytes`` bounds the bodies of
    all open requests together.
    """

    connections: PositiveInt = 16_384
    connections_per_address: PositiveInt = 256
    trusted_proxies: tuple[str, ...] = ()
    head_deadline_s: PositiveFloat = 10.0
    body_bytes: PositiveInt = 8 * 1024 * 1024
    body_deadline_s: PositiveFloat = 30.0
    body_bytes_per_s: PositiveInt = 16 * 1024
    buffered_bytes: PositiveInt = 256 * 1024 * 1024


class DrainSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """On SIGTERM: not ready, still accepting for ``accept_s``, then ``grace_s`` to finish.

    On SIGINT ``accept_s`` is skipped, at a second signal whatever is left of both.
    """

    accept_s: Annotated[float, Meta(ge=0)] = 5.0
    grace_s: Annotated[float, Meta(ge=0)] = 120.0


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything ``warmroute serve`` can be told.

    ``admin_hosts``: names under which browsers may ask the operators' listener, besides addresses,
    localhost and the name in ``admin``.
    ``attend_sidecars``: run the sidecar of each of ``replicas`` whose engine publishes KV events,
    where nobody else does. ``socket_mode``: who may connect to a listener at ``unix:/path``.
    ``processes``: so many share the work, the listeners and every limit; see docs/processes.md.
    ``sealed_state``: see docs/state.md.
    """

    listen: str = DEFAULT_LISTEN
    listen_tls: ListenerTls | None = None
    admin: str | None = DEFAULT_ADMIN
    admin_tls: ListenerTls | None = None
    admin_hosts: tuple[DnsName, ...] = ()
    socket_mode: SocketMode = "0600"
    replicas: tuple[StaticReplica, ...] = ()
    registration: RegistrationSettings = RegistrationSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    attend_sidecars: bool = True
    models: tuple[ModelSettings, ...] = ()
    adapters: tuple[AdapterSettings, ...] = ()
    tokens: TokenSettings = TokenSettings()
    state: StateSettings = StateSettings()
    policy: AnyPolicy = ExpectedTtft()
    hot_prefix: HotSettings = HotSettings()
    hold: HoldSettings = HoldSettings()
    admission: AdmissionSettings = AdmissionSettings()
    placements: PlacementSettings = PlacementSettings()
    kv_transfer: KvTransferSettings = KvTransferSettings()
    warm_up: WarmUpSettings = WarmUpSettings()
    upstream: UpstreamTimes = UpstreamTimes()
    limits: LimitSettings = LimitSettings()
    health: HealthSettings = HealthSettings()
    ejection: EjectionSettings = EjectionSettings()
    retry: RetrySettings = RetrySettings()
    hedge: HedgeSettings = HedgeSettings()
    quarantine: QuarantineSettings = QuarantineSettings()
    drain: DrainSettings = DrainSettings()
    paths: tuple[ExtraPath, ...] = ()
    receipts: bool = False
    tenants: tuple[TenantSettings, ...] = ()
    groups: tuple[Label, ...] = ()
    public_prefixes: PublicPrefixes = ()
    deployment_key_file: str | None = None
    sealed_state: Literal["accept", "require"] = "accept"
    tenants_state_file: str | None = None
    audit_log: str | None = None
    settings_file: str | None = None
    billing: BillingSettings = BillingSettings()
    decisions_kept: Annotated[int, Meta(ge=1, le=1_000_000)] = 1_000
    decisions: DecisionLogSettings = DecisionLogSettings()
    prompt_bytes: Annotated[int, Meta(ge=1 << 20)] = DEFAULT_BODY_BYTES
    recording: RecordingSettings = RecordingSettings()
    shadow: ShadowSettings = ShadowSettings()
    access_log: AccessLogSettings = AccessLogSettings()
    tracing: TracingSettings = TracingSettings()
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    processes: Annotated[int, Meta(ge=1, le=64)] = 1


def decode_config(raw: object) -> Config:
    """Return the configuration in ``raw`` (decoded YAML); raises ConfigError."""
    try:
        config = msgspec.convert({} if raw is None else raw, Config, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(explained(error, Config, raw)) from None
    check_config(config)
    return config


def load_config(path: Path) -> Config:
    """Return the configuration in the YAML file at ``path``; raises ConfigError."""
    from router.strict_yaml import YAMLError, load_yaml  # noqa: PLC0415 - no file, no parser

    try:
        raw = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise ConfigError(message) from None
    except (YAMLError, UnicodeDecodeError) as error:
        message = f"{path}: not YAML: {' '.join(str(error).split())}"
        raise ConfigError(message) from None
    try:
        return decode_config(raw)
    except ConfigError as error:
        message = f"{path}: {error}"
        raise ConfigError(message) from None


def split_address(key: str, address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` (``[::1]:8080`` for IPv6); raises ConfigError."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:  # noqa: PLR2004
        message = f"{key}: expected host:port, got {address!r}"
        raise ConfigError(message)
    return host, int(port)


def socket_path(key: str, address: str) -> Path | None:
    """Return the path of ``unix:/path``, None for ``host:port``; raises ConfigError."""
    if not address.startswith(UNIX_SCHEME):
        return None
    path = Path(address.removeprefix(UNIX_SCHEME))
    if not path.is_absolute() or "\0" in address:
        message = f"{key}: expected unix:/path, got {address!r}"
        raise ConfigError(message)
    return path


def check_replica_url(key: str, url: str) -> None:
    """Refuse whatever is not ``http[s]://host:port`` alone, or ``unix:/path``."""
    try:
        Endpoint.configured(url)
    except ValueError:
        shown = "one with credentials" if "@" in url else repr(url)
        message = f"{key}: expected http://host:port (or https://, or unix:/path), got {shown}"
        raise ConfigError(message) from None


def _check_listener(key: str, address: str, tls: ListenerTls | None) -> None:
    if socket_path(key, address) is None:
        split_address(key, address)
    elif tls is not None:
        message = f"{key}_tls: expected none, as {key} is a unix socket"
        raise ConfigError(message)


def check_config(config: Config) -> None:
    """Check what types cannot say; raises ConfigError."""
    _check_listener("listen", config.listen, config.listen_tls)
    if config.admin is not None:
        _check_listener("admin", config.admin, config.admin_tls)
    elif config.admin_tls is not None:
        message = "admin_tls: expected none without admin"
        raise ConfigError(message)
    _check_limits(config.limits)
    if config.state.redis is not None:
        try:
            check_url(config.state.redis)
        except ValueError as error:
            message = f"state.redis: {error}"
            raise ConfigError(message) from None
    if config.hold.enabled and config.state.lookup == "direct":
        message = "hold.enabled: expected state.lookup mirror; a waiting request is chosen for anew"
        raise ConfigError(message)
    _check_replicas(config)
    _check_parts(config)
    for index, model in enumerate(config.models):
        if (model.tokenizer is None) is (model.tokens is None):
            message = f"models[{index}]: expected one of tokenizer and tokens"
            raise ConfigError(message)
    models = [model.name for model in config.models]
    if len(set(models)) != len(models):
        message = "models: a model occurs twice"
        raise ConfigError(message)
    _check_tenants(config)


def _check_parts(config: Config) -> None:
    for key, fault in (
        ("registration", registration_fault(config.registration)),
        ("recording", recording_fault(config.recording)),
        ("shadow", shadow_fault(config.shadow, config.policy)),
        ("warm_up", warm_up_fault(config.warm_up, config.state.lookup)),
    ):
        if fault is not None:
            message = f"{key}.{fault}"
            raise ConfigError(message)
    fault = share_fault(config)
    if fault is not None:
        raise ConfigError(fault)


def _check_limits(limits: LimitSettings) -> None:
    for index, proxy in enumerate(limits.trusted_proxies):
        try:
            ip_network(proxy)
        except ValueError:
            message = f"limits.trusted_proxies[{index}]: expected a network, such as 10.0.0.0/8"
            raise ConfigError(message) from None
    if limits.buffered_bytes < limits.body_bytes:
        message = "limits.buffered_bytes: expected at least limits.body_bytes"
        raise ConfigError(message)


def _check_replicas(config: Config) -> None:
    seen: set[str] = set()
    for index, replica in enumerate(config.replicas):
        check_replica_url(f"replicas[{index}].url", replica.url)
        name = replica_name(replica)
        if not re.fullmatch(NAME_PATTERN, name):
            message = f"replicas[{index}]: give it a name; its address does not make one"
            raise ConfigError(message)
        if name in seen:
            message = f"replicas[{index}]: {name!r} occurs twice; give each replica its own name"
            raise ConfigError(message)
        seen.add(name)


def _check_tenants(config: Config) -> None:
    fault = tenant_fault(config.tenants, config.groups)
    fault = fault or public_fault(config.public_prefixes, config.tenants)
    why = "there are tenants" if config.tenants else "sealed_state is require"
    if config.deployment_key_file is None and (config.tenants or config.sealed_state == "require"):
        fault = fault or f"deployment_key_file: expected the path of a key, as {why}"
    if fault is not None:
        raise ConfigError(fault)


def replica_name(replica: StaticReplica) -> str:
    """Return the configured name, else ``host:port``, or the path of its socket with dots."""
    return replica.name or Endpoint.configured(replica.url).name
