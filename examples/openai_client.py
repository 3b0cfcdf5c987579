"""Stream a chat through a router with the openai SDK and show the router's receipt.

Needs `pip install openai` and a router started with --receipts:

    python examples/openai_client.py http://127.0.0.1:8080/v1 my-model "Why is the sky blue?"
"""

from __future__ import annotations

import sys

from openai import OpenAI

ARGUMENTS = 4


def main() -> int:
    """Ask the question given on the command line."""
    if len(sys.argv) != ARGUMENTS:
        print(__doc__, file=sys.stderr)
        return 2
    _, base_url, model, question = sys.argv
    client = OpenAI(base_url=base_url, api_key="not-used", max_retries=0)
    answer = client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in answer.parse():
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            cached = details.cached_tokens if details is not None else None
            print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {cached} of them cached")
    for name, value in answer.headers.items():
        if name.startswith("x-warmroute-"):
            print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
