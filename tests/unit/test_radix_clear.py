"""A tree that forgets gives its texts back at once, not when a collection comes by."""

from __future__ import annotations

import gc
import weakref

from prompt.radix import PrefixTree


class Payload:
    """Something that can be waited for to go."""


def test_what_is_forgotten_is_gone_without_a_collection() -> None:
    tree: PrefixTree[Payload] = PrefixTree(1 << 20)
    left = []
    gc.disable()
    try:
        for number in range(100):
            key = b"shared beginning " + str(number).encode() * 8
            payload = Payload()
            left.append(weakref.ref(payload))
            tree.insert(key, len(key), [(len(key), payload)], tree.find(key))
        del payload
        found = tree.find(key)
        tree.clear()
        assert found.payload is left[-1]()
        del found
        assert [one for one in left if one() is not None] == []
    finally:
        gc.enable()
    assert (tree.used_bytes, tree.find(b"shared").matched) == (0, 0)
    again = Payload()
    tree.insert(b"shared", 6, [(6, again)], tree.find(b"shared"))
    assert tree.find(b"shared beginning").payload is again
