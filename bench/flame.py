"""Flame graphs: stacks of the running process, sampled by a timer, and drawn as one SVG.

The interpreter handles the timer's signal where a function begins, where one has called C, and at
the end of a loop's turn: what C takes is told of the function that called it, and the last
instructions before a call of the called one. So whole calls can be trusted, and single small
functions less. Frames from the loop down are drawn; what is narrower than a quarter of a percent is
left out.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import CodeType, FrameType

ROOT: Final = Path(__file__).resolve().parents[1]
LIBRARY: Final = Path(signal.__file__).parent
"""Of Python itself."""
INTERVAL_S: Final = 0.001
WIDTH, LINE, TOP = 1200, 17, 44
LETTER: Final = 6.1
"""Pixels of a letter of 10 px monospace, rounded up."""
LEAST_SHARE: Final = 0.0025
LEAST_LETTERS: Final = 3
COLOURS: Final = {
    "router": "#f4a261",
    "prompt": "#8ac17a",
    "state": "#7fb3e6",
    "policies": "#c9a2e8",
    "bench": "#c4c4c4",
    "other": "#e6dfd3",
}
STYLE: Final = "text{font:10px monospace;pointer-events:none;fill:#16181d}rect{stroke:#fff}"


@dataclass(frozen=True, slots=True)
class Place:
    """A function: the file below the project or below its library, and its name."""

    file: str
    name: str

    @classmethod
    def of(cls, code: CodeType) -> Place:
        """Return that of a code object; it names no directory of the machine."""
        path = Path(code.co_filename)
        if "site-packages" in path.parts:
            at = path.parts.index("site-packages") + 1
            return cls("/".join(path.parts[at:]), code.co_qualname)
        above = next((one for one in (ROOT, LIBRARY) if path.is_relative_to(one)), path.parent)
        return cls(path.relative_to(above).as_posix(), code.co_qualname)

    @property
    def area(self) -> str:
        """Return which part of the project it is in."""
        package = self.file.partition("/")[0]
        return package if package in COLOURS else "other"


Stack = tuple[Place, ...]


class Sampler:
    """Counts the main thread's stacks while ``is_on``; a context manager, in the main thread."""

    def __init__(self) -> None:
        self.is_on = False
        self.samples = 0
        self._codes: Counter[tuple[CodeType, ...]] = Counter()

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGALRM, self._sample)
        signal.setitimer(signal.ITIMER_REAL, INTERVAL_S, INTERVAL_S)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _sample(self, _signal: int, frame: FrameType | None) -> None:
        if not self.is_on:
            return
        codes = []
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        self._codes[tuple(reversed(codes))] += 1
        self.samples += 1

    def stacks(self) -> dict[Stack, int]:
        """Return the stacks from the event loop down, with how often each was seen."""
        found: Counter[Stack] = Counter()
        for codes, count in self._codes.items():
            found[tuple(map(Place.of, codes))] += count
        shared = shared_depth(list(found))
        below: Counter[Stack] = Counter()
        for stack, count in found.items():
            below[stack[shared:]] += count
        return dict(below)


def shared_depth(stacks: list[Stack]) -> int:
    """Return how many frames all stacks begin with alike."""
    depth = 0
    for level in zip(*stacks, strict=False):
        if len(set(level)) > 1:
            break
        depth += 1
    return depth


@dataclass(slots=True)
class Node:
    """A function below its callers: samples in it and below, and those in itself."""

    total: int = 0
    own: int = 0
    below: dict[Place, Node] = field(default_factory=dict)


def tree_of(stacks: Mapping[Stack, int]) -> Node:
    """Return the stacks as one tree."""
    root = Node()
    for stack, count in stacks.items():
        node = root
        node.total += count
        for place in stack:
            node = node.below.setdefault(place, Node())
            node.total += count
        node.own += count
    return root


def own_shares(stacks: Mapping[Stack, int]) -> dict[str, float]:
    """Return each file's share of the samples, largest first.

    Time in a library is that of the project's function that called it.
    """
    counts: Counter[str] = Counter()
    for stack, count in stacks.items():
        own = [place for place in stack if place.area != "other"]
        counts[own[-1].file if own else "event loop"] += count
    whole = sum(counts.values())
    return {name: count / whole for name, count in counts.most_common()}


def share_below(stacks: Mapping[Stack, int], name: str) -> float:
    """Return the share of the samples in a function of this name or in what it calls."""
    inside = sum(
        count for stack, count in stacks.items() if any(place.name == name for place in stack)
    )
    return inside / sum(stacks.values())


def svg(stacks: Mapping[Stack, int], title: str) -> str:
    """Return a flame graph, widest callees first, as a self-contained SVG."""
    root = tree_of(stacks)
    boxes, deepest = [], 0
    for place, node, depth, left in _placed(root, root.total, 0, 0.0):
        boxes.append(_box(place, node, depth, left, root.total))
        deepest = max(deepest, depth)
    height = TOP + LINE * (deepest + 1) + 6
    legend = "".join(
        f'<rect x="{6 + at * 90}" y="24" width="10" height="10" fill="{colour}"/>'
        f'<text x="{20 + at * 90}" y="33">{area}</text>'
        for at, (area, colour) in enumerate(COLOURS.items())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style>'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        f'<text x="6" y="14">{escape(title)}, {root.total:,} samples</text>{legend}\n'
        + "\n".join(boxes)
        + "\n</svg>\n"
    )


def _placed(
    node: Node, whole: int, depth: int, left: float
) -> Iterator[tuple[Place, Node, int, float]]:
    """Yield what is wide enough, with its depth and left edge from 0 to 1."""
    ordered = sorted(node.below.items(), key=lambda item: -item[1].total)
    for place, below in ordered:
        if below.total < LEAST_SHARE * whole:
            return
        yield place, below, depth, left
        yield from _placed(below, whole, depth + 1, left)
        left += below.total / whole


def _box(place: Place, node: Node, depth: int, left: float, whole: int) -> str:
    width = node.total / whole * WIDTH
    x, y = left * WIDTH, TOP + depth * LINE
    told = escape(
        f"{place.file} {place.name}: {node.total / whole:.1%}, itself {node.own / whole:.1%}"
    )
    box = (
        f'<g><title>{told}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" '
        f'height="{LINE - 1}" fill="{COLOURS[place.area]}"/>'
    )
    letters = int((width - 4) / LETTER)
    if letters < LEAST_LETTERS:
        return f"{box}</g>"
    shown = place.name.removeprefix("<").replace(".<locals>", "")[:letters]
    return f'{box}<text x="{x + 3:.1f}" y="{y + 12}">{escape(shown)}</text></g>'
