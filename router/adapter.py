"""Adapters (LoRA): which replicas have one, which may load it, and what its chains start from.

A request names an adapter as its model. It goes to replicas that have it loaded, each of which
knows its pages under a key of its own (``state.model.Adapter``). Where none has, and only if the
configuration says that engines load it when they are asked, any replica of the base model will do.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta, Struct, structs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from router.chooser import Routed
    from router.fleet import Member
    from state.model import ModelIdentity, ReplicaId, ReplicaRecord

NONE: Final[Mapping[str, ModelIdentity]] = MappingProxyType({})
_REST: Final = "*"


class AdapterSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adapters that engines of ``base`` load when they are asked for them.

    ``*`` at the end of ``name`` stands for any ending.
    """

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    base: Annotated[str, Meta(min_length=1, max_length=512)]

    def is_for(self, model: str) -> bool:
        """Return whether ``model`` is such an adapter."""
        if self.name.endswith(_REST):
            return model.startswith(self.name.removesuffix(_REST)) and model != self.base
        return model == self.name


class Adapters:
    """The adapters of the registered replicas, and those that may be loaded."""

    def __init__(self, on_demand: Sequence[AdapterSettings] = ()) -> None:
        self._on_demand = tuple(on_demand)
        self._known: dict[ReplicaId, tuple[ReplicaRecord, Mapping[str, ModelIdentity]]] = {}
        self._bases: dict[str, str | None] = {}

    def of(self, record: ReplicaRecord) -> Mapping[str, ModelIdentity]:
        """Return what the chains of each of the replica's adapters start from.

        Records come again with every report of load, so what was made of one is kept.
        """
        if not record.adapters:
            self._known.pop(record.replica, None)
            return NONE
        known = self._known.get(record.replica)
        if known is None or known[0] is not record:
            made = {
                adapter.name: structs.replace(record.identity, adapter=adapter.key)
                for adapter in record.adapters
            }
            known = self._known[record.replica] = (record, made)
        return known[1]

    def settle(self, members: Iterable[Member]) -> None:
        """Take over who is in the fleet; called when that has changed."""
        bases: dict[str, str | None] = {}
        names = set()
        for member in members:
            names.add(member.replica)
            for name, identity in member.adapters.items():
                if bases.setdefault(name, identity.model) != identity.model:
                    bases[name] = None  # whose tokenizer reads it cannot be said
        self._bases = bases
        for replica in self._known.keys() - names:
            del self._known[replica]

    def base_of(self, model: str) -> str | None:
        """Return what ``model`` is an adapter of; None where that is no model, or several."""
        if model in self._bases:
            return self._bases[model]
        return self.loadable_base(model)

    def loadable_base(self, model: str) -> str | None:
        """Return the model whose engines load ``model`` when they are asked for it."""
        if not self._on_demand:
            return None
        return next((one.base for one in self._on_demand if one.is_for(model)), None)


def announced_of(routed: Routed, member: Member) -> ModelIdentity | None:
    """Return what a request's chain starts from on ``member``, its scope apart."""
    identity, model = member.identity, routed.prompt.model
    if identity is None or identity.model == model:
        return identity
    own = member.adapters.get(model)
    if own is not None:
        return own
    return structs.replace(identity, adapter=model) if routed.is_loadable else identity
