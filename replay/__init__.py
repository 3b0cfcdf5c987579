"""Traces: read, convert, replay live or in virtual time, sweep, report."""
