"""The page machine for a long time: ``python -m support.soak --operations 1000000 --seed 1``.

Every world is small, odd and drawn from the seed; after every operation all invariants are checked.
A violation ends it with the seed, the world's shape and its last operations.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from support.page_shape import Shape
from support.page_world import PageWorld

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD_OPERATIONS = 400
PROGRESS_S = 5.0


def draw_shape(rng: random.Random) -> Shape:
    """Return a small world, tight in one way or another."""
    pages = rng.randint(2, 16)
    host_slots = rng.choice([0, 1, 2, 4, 12])
    first_quota = rng.randint(0, pages // 2)
    return Shape(
        pages=pages,
        page_tokens=rng.choice([1, 2, 3]),
        step_tokens=rng.randint(4, 24),
        sequences=rng.randint(1, 6),
        host_slots=host_slots,
        disk_slots=rng.choice([0, 1, 2, 4, 12]) if host_slots else 0,
        eviction=rng.choice(["lru", "benefit", "quota"]),
        quota_pages=(first_quota, rng.randint(0, pages // 2)),
        public_tokens=rng.choice([0, 0, 4, 9]),
        fetch=rng.choice(["cheaper", "always", "never"]),
        demote=rng.choice(["all", "all", "reused"]),
        page_ms=rng.choice([0.1, 1.0, 3.0]),
        pair_ms=rng.choice([0.0, 0.1, 1.0]),
    )


def _submit(world: PageWorld, rng: random.Random) -> None:
    """Ask for something that mostly fits, and sometimes just so."""
    room_tokens = world.shape.pages * world.shape.page_tokens + rng.randint(-2, 1)
    shared_tokens = rng.randint(1, max(1, min(16, room_tokens)))
    tail = [rng.randint(0, 2) for _ in range(rng.randint(0, 4))]
    most_outputs = max(1, min(20, room_tokens - shared_tokens - len(tail)))
    salt = rng.choice([0, 0, 1, 2])
    world.submit(rng.randint(0, 2), shared_tokens, tail, rng.randint(1, most_outputs), salt)


def _advance(world: PageWorld, rng: random.Random) -> None:
    world.complete(rng.randint(0, 2))
    world.schedule()


_OPERATIONS: dict[str, tuple[int, Callable[[PageWorld, random.Random], None]]] = {
    "submit": (14, _submit),
    "fork": (6, lambda world, rng: world.fork(rng.randint(0, 99), rng.randint(1, 12))),
    "schedule": (12, lambda world, _: world.schedule()),
    "complete": (12, lambda world, rng: world.complete(rng.randint(0, 2))),
    "advance": (40, _advance),
    "fail": (2, lambda world, rng: world.fail(rng.randint(0, 3))),
    "abort": (3, lambda world, rng: world.abort(rng.randint(0, 99))),
    "arrive": (
        10,
        lambda world, rng: world.arrive(
            rng.randint(0, 9), rng.randint(0, 9), is_bad=rng.random() < 0.2
        ),
    ),
    "begin_write": (12, lambda world, _: world.begin_write()),
    "end_write": (12, lambda world, rng: world.end_write(is_good=rng.random() < 0.9)),
    "pin": (2, lambda world, rng: world.pin(rng.randint(0, 99), rng.choice([1.0, 10.0, 1e9]))),
    "unpin": (1, lambda world, rng: world.unpin(rng.randint(0, 99))),
    "wait": (3, lambda world, rng: world.wait(rng.choice([0.1, 1.0, 10.0]))),
    "begin_read": (2, lambda world, rng: world.begin_read(rng.randint(0, 99))),
    "end_read": (3, lambda world, _: world.end_read()),
    "reset": (1, lambda world, rng: world.reset() if rng.random() < 0.2 else None),
    "run_to_the_end": (
        1,
        lambda world, rng: world.run_to_the_end(rng.randint(0, 2)) if rng.random() < 0.3 else None,
    ),
}


class Soak:
    """Worlds one after another. ``done`` counts what happened in them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.operations = 0
        self.done: Counter[str] = Counter()
        self._names = list(_OPERATIONS)
        self._weights = [weight for weight, _ in _OPERATIONS.values()]

    def run_world(self, operations: int = WORLD_OPERATIONS) -> None:
        """Live one world; AssertionError or what the code raised, with how to see it again."""
        number = self.operations // WORLD_OPERATIONS
        rng = random.Random(f"{self.seed}/{number}")
        world = PageWorld(draw_shape(rng))
        last: deque[str] = deque(maxlen=20)
        try:
            for name in rng.choices(self._names, self._weights, k=operations):
                last.append(name)
                _OPERATIONS[name][1](world, rng)
                world.check()
            world.run_to_the_end(1)
            world.check()
        except Exception as error:
            error.add_note(f"seed {self.seed}, world {number}: {world.shape}")
            error.add_note(f"last operations: {' '.join(last)}")
            raise
        self.operations += operations
        self.done += world.done


def main() -> int:
    """Run, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, prog="soak")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    soak = Soak(given.seed)
    began_s = told_s = time.monotonic()
    while soak.operations < given.operations:
        soak.run_world()
        now_s = time.monotonic()
        if now_s - told_s > PROGRESS_S or soak.operations >= given.operations:
            told_s = now_s
            rate = soak.operations / (now_s - began_s)
            print(  # noqa: T201
                f"{soak.operations:,} of {given.operations:,} operations, {rate:,.0f} a second",
                flush=True,
            )
    print(", ".join(f"{count:,} {name}" for name, count in sorted(soak.done.items())))  # noqa: T201
    print(f"no violation (seed {given.seed})")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
