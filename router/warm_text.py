"""The tokens of the hottest prefixes, kept in this process alone so that they can be computed anew.

Everywhere else the router has ids of prompts, from which nothing can be read. To place a prefix
somewhere its tokens are needed, and these are its text. So they are kept only where an operator
asked for it, with tenants only of those that are marked, only of prefixes that came several times
(what is each request's own is cut off), within a bound of bytes and of time, and under the salt
that their tenant's requests had. Nothing writes them anywhere, and nothing shows them: what may be
looked at are counts. When a scope is deleted its prefixes go at once, and in any case none is kept
or used under another salt than the present one of its scope: not after a rotation either, and not
of a user that a tenant keeps apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prompt.model import PromptTokens, ReadPrompt
from router.chooser import Routed
from state.prefix import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from policies.hot import HeatMap
    from router.warm_setting import WarmUpSettings
    from state.model import BlockId

BLOCK_KEPT_BYTES: Final = 100
"""Of process memory for the id of one block, as an object in a tuple."""
LARGEST_PART: Final = 4
"""One prefix takes at most this part of all that may be kept."""


@dataclass(slots=True, repr=False, eq=False)
class KeptPrefix:
    """One prefix: ``tokens`` in whole blocks, and what a request with them has to say."""

    tokens: PromptTokens
    chain: tuple[BlockId, ...]
    block_tokens: int
    model: str
    is_loadable: bool
    salt: str
    scope: str
    tenant: str | None
    arrivals: float
    seen_s: float
    _whole: Routed | None = None

    @property
    def whole(self) -> Routed:
        """What a request for all of it is to the router, made once: its chains are kept with it."""
        if self._whole is None:
            self._whole = self.routed(self.tokens.count)
        return self._whole

    @property
    def kept_bytes(self) -> int:
        """The memory that it takes."""
        return len(self.tokens.packed) + BLOCK_KEPT_BYTES * len(self.chain)

    def routed(self, end_tokens: int) -> Routed:
        """Return what a request for its first ``end_tokens`` and one more token is to the router.

        It has no ordinal: nothing is decided about it.
        """
        tokens = self.tokens
        if end_tokens < tokens.count:
            packed = tokens.packed[: end_tokens * TOKEN_BYTES]
            tokens = PromptTokens(packed=packed, is_exact=True)
        prompt = ReadPrompt(
            model=self.model,
            is_stream=False,
            prompts=(tokens,),
            salt=self.salt,
            max_output_tokens=1,
        )
        routed = Routed(prompt, 0, True, tokens.count)  # noqa: FBT003 - by place, as always
        routed.is_loadable, routed.scope, routed.tenant = self.is_loadable, self.scope, self.tenant
        return routed


class PrefixTexts:
    """All that is kept, by the id of the last block. Bounded; costs a request a walk at its end.

    ``salt_of`` answers the present salt of a scope; ``min_tokens`` is the shortest prefix kept.
    """

    def __init__(
        self,
        settings: WarmUpSettings,
        heat: HeatMap,
        clock: Callable[[], float],
        *,
        salt_of: Callable[[str], str] = lambda _: "",
        min_tokens: int = 1,
    ) -> None:
        self._settings = settings
        self._heat = heat
        self._clock = clock
        self._salt_of = salt_of
        self._min_tokens = min_tokens
        self._kept: dict[BlockId, KeptPrefix] = {}
        self.kept_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[KeptPrefix]:
        """Yield what may be used now."""
        return iter([one for one in self._kept.values() if self.is_good(one)])

    def note(self, routed: Routed) -> None:
        """Keep the part of a served request's prompt that others have, too.

        Its tenant was asked before. Prompts whose tokens are not known have nothing to keep.
        """
        prompt = routed.prompt
        if not routed.is_exact or len(prompt.prompts) != 1 or prompt.has_media:
            return
        if not routed.branches or routed.prompt_tokens < self._min_tokens:
            return
        if not self._is_present(routed.scope, prompt.salt):
            return
        # Where a prefix is public its heat is that of the chain that all share.
        shared = (one for one in routed.branches if one.part is not None)
        branch, now_s = next(shared, routed.branches[0]), self._clock()
        chain, block_tokens = branch.chains[0], branch.identity.block_tokens
        steps = self._heat.trail(chain, now_s)
        common = [one for one in steps if one.arrivals >= self._settings.min_arrivals]
        if not common or common[-1].blocks * block_tokens < self._min_tokens:
            return
        blocks, arrivals = common[-1].blocks, common[-1].arrivals
        known = self._kept.get(chain[blocks - 1])
        if known is not None and self.is_good(known):
            known.arrivals, known.seen_s = arrivals, now_s
            return
        end = blocks * block_tokens
        packed = prompt.prompts[0].packed[: end * TOKEN_BYTES]
        if len(packed) + BLOCK_KEPT_BYTES * blocks > self._settings.kept_bytes // LARGEST_PART:
            return
        self._keep(
            KeptPrefix(
                tokens=PromptTokens(packed=packed, is_exact=True),
                chain=chain[:blocks],
                block_tokens=block_tokens,
                model=prompt.model,
                is_loadable=routed.is_loadable,
                salt=prompt.salt,
                scope=routed.scope,
                tenant=routed.tenant,
                arrivals=arrivals,
                seen_s=now_s,
            )
        )

    def forget(self, scope: str) -> int:
        """Drop what was kept of ``scope``; return how many prefixes that were."""
        ended = [name for name, one in self._kept.items() if one.scope == scope]
        for name in ended:
            self._drop(name)
        return len(ended)

    def tick(self) -> None:
        """Drop what is too old, and what has a salt that ended."""
        for name in [name for name, one in self._kept.items() if not self.is_good(one)]:
            self._drop(name)

    def is_good(self, one: KeptPrefix) -> bool:
        """Return whether it may be used: it came lately, and its salt is the present one."""
        is_young = self._clock() - one.seen_s <= self._settings.kept_s
        return is_young and self._is_present(one.scope, one.salt)

    def _is_present(self, scope: str, salt: str) -> bool:
        return not scope or self._salt_of(scope) == salt

    def _keep(self, one: KeptPrefix) -> None:
        name = one.chain[-1]
        self._drop(name)
        self._kept[name] = one
        self.kept_bytes += one.kept_bytes
        while self.kept_bytes > self._settings.kept_bytes:
            self._drop(min(self._kept, key=self._warmth))

    def _warmth(self, name: BlockId) -> float:
        """Return how often it came lately: of what was not seen for long, little."""
        one = self._kept[name]
        return one.arrivals / (1.0 + self._clock() - one.seen_s)

    def _drop(self, name: BlockId) -> None:
        one = self._kept.pop(name, None)
        if one is not None:
            self.kept_bytes -= one.kept_bytes
