"""Writes a rehearsal as a trace that Perfetto and chrome://tracing open.

The trace has a process for each rank, a thread for each of its streams, and one for its messages.
Source: Google, "Trace Event Format" (complete events, "X"; metadata, "M").
"""

from collections.abc import Iterator, Sequence

from .script import RankRecord

SENDING = 1000  # the number of the thread of messages


def trace(records: Sequence[RankRecord]) -> dict:
    """Return the trace for JSON, with times in microseconds."""
    events = [event for rank, record in enumerate(records) for event in events_of(rank, record)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def events_of(rank: int, record: RankRecord) -> Iterator[dict]:
    """Yield the events of one rank."""
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    names = {stream: f"stream {stream}" for stream in record.busy} | {SENDING: "messages"}
    for thread, name in names.items():
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}}
    for stream, busy in record.busy.items():
        for start, end in busy:
            yield complete(rank, stream, "computing", start, end)
    for call in record.calls:
        if call.span is not None:
            event = complete(rank, SENDING, call.name, *call.span)
            line = f"{call.line.file}:{call.line.number} {call.line.text}"
            event["args"] = {"bytes": call.nbytes, "ranks": list(call.ranks), "line": line}
            yield event
    for number, moment in enumerate(record.steps, 1):
        yield {"ph": "i", "pid": rank, "tid": 0, "name": f"step {number}", "ts": moment / 1e6}


def complete(rank: int, thread: int, name: str, start: int, end: int) -> dict:
    """Return an event with a beginning and an end."""
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "name": name,
        "ts": start / 1e6,
        "dur": (end - start) / 1e6,
    }
