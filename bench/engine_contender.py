"""Who generates in the engine bench, each in a process of its own.

No thread pool of one waits on the cores of another.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

from engine_drive import Manner, generate
from engine_model import SHAPES, WEIGHTS_SEED, transformers_model
from sidecar.compute.numpy_runner import NumpyRunner
from sidecar.compute.weights import random_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

PAGE_TOKENS = 16
MAX_TOKENS = 2048
ATTENTIONS = ("eager", "sdpa")
TORCH, NUMPY = "torch runner", "NumPy runner"
NAMES = (*ATTENTIONS, TORCH, NUMPY)
STOP_S = 30.0

Prompts = list[list[int]]
Tokens = list[list[int]]


class Contender:
    """One of ``NAMES`` with the weights of a shape and room for ``sequences`` texts at once."""

    def __init__(self, name: str, shape: str, room: tuple[int, int], threads: int) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, shape, room, threads))
        self._process.start()
        theirs.close()
        self._connection.recv()  # it is ready

    def timed(self, prompts: Prompts, outputs: int) -> tuple[float, Tokens]:
        """Return the seconds that the answer to all ``prompts`` at once took, and the answer."""
        self._connection.send((prompts, outputs))
        answer: tuple[float, Tokens] = self._connection.recv()
        return answer

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(STOP_S)
        self._process.kill()


def _serve(
    connection: Connection, name: str, shape: str, room: tuple[int, int], threads: int
) -> None:
    answer = _answerer(name, shape, room, threads)
    connection.send("ready")
    while True:
        try:
            prompts, outputs = connection.recv()
        except EOFError:
            return
        began_s = time.perf_counter()
        tokens = answer(prompts, outputs)
        connection.send((time.perf_counter() - began_s, tokens))


def _answerer(
    name: str, shape: str, room: tuple[int, int], threads: int
) -> Callable[[Prompts, int], Tokens]:
    sequences, sequence_tokens = room
    config = SHAPES[shape].config(sequence_tokens)
    if name in ATTENTIONS:
        return _transformers_answerer(transformers_model(config, name), threads)
    settings: dict[str, Any] = {
        "pages": sequences * -(-sequence_tokens // PAGE_TOKENS),
        "page_tokens": PAGE_TOKENS,
        "max_tokens": MAX_TOKENS,
        "threads": threads,
    }
    weights = random_weights(config, WEIGHTS_SEED)
    manner = Manner(page_tokens=PAGE_TOKENS, step_tokens=MAX_TOKENS)
    runner: Any
    if name == NUMPY:
        runner = NumpyRunner(config, weights, **settings)
    else:
        from sidecar.compute.torch_runner import TorchRunner  # noqa: PLC0415 - not without torch

        runner = TorchRunner(config, weights, device="cpu", **settings)

    def answer(prompts: Prompts, outputs: int) -> Tokens:
        return asyncio.run(generate(runner, prompts, outputs, manner))

    return answer


def _transformers_answerer(model: Any, threads: int) -> Callable[[Prompts, int], Tokens]:
    import torch  # type: ignore[import-not-found] # noqa: PLC0415 - only in that environment
    import transformers  # type: ignore[import-not-found] # noqa: PLC0415 - the same

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)

    def answer(prompts: Prompts, outputs: int) -> Tokens:
        ids = torch.tensor(prompts)
        settings = {"do_sample": False, "use_cache": True, "max_new_tokens": outputs}
        with torch.inference_mode():
            mask = torch.ones_like(ids)
            made = model.generate(ids, attention_mask=mask, min_new_tokens=outputs, **settings)
        tokens: Tokens = made[:, ids.shape[1] :].tolist()
        return tokens

    return answer
