"""``warmroute health``: whether an address answers well; for images that have no curl."""

from __future__ import annotations

import argparse
import http.client
import sys
from typing import Final
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

DEFAULT_URL: Final = "http://127.0.0.1:8080/readyz"
EXAMPLES: Final = """\
examples:
  warmroute health                                      # may the router be sent requests?
  warmroute health --url http://127.0.0.1:8081/livez    # does it run?
  warmroute health --url http://127.0.0.1:9101/metrics  # a sidecar, with --metrics 127.0.0.1:9101

Exit code 0: it answered 200. 1: it did not, and why is on stderr. No proxy is asked.
"""


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme != "http" or not parts.hostname:
        message = f"expected http://host:port/path, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return text


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 600:  # noqa: PLR2004 - ten minutes
        message = f"expected seconds, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return seconds


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--url", type=_url, default=DEFAULT_URL, help=f"what to ask (default: {DEFAULT_URL})"
    )
    parser.add_argument(
        "--timeout-s",
        type=_seconds,
        default=2.0,
        metavar="S",
        help="seconds that the answer may take (default: 2.0)",
    )


def run(options: argparse.Namespace) -> int:
    """Ask once."""
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(options.url, timeout=options.timeout_s):
            return 0
    except HTTPError as error:
        with error:
            print(f"{options.url} answered {error.code}", file=sys.stderr)
    except (OSError, http.client.HTTPException) as error:
        print(f"{options.url}: {getattr(error, 'reason', error)}", file=sys.stderr)
    return 1
