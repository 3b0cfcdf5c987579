"""S-01: public prefixes from the router to the engine and back: what is shared, and by whom.

The router's chains, the worker's pages and the sidecar's blocks of what the worker tells are the
real ones; a prompt's prediction is compared with what the worker then reuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from policies.hot import HeatMap, HotSettings
from prompt.codec import load_codec
from prompt.model import PromptTokens, ReadPrompt
from prompt.run import RunTokens, TokenRun
from router.chooser import Knowledge, Routed
from router.fleet import Member
from router.outlook import Outlook
from router.public_prefix import PublicPrefixes
from router.public_setting import PublicPrefixSettings
from router.upstream import Endpoint
from sidecar.cache import PagedCache
from sidecar.event import decode_batch
from sidecar.fold import PageFolder
from sidecar.publisher import EventFormat
from sidecar.scheduler import Scheduler
from sidecar.scope import Scopes
from sidecar.step import SchedulerLimits
from state.lease import LeaseBook
from state.memory import MemoryState
from state.model import ModelIdentity, ReplicaId, RouterId
from state.placement import Placements
from state.prefix import TOKEN_BYTES, cached_tokens, common_blocks, pack_tokens
from state.public import read_mark
from state.secret import ChainKeys

if TYPE_CHECKING:
    from router.branch import Branch
    from state.model import BlockId

PAGE_TOKENS = 2
CODEC = load_codec(None)
KEYS = ChainKeys(0, b"a deployment key of thirty-two bytes")
SALTS = ("a", "b", "c")

tokens = st.lists(st.integers(0, 2), max_size=14)
prefixes = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=11), min_size=1, max_size=3)


@st.composite
def asked(draw: st.DrawFn) -> tuple[list[list[int]], int, list[tuple[str, list[int]]]]:
    """Return public prefixes, the tokens of a block, and who asks what."""
    public = draw(prefixes)
    block_tokens = draw(st.sampled_from([2, 4]))
    prompt = st.builds(
        lambda start, cut, rest: [*start[:cut], *rest],
        st.sampled_from([*public, []]),
        st.integers(0, 12) | st.just(12),
        tokens,
    ).filter(bool)
    asks = draw(st.lists(st.tuples(st.sampled_from(SALTS), prompt), min_size=1, max_size=8))
    return public, block_tokens, asks


class World:
    """One router, one worker, one sidecar."""

    def __init__(self, public: list[list[int]], block_tokens: int, *, salts_tails: bool) -> None:
        identity = ModelIdentity(model="m", block_tokens=block_tokens)
        self.member = Member(
            replica=ReplicaId("w"),
            endpoint=Endpoint("127.0.0.1", 1),
            identity=identity,
            is_registered=True,
            has_events=True,
            salts_tails=salts_tails,
        )
        know = Knowledge(
            reader=MemoryState(lambda: 0.0).reader(RouterId("r")),
            leases=LeaseBook(),
            pending=Placements(2.0),
            guessed=Placements(2.0),
            heat=HeatMap(HotSettings()),
        )
        self.outlook = Outlook(know, KEYS)
        settings = [
            PublicPrefixSettings(name=f"p{at}", model="m", prompt="as given")
            for at in range(len(public))
        ]
        given = {f"p{at}": pack_tokens(one) for at, one in enumerate(public)}
        self.outlook.public = PublicPrefixes(settings, lambda _: CODEC, given)
        self.scheduler = Scheduler(PagedCache(512, PAGE_TOKENS), SchedulerLimits())
        own = ModelIdentity(model="its name", block_tokens=PAGE_TOKENS)
        self.scopes = Scopes(own, 3)
        self.folder = PageFolder(identity, PAGE_TOKENS, keys=KEYS)

    def branch(self, salt: str, prompt: list[int]) -> Branch:
        """Return the chains of a request, half of whose tokens are a run that others share."""
        run = TokenRun().extended(0, pack_tokens(prompt[: len(prompt) // 2]))
        rest = pack_tokens(prompt[len(prompt) // 2 :])
        told = PromptTokens(run=RunTokens(run, len(prompt) // 2, rest), is_exact=True)
        read = ReadPrompt(model="m", is_stream=False, prompts=(told,), salt=salt)
        routed = Routed(read, 1, is_exact=True, prompt_tokens=len(prompt))
        return self.outlook.branch(routed, self.member)

    def resident(self) -> set[BlockId]:
        return set().union(*self.folder.resident().values())

    def ask(self, salt: str, prompt: list[int]) -> tuple[int, int]:
        """Return the tokens that the router predicts to be cached, and those that are."""
        branch, packed = self.branch(salt, prompt), pack_tokens(prompt)
        resident, run = self.resident(), 0
        while run < len(branch.chains[0]) and branch.chains[0][run] in resident:
            run += 1
        header = branch.mark.value if branch.mark is not None else None
        place = self.scopes.place(packed, salt, read_mark(header))
        table = self.scheduler.cache.open_table(packed, place, salt)
        sequence = self.scheduler.submit(table, 1)
        while self.scheduler.has_work:
            for each in self.scheduler.complete(self.scheduler.schedule()):
                self.scheduler.append(each, 1)
                self.scheduler.end(each)
        changes = self.scheduler.cache.drain_changes()
        payload = EventFormat(page_tokens=PAGE_TOKENS).batch(changes, 0.0)
        self.folder.apply(decode_batch(payload).events)
        reused = sequence.cached_tokens
        assert reused is not None
        return cached_tokens(run, branch.identity.block_tokens, len(prompt)), reused


def common_tokens(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next(
        (at for at, pair in enumerate(pairs) if len({*pair}) > 1), min(len(one), len(other))
    )


def public_blocks(public: list[list[int]], block_tokens: int, prompt: list[int]) -> int:
    """Return what is public of a prompt, in blocks: worked out the long way round."""
    most = 0
    for one in public:
        whole = len(one) // block_tokens * block_tokens
        if prompt[:whole] == one[:whole]:
            most = max(most, whole // block_tokens)
    return most


@given(asked())
def test_the_engine_reuses_what_the_router_predicted_and_another_tenant_the_public_part_alone(
    case: tuple[list[list[int]], int, list[tuple[str, list[int]]]],
) -> None:
    """The least that an honest reference would reuse, for each request in turn."""
    public, block_tokens, asks = case
    world = World(public, block_tokens, salts_tails=True)
    seen: list[tuple[str, list[int], int]] = []
    for salt, prompt in asks:
        own = public_blocks(public, block_tokens, prompt) * block_tokens
        wanted = 0
        for other, theirs, their_public in seen:
            same = common_tokens(prompt, theirs)
            # What has another start of its private part is another prompt, whoever asks.
            if other != salt or their_public != own:
                same = min(same, own, their_public)
            wanted = max(wanted, same // PAGE_TOKENS * PAGE_TOKENS)
        wanted = min(wanted, (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS)
        predicted, reused = world.ask(salt, prompt)
        assert reused == wanted
        assert predicted // block_tokens == reused // block_tokens or predicted == len(prompt) - 1
        seen.append((salt, prompt, own))
    assert not world.folder.counts.opaque_pages
    assert not world.folder.counts.ambiguous_events


@given(asked())
def test_two_tenants_chains_have_the_whole_public_blocks_in_common_and_no_other(
    case: tuple[list[list[int]], int, list[tuple[str, list[int]]]],
) -> None:
    public, block_tokens, asks = case
    world = World(public, block_tokens, salts_tails=True)
    for _, prompt in asks:
        [one], [other] = (world.branch(salt, prompt).chains for salt in ("a", "b"))
        shared = public_blocks(public, block_tokens, prompt)
        assert common_blocks(one, other) == shared
        assert not set(one[shared:]) & set(other[shared:])
        assert len(one) == len(other) == len(prompt) // block_tokens
        assert one == world.branch("a", prompt).chains[0]


@given(asked())
def test_a_replica_that_salts_whole_prompts_shares_nothing_between_tenants(
    case: tuple[list[list[int]], int, list[tuple[str, list[int]]]],
) -> None:
    public, block_tokens, asks = case
    world = World(public, block_tokens, salts_tails=False)
    for _, prompt in asks:
        branches = [world.branch(salt, prompt) for salt in ("a", "b")]
        assert [branch.mark for branch in branches] == [None, None]
        [one], [other] = (branch.chains for branch in branches)
        assert not set(one) & set(other)


@given(prefixes, tokens)
def test_no_block_that_is_public_has_a_token_that_is_not_the_operator_s(
    public: list[list[int]], prompt: list[int]
) -> None:
    world = World(public, 4, salts_tails=True)
    branch = world.branch("a", [*prompt, 1])
    if branch.part is not None:
        packed = branch.part.packed
        assert len(packed) == branch.part.blocks * 4 * TOKEN_BYTES
        assert any(pack_tokens(one).startswith(packed) for one in public)
        assert pack_tokens([*prompt, 1]).startswith(packed)
