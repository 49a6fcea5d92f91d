"""Summaries of the results of many fits."""

from collections.abc import Iterable, Mapping

Record = Mapping[str, object]
SLOW, FEW_INSIDE = 60.0, 0.85  # seconds of processors; share inside 95 % intervals


def summary(records: Iterable[Record]) -> dict[str, object]:
    """Return how many fits ended in which way, and the coverage of all held-out observations."""
    records = list(records)
    done = [own for own in records if own["error"] is None]
    readings = sum(own["readings"] for own in done)
    seconds = sorted(own["CPU s"] for own in records)
    return {
        "fits": len(records),
        "errors": len(records) - len(done),
        "slow": sum(own["CPU s"] > SLOW for own in records),
        "median CPU s": seconds[len(seconds) // 2],
        "most CPU s": seconds[-1],
        "warned": sum(bool(own["warnings"]) for own in records),
        "inside": sum(own["inside"] * own["readings"] for own in done) / max(readings, 1),
        "field": sum(own["inside, field"] * own["readings"] for own in done) / max(readings, 1),
        "least, not warned": min(
            (own["inside"] for own in done if not own["warnings"]), default=None
        ),
    }


def failures(records: Iterable[Record]) -> list[dict[str, object]]:
    """Return fits that raised an error, took too long, or had intervals that are too narrow without
    a warning."""
    found = []
    for own in records:
        if own["error"] is not None:
            why = own["error"]
        elif own["CPU s"] > SLOW:
            why = f"{own['CPU s']:.0f} CPU s, {own['method']}, F {own['F']}"
        elif own["inside"] < FEW_INSIDE and not own["warnings"]:
            why = f"{own['inside']:.3f} of {own['readings']} readings inside, without a warning"
        else:
            continue
        found.append({"set": own["set"], "kernel": own["kernel"], "data": own["data"], "why": why})
    return found
