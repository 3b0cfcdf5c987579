from __future__ import annotations

from collections import Counter

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.sketch import PrefixNode, PrefixSketch, SketchBounds
from state.model import BlockId

untimed = settings(deadline=None)  # a busy machine is no failure


def chain_of_letters(letters: str) -> tuple[BlockId, ...]:
    ids: list[BlockId] = []
    for letter in letters:
        parent = ids[-1] if ids else b""
        ids.append(BlockId(xxhash.xxh3_128_digest(parent + letter.encode())))
    return tuple(ids)


def below(node: PrefixNode) -> list[PrefixNode]:
    return [found for child in node.children.values() for found in [child, *below(child)]]


chains = st.lists(
    st.text("ab", max_size=12).map(chain_of_letters)
    | st.integers(0, 40).map(lambda blocks: chain_of_letters("a" * blocks)),
    max_size=60,
)


@untimed
@given(chains, st.integers(2, 12), st.integers(8, 40))
def test_counts_sit_at_true_prefixes_and_are_never_too_high(
    arrivals: list[tuple[BlockId, ...]], max_nodes: int, max_blocks: int
) -> None:
    bounds = SketchBounds(
        half_life_s=30.0, settled_arrivals=4.0, max_nodes=max_nodes, max_blocks=max_blocks
    )
    sketch = PrefixSketch(bounds, 0.0)
    seen: Counter[BlockId] = Counter()
    for chain in arrivals:
        seen.update(chain)
        path = sketch.count(chain, 0.0)
        ends = [node.end_blocks for node in path]
        assert ends == sorted(set(ends))
        for node in path:
            assert node.name == chain[node.end_blocks - 1]
            assert node.arrivals <= seen[BlockId(node.name)] + 1e-9


@untimed
@given(chains, st.integers(2, 12), st.integers(20, 60))
def test_the_books_of_the_sketch_add_up_and_its_bounds_hold(
    arrivals: list[tuple[BlockId, ...]], max_nodes: int, max_blocks: int
) -> None:
    bounds = SketchBounds(
        half_life_s=30.0, settled_arrivals=4.0, max_nodes=max_nodes, max_blocks=max_blocks
    )
    sketch = PrefixSketch(bounds, 0.0)
    for index, chain in enumerate(arrivals):
        sketch.count(chain, float(index))
        nodes = below(sketch.root)
        assert sketch.node_count == len(nodes)
        assert sketch.stored_blocks == sum(node.run_blocks for node in nodes)
        leaves = [node for node in nodes if not node.children]
        assert sketch.node_count <= max_nodes or len(leaves) == 1
        assert sketch.stored_blocks <= max_blocks or len(leaves) == 1
        for node in nodes:
            assert node.parent is not None
            assert node.end_blocks == node.parent.end_blocks + node.run_blocks
            assert node.packed.startswith(node.first)


@untimed
@given(chains)
def test_with_ample_room_every_fork_is_found_exactly(arrivals: list[tuple[BlockId, ...]]) -> None:
    bounds = SketchBounds(
        half_life_s=30.0, settled_arrivals=2.0, max_nodes=10_000, max_blocks=100_000
    )
    sketch = PrefixSketch(bounds, 0.0)
    known: set[BlockId] = set()
    for chain in arrivals:
        shared = sum(block in known for block in chain)
        before = set(below(sketch.root))
        path = sketch.count(chain, 0.0)
        known.update(chain)
        if 0 < shared < len(chain):
            is_prolonged = path[-1] in before
            assert is_prolonged or shared in {node.end_blocks for node in path}
            assert path[-1].end_blocks == len(chain)
