"""Decoding steps that are recorded once for each shape and replayed: CUDA graphs.

Launching some hundred kernels takes a processor longer than a GPU needs for a small decoding step;
a recorded one is launched at once. It reads its inputs from, and leaves its logits in, tensors of
its own. Only ``CudaRecorder`` needs CUDA: with another recorder all of this runs on a processor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from sidecar.compute.torch_package import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.compute.torch_forward import DeviceStep

Tensor = Any

GRAPH_MAX_COUNT: Final = 64
"""Shapes beyond that are computed without recording: each holds memory."""
WARM_RUNS: Final = 2


class Recorder(Protocol):
    """Records what a function does, so that it can be done again on the same tensors."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Return what replays ``work``, and the tensor that each replay leaves its result in."""


class CudaRecorder:
    """Implements ``Recorder`` with CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See ``Recorder``."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up outside of the recording
            for _ in range(WARM_RUNS):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        self._pool = self._pool or graph.pool()
        return graph.replay, result


class DecodeGraphs:
    """Recorded steps by shape."""

    def __init__(self, forward: Callable[[DeviceStep], Tensor], recorder: Recorder) -> None:
        self._forward = forward
        self._recorder = recorder
        self._held: dict[tuple[Any, ...], tuple[DeviceStep, Callable[[], None], Tensor]] = {}

    def run(self, step: DeviceStep) -> Tensor:
        """Return the logits of ``step``; they stay until the next step of any shape."""
        key = tuple(tensor.shape for tensor in step.tensors())
        if key not in self._held and len(self._held) < GRAPH_MAX_COUNT:
            replay, logits = self._recorder.record(lambda: self._forward(step))
            self._held[key] = (step, replay, logits)
        if key not in self._held:
            return self._forward(step)
        inputs, replay, logits = self._held[key]
        if inputs is not step:
            for target, source in zip(inputs.tensors(), step.tensors(), strict=True):
                target.copy_(source, non_blocking=True)
        replay()
        return logits
