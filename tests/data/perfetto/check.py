"""Checks trace events that `pinpool trace --format chrome` wrote: `python3 check.py FILE`.

Checks what the Trace Event Format demands of each event. Where the package `perfetto` and its trace processor can be had,
that reads the file too, and must count as many slices and counter values as the file has; else it prints `skipped: ...`.
"""

import json
import sys

NEEDED = {"X": {"ts", "dur", "tid"}, "C": {"ts", "args"}, "i": {"ts", "s", "tid"}, "M": {"args"}}


def main(path):
    with open(path, encoding="utf-8") as f:
        events = json.load(f)["traceEvents"]
    for event in events:
        assert {"ph", "pid", "name"} <= event.keys() and NEEDED[event["ph"]] <= event.keys(), event
        assert event["ph"] == "M" or (event["ts"] >= 0 and event.get("dur", 0) >= 0), event
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values()), event
    print("events", len(events))
    try:
        from perfetto.trace_processor import TraceProcessor

        processor = TraceProcessor(trace=path)
    except Exception as why:  # The package, or the program that it downloads, is not there.
        print("skipped: Perfetto's trace processor cannot be had:", type(why).__name__)
        return
    with processor:
        count = lambda table: next(iter(processor.query(f"select count(*) as n from {table}"))).n
        slices = sum(event["ph"] in "Xi" for event in events)
        values = sum(len(event["args"]) for event in events if event["ph"] == "C")
        assert (count("slice"), count("counter")) == (slices, values), (count("slice"), slices, count("counter"), values)
    print("Perfetto reads it")


main(sys.argv[1])
