"""Trace files: five formats, read a line at a time."""

from replay.format.detect import Format
from replay.format.file import TraceFile, open_trace
from replay.format.kind import IdsKind
from replay.format.reading import ReadOptions
from replay.format.recording import write_trace

__all__ = ["Format", "IdsKind", "ReadOptions", "TraceFile", "open_trace", "write_trace"]
