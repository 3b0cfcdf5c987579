from __future__ import annotations

import pytest

from sidecar.sequence import END_SEQUENCE, Batch, SequenceFence, Step, parse_frames


def number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def batch(sequence: int) -> Batch:
    return Batch(sequence, b"p%d" % sequence)


@pytest.mark.parametrize(
    "frames",
    [
        [b"topic", number(3), b"p3"],
        [b"", number(3), b"p3"],
        [number(3), b"p3"],
        [b"", b"topic", number(3), b"p3"],
        [b"", b"", number(3), b"p3"],
    ],
)
def test_every_framing_of_a_batch_reads_the_same(frames: list[bytes]) -> None:
    """B08."""
    assert parse_frames(frames) == batch(3)


@pytest.mark.parametrize(
    "frames", [[b"", number(END_SEQUENCE), b""], [b"", b"", number(END_SEQUENCE), b""]]
)
def test_both_end_marks_end_a_replay(frames: list[bytes]) -> None:
    """B08."""
    end = parse_frames(frames)
    assert end is not None
    assert end.sequence == END_SEQUENCE


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"topic", b"short", b"p"], [b"a", b"b", number(1), b"p"], [b""] * 6]
)
def test_other_messages_are_no_batches(frames: list[bytes]) -> None:
    assert parse_frames(frames) is None


def follow(fence: SequenceFence, *sequences: int) -> list[Step]:
    steps = []
    for sequence in sequences:
        step = fence.classify(batch(sequence))
        if step is Step.NEXT:
            fence.applied(batch(sequence))
        steps.append(step)
    return steps


def test_consecutive_batches_are_next_and_a_missing_one_is_a_gap() -> None:
    """A78, B06."""
    fence = SequenceFence()
    assert follow(fence, 4, 5, 9) == [Step.NEXT, Step.NEXT, Step.GAP]
    assert fence.expected_sequence == 6


def test_live_batches_that_a_replay_brought_already_are_repeated() -> None:
    fence = SequenceFence()
    follow(fence, 1)
    for sequence in range(2, 6):
        fence.applied(batch(sequence))
    assert follow(fence, 3, 4, 5, 6) == [Step.REPEATED, Step.REPEATED, Step.REPEATED, Step.NEXT]


@pytest.mark.parametrize("sequence", [0, 2, 5])
def test_a_live_batch_that_does_not_go_up_is_of_another_life(sequence: int) -> None:
    """A79."""
    fence = SequenceFence()
    follow(fence, 4, 5)
    assert fence.classify(batch(sequence)) is Step.RESTARTED


def test_a_life_is_recognised_by_its_last_payload() -> None:
    fence = SequenceFence()
    follow(fence, 4)
    assert fence.is_same_life(batch(4))
    assert not fence.is_same_life(Batch(4, b"other"))
