"""``warmroute audit``: flags that are wrong are named, and nothing is sent."""

from __future__ import annotations

import pytest

from warmroute.cli import EXIT_USAGE, main

NAMED = ("--model", "m", "--key-env", "FIRST")
HERE = ("--target", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--target", "http://10.0.0.1:8080"), "--allow-remote audits it"),
        (("--target", "http://router.example:8080"), "--allow-remote audits it"),
        (("--target", "ftp://127.0.0.1"), "--target: expected http://host:port"),
        ((*HERE, "--samples", "3"), "--samples: expected"),
        ((*HERE, "--repeats", "0"), "--repeats: expected"),
        ((*HERE, "--words", "many"), "--words: expected"),
        ((*HERE, "--significance", "0.7"), "--significance: expected"),
        (HERE, "--key-env: expected 2 of them, got 1"),
        ((*HERE, "--key-env", "FIRST", "--key-env", "FIRST"), "expected 2 of them, got 3"),
        ((*HERE, "--key-env", "NONE"), "expected an API key in the environment variable 'NONE'"),
        ((*HERE, "--key-env", "ODD"), "expected an API key in the environment variable 'ODD'"),
        ((*HERE, "--key-env", "FIRST"), "no answer (ClientConnector"),
    ],
)
def test_wrong_flags_are_named(
    flags: tuple[str, ...],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FIRST", "sk-first")
    monkeypatch.setenv("ODD", "sk-\n")
    monkeypatch.delenv("NONE", raising=False)
    assert main(["audit", *flags, *NAMED]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert expected in told
    assert "sk-" not in told
