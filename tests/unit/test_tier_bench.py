"""The parts of the tier bench that need no worker: what is asked, and how figures are shown."""

from __future__ import annotations

from figures import Figures
from tier_bench import (
    LINK_REQUESTS,
    TEXT_TOKENS,
    TURN_TOKENS,
    link_table,
    metric_table,
    once_prompts,
    transfer_table,
)
from tier_rig import Heard, mean_ms, quantile_ms, tokens_of


def test_all_configurations_of_a_round_are_asked_the_same_and_no_prompt_twice() -> None:
    texts, prompts = once_prompts(1, 6, 40)
    assert once_prompts(1, 6, 40) == (texts, prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 40
    assert once_prompts(2, 6, 40)[1] != prompts
    assert all(len(prompt) == TEXT_TOKENS + TURN_TOKENS for prompt in prompts)


def test_a_third_of_the_mixed_prompts_return_and_of_the_others_none() -> None:
    for hot_texts, returning in ((6, 14), (0, 0)):
        texts, prompts = once_prompts(1, hot_texts, 40)
        assert sum(prompt[:TEXT_TOKENS] in texts for prompt in prompts) == returning


def test_texts_share_no_page() -> None:
    assert tokens_of(1, 16) != tokens_of(2, 16)
    assert tokens_of(1, 512)[:16] == tokens_of(1, 16)


def test_times_to_the_first_token_are_summed_up() -> None:
    heard = [Heard(ttft_s=each / 1e3, prompt_tokens=1, cached_tokens=0) for each in range(1, 11)]
    assert mean_ms(heard) == 5.5
    assert (quantile_ms(heard, 0.5), quantile_ms(heard, 0.9)) == (6, 10)


def test_tables_show_medians_and_ratios() -> None:
    figures = Figures()
    for ms in (10, 30, 20):
        figures.add("64 tokens", "by transfer, ms", ms)
        figures.add("64 tokens", "by prefill, ms", 5 * ms)
    assert cells_of(transfer_table(figures)) == ["64 tokens", "20", "100", "x5.0"]
    loads = Figures()
    loads.add("off", "tokens hit", 0.256)
    loads.add("off", "requests/s", 12.34)
    cells = cells_of(metric_table(loads))
    assert cells[:2] == ["off", "12.3"]
    assert cells[5] == "26%"
    assert set(cells[6:]) == {"-"}
    rules = Figures()
    rules.add("--fetch never", f"fetched, of {LINK_REQUESTS}", 0)
    assert cells_of(link_table(rules)) == ["--fetch never", "0", "0", "0"]


def cells_of(shown: str) -> list[str]:
    """Return the cells of the first row of a table."""
    return [cell.strip() for cell in shown.splitlines()[2].split("|")[1:-1]]
