"""How many blocks each scope holds in the engines' caches, counted from the index in the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from state.client import is_wrong_type
from state.schema import ReplicaKeys, suffix_parts

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping

    from state.client import Client
    from state.model import Generation, NamespaceId, ReplicaId

Name = TypeVar("Name")


class _Asked(NamedTuple):
    key: str
    namespace: NamespaceId


async def held_blocks(
    client: Client,
    generations: Mapping[ReplicaId, Generation],
    namespaces: Mapping[NamespaceId, Name],
) -> dict[Name, int]:
    """Return the resident blocks of ``namespaces``, summed over replicas and tiers by their names.

    A block counts once for each copy of it. Raises what the store raises.
    """
    replicas = list(generations)
    pipeline = client.pipeline(transaction=False)
    for replica in replicas:
        pipeline.execute_command("SMEMBERS", ReplicaKeys(replica).sets)
    asked: list[_Asked] = []
    for replica, members in zip(
        replicas, await pipeline.execute(raise_on_error=False), strict=True
    ):
        asked += _asked(replica, generations[replica], _checked(members) or (), namespaces)
    pipeline = client.pipeline(transaction=False)
    for key, _ in asked:
        pipeline.execute_command("SCARD", key)
    counts = await pipeline.execute(raise_on_error=False) if asked else ()
    held: dict[Name, int] = {}
    for (_, namespace), count in zip(asked, counts, strict=True):
        name = namespaces[namespace]
        held[name] = held.get(name, 0) + int(_checked(count) or 0)
    return held


def _asked(
    replica: ReplicaId,
    generation: Generation,
    members: Iterable[bytes],
    namespaces: Container[str],
) -> Iterator[_Asked]:
    """Yield the residency keys of one replica that belong to ``namespaces``."""
    keys = ReplicaKeys(replica)
    for member in members:
        suffix = member.decode("utf-8", "replace")
        parts = suffix_parts(suffix)
        if parts is not None and parts.generation == generation and parts.namespace in namespaces:
            yield _Asked(keys.residency(suffix), parts.namespace)


def _checked(reply: Any) -> Any:
    """Return a reply; None for a key of another type, which counts as empty."""
    if is_wrong_type(reply):
        return None
    if isinstance(reply, Exception):
        raise reply
    return reply
