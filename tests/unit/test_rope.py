from __future__ import annotations

import math

import numpy as np
import pytest

from sidecar.compute.numpy_forward import PositionTable
from sidecar.compute.rope import (
    RopeConfig,
    attention_factor,
    inverse_frequencies,
    rope_rows,
)

WIDTH = 16
PLAIN = inverse_frequencies(RopeConfig(), WIDTH)


def test_angles_fall_with_the_dimension() -> None:
    assert pytest.approx([10_000.0 ** (-2 * pair / WIDTH) for pair in range(8)]) == PLAIN


def test_linear_divides_every_frequency() -> None:
    config = RopeConfig(kind="linear", factor=4.0)
    assert inverse_frequencies(config, WIDTH) == pytest.approx(PLAIN / 4)


def test_llama3_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    config = RopeConfig(kind="llama3", factor=8.0, original_tokens=512)
    found = inverse_frequencies(config, WIDTH)
    turns = 512 * PLAIN / (2 * math.pi)
    is_fast, is_slow = turns > 4, turns < 1
    assert is_fast.any()
    assert is_slow.any()
    assert (~is_fast & ~is_slow).any()
    assert found[is_fast] == pytest.approx(PLAIN[is_fast])
    assert found[is_slow] == pytest.approx(PLAIN[is_slow] / 8)
    assert ((found >= PLAIN / 8) & (found <= PLAIN)).all()
    assert (np.diff(found) < 0).all()


def test_yarn_ramps_between_two_numbers_of_turns() -> None:
    config = RopeConfig(kind="yarn", factor=8.0, original_tokens=2048)
    found = inverse_frequencies(config, WIDTH)
    assert found[0] == pytest.approx(PLAIN[0])
    assert found[-1] == pytest.approx(PLAIN[-1] / 8)
    share = found / PLAIN
    assert (np.diff(share) <= 0).all()
    assert ((share > 1 / 8 + 1e-9) & (share < 1 - 1e-9)).any()


def test_a_ramp_of_yarn_may_begin_between_two_dimensions() -> None:
    truncated = RopeConfig(kind="yarn", factor=8.0, original_tokens=2048)
    exact = RopeConfig(kind="yarn", factor=8.0, original_tokens=2048, is_ramp_truncated=False)
    low, high = (
        WIDTH * math.log(2048 / (turns * 2 * math.pi)) / (2 * math.log(10_000)) for turns in (32, 1)
    )
    pair = math.ceil(low)
    assert low < pair < high
    share = 1 - (pair - low) / (high - low)
    expected = PLAIN[pair] * (share + (1 - share) / 8)
    assert inverse_frequencies(exact, WIDTH)[pair] == pytest.approx(expected)
    assert inverse_frequencies(truncated, WIDTH)[pair] != pytest.approx(expected)


def test_yarn_enlarges_with_the_factor_unless_it_is_told() -> None:
    yarn = RopeConfig(kind="yarn", factor=4.0, original_tokens=64)
    assert attention_factor(yarn) == pytest.approx(0.1 * math.log(4) + 1)
    told = RopeConfig(kind="yarn", factor=4.0, attention_factor=1.25)
    assert attention_factor(told) == 1.25
    scaled = RopeConfig(kind="yarn", factor=4.0, mscale=1.0, mscale_all_dimensions=1.0)
    assert attention_factor(scaled) == 1.0
    assert attention_factor(RopeConfig(kind="linear", factor=4.0)) == 1.0
    cosine, sine = rope_rows(yarn, WIDTH, np.arange(50))
    assert np.square(cosine) + np.square(sine) == pytest.approx(attention_factor(yarn) ** 2)


def test_dynamic_positions_do_not_depend_on_the_length_of_the_text() -> None:
    unscaled = RopeConfig(kind="dynamic", factor=4.0, original_tokens=64, context_tokens=64)
    assert inverse_frequencies(unscaled, WIDTH) == pytest.approx(PLAIN)
    config = RopeConfig(kind="dynamic", factor=4.0, original_tokens=64, context_tokens=256)
    theta = 10_000.0 * (4.0 * 256 / 64 - 3.0) ** (WIDTH / (WIDTH - 2))
    expected = inverse_frequencies(RopeConfig(theta=theta), WIDTH)
    assert inverse_frequencies(config, WIDTH) == pytest.approx(expected)
    short, long = (
        rope_rows(config, WIDTH, np.arange(10))[0],
        rope_rows(config, WIDTH, np.arange(1000))[0],
    )
    assert np.array_equal(short, long[:10])


def test_tables_are_cosine_and_sine_of_position_times_frequency() -> None:
    cosine, sine = rope_rows(RopeConfig(), WIDTH, np.arange(5000))
    assert cosine.shape == sine.shape == (5000, WIDTH // 2)
    assert cosine.dtype == sine.dtype == np.float32
    assert cosine[50, 3] == pytest.approx(math.cos(50 * PLAIN[3]), abs=1e-6)
    assert sine[4999, 0] == pytest.approx(math.sin(4999), abs=1e-5)


def test_a_table_that_grows_keeps_its_bits() -> None:
    config = RopeConfig(kind="yarn", factor=4.0, original_tokens=64)
    table = PositionTable(config, WIDTH)
    whole = rope_rows(config, WIDTH, np.arange(5000))
    for positions in (np.array([3]), np.array([1023, 1024]), np.arange(700, 4999), np.array([3])):
        for found, expected in zip(table.rows(positions), whole, strict=True):
            assert np.array_equal(found[:, 0], expected[positions])
