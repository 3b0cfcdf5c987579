"""When `make bench-check` fails, and what it tells."""

import json
import random
from pathlib import Path

import pytest

import check
from regression import CEILING, FLOOR, Change, Ratio, change_of, compared
from state.compiled import library_path

CALM = [4.0, 4.02, 3.98, 4.01, 4.0]


def change(before: list[float], now: list[float]) -> Change:
    [found] = compared({"a": Ratio.of(before)}, {"a": Ratio.of(now)})
    return found.change


def scaled(values: list[float], factor: float) -> list[float]:
    return [value * factor for value in values]


def noisy(seed: int, spread: float) -> list[float]:
    rng = random.Random(seed)
    return [4 * rng.gauss(1, spread) for _ in range(7)]


def test_a_ratio_that_got_a_sixth_worse_regressed() -> None:
    assert change(CALM, scaled(CALM, 1.16)) is Change.REGRESSED


def test_less_than_a_tenth_is_no_regression_however_calm_the_rounds_are() -> None:
    assert change([4.0, 4.0, 4.0], scaled(CALM, 1.0 + FLOOR - 0.01)) is Change.SAME


def test_instructions_are_counted_so_that_less_is_a_regression() -> None:
    before = {"instructions per chunk": Ratio(4.0, 0.0), "CPU per chunk": Ratio(4.0, 0.0)}
    for factor, change in ((1.04, Change.SAME), (1.06, Change.REGRESSED)):
        now = {name: Ratio(factor * ratio.median, 0.0) for name, ratio in before.items()}
        assert [one.change for one in compared(before, now)] == [change, Change.SAME]


def test_noise_of_the_same_code_is_no_regression() -> None:
    """Seven rounds that differ by 8 % in the standard deviation, a thousand times."""
    found = [change(noisy(seed, 0.08), noisy(seed + 1_000, 0.08)) for seed in range(1_000)]
    assert found.count(Change.REGRESSED) + found.count(Change.IMPROVED) <= 5


def test_a_true_regression_is_seen_through_that_noise() -> None:
    found = [
        change(noisy(seed, 0.08), scaled(noisy(seed + 1_000, 0.08), 1.8)) for seed in range(200)
    ]
    assert found.count(Change.REGRESSED) >= 190


@pytest.mark.parametrize("which", [0, 1])
def test_the_noisier_one_of_both_sides_counts(which: int) -> None:
    rounds = [CALM, CALM]
    rounds[which] = [3.6, 3.8, 4.0, 4.2, 4.4]
    assert change(rounds[0], scaled(rounds[1], 1.2)) is Change.SAME


def test_a_ratio_that_got_better_is_told_by_the_same_measure() -> None:
    assert change(scaled(CALM, 1.16), CALM) is Change.IMPROVED
    assert change(scaled(CALM, 1.09), CALM) is Change.SAME


def test_rounds_that_differ_too_much_tell_nothing_but_what_is_beyond_them() -> None:
    wild = [2.0, 3.0, 4.0, 5.0, 6.0]
    assert change(CALM, scaled(wild, 1.2)) is Change.NOISY
    assert change(CALM, scaled(wild, 3)) is Change.REGRESSED
    assert change_of(CEILING, CEILING) is Change.SAME


def test_a_missing_and_a_new_ratio_are_told() -> None:
    found = compared(
        {"gone": Ratio.of(CALM), "b": Ratio.of(CALM)}, {"b": Ratio.of(CALM), "c": Ratio.of(CALM)}
    )
    assert [(one.name, one.change) for one in found] == [
        ("gone", Change.MISSING),
        ("b", Change.SAME),
        ("c", Change.NEW),
    ]
    assert check.told(found)[:2] == ["not measured: gone", "not in the reference: c"]
    assert check.status_of(found) == 0


def test_a_single_round_has_no_spread() -> None:
    assert Ratio.of([2.0]) == Ratio(2.0, 0.0)
    one = Ratio.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert one.median == 3
    assert one.spread == pytest.approx(2 / 3)


def test_the_status_is_1_for_a_regression_and_2_where_nothing_could_be_compared() -> None:
    calm, worse = Ratio.of(CALM), Ratio.of(scaled(CALM, 2))
    assert check.status_of(compared({"a": calm, "b": calm}, {"a": calm, "b": worse})) == 1
    assert check.status_of(compared({"a": calm, "b": calm}, {"a": calm})) == 0
    assert check.status_of(compared({"a": calm}, {})) == 2
    assert check.status_of(compared({}, {"a": calm})) == 2


def test_a_line_on_a_regression_says_from_what_to_what() -> None:
    lines = check.told(compared({"CPU": Ratio.of([4.0])}, {"CPU": Ratio.of([5.0])}))
    assert lines == ["regressed: CPU: 5, was 4 (+25%, noise 10%)", "1 regressed"]


def test_a_reference_is_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    assert check.read_reference(path) == {}
    ratios = {"b": Ratio(2.5, 0.125), "a": Ratio(1.25, 0.0)}
    check.write_reference(path, ratios)
    assert check.read_reference(path) == ratios
    assert list(json.loads(path.read_text())) == ["a", "b"]


def test_a_helper_that_is_not_built_is_told(tmp_path: Path) -> None:
    source = tmp_path / "helper.c"
    source.write_text("int one;")
    assert check.unbuilt([source]) == [
        "helper.c: not built, the reference is with it (make native)"
    ]
    library_path(source).write_bytes(b"")
    assert check.unbuilt([source]) == []


def router_report(folder: Path, factor: float) -> None:
    """Write what ``router_bench.py`` would: a relay, and a router at four times its CPU."""
    relay_us = [50.0, 51.0, 49.0]
    cells = {
        "warmroute's bare relay": relay_us,
        "warmroute, exact": [4 * factor * us for us in relay_us],
    }
    folder.mkdir(exist_ok=True)
    (folder / "router-check.json").write_text(json.dumps({"cpu": {"32 KiB": cells}}))


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bench"
    monkeypatch.setattr("plan.BUILT", folder)
    return folder


def test_check_compares_the_last_run_with_the_reference_that_update_wrote(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--last", "--reference", str(tmp_path / "reference.json")]
    router_report(built, 1.0)
    assert check.main([*words, "--update"]) == 0
    assert check.main(words) == 0
    router_report(built, 1.3)
    capsys.readouterr()
    assert check.main(words) == 1
    assert (
        "regressed: CPU per request, 32 KiB, exact / relay: 5.2, was 4" in capsys.readouterr().out
    )
    router_report(built, 0.7)
    assert check.main(words) == 0
    assert "improved: CPU per request, 32 KiB, exact / relay: 2.8" in capsys.readouterr().out


def test_an_update_keeps_ratios_that_were_not_measured(built: Path, tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    check.write_reference(path, {"other": Ratio(1.5, 0.0)})
    router_report(built, 1.0)
    assert check.main(["--last", "--update", "--reference", str(path)]) == 0
    assert set(check.read_reference(path)) == {"other", "CPU per request, 32 KiB, exact / relay"}
