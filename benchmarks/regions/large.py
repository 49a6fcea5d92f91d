"""From a thousand points to a hundred million, and the others."""

from collections.abc import Sequence

from regions.markdown import Measured, Results, decimal, number, percent, power, table
from regions.registry import region


def _rows(results: Results, method: str, inputs: int) -> list[Measured]:
    found = [part for part in results.parts("scale") if part.results["method"] == method]
    found = [part for part in found if part.results["inputs"] == inputs]
    return sorted(found, key=lambda part: part.results["points"])


def _scale(results: Results, inputs: int) -> str:
    columns = {
        "fit": ("fit", number),
        "memory": ("MiB", lambda value: number(value, 1)),
        "F": ("F", lambda value: "" if value is None else str(value)),
        "evaluation": ("evaluation", number),
        "÷ bare": ("evaluation / bare", number),
        "map": ("map", number),
        "error": ("error", number),
        "sd": ("sd", number),
        "inside": ("inside", lambda value: decimal(value, 2)),
    }
    parts = _rows(results, "ours", inputs)
    known = set().union(*(part.results for part in parts))
    columns = {name: column for name, column in columns.items() if column[0] in known}
    lines = []
    for part in parts:
        row = part.results
        streamed = ", streamed" if row["streamed"] else ""
        cells = [write(row.get(key)) for key, write in columns.values()]
        lines.append([power(row["points"]) + streamed, *cells, part.commit])
    return (
        f"{table(['N', *columns, 'commit'], lines)}\n\n{_limits(results, inputs)}{_sources(parts)}"
    )


def _limits(results: Results, inputs: int) -> str:
    """The least error that a model of the true prior can have on average."""
    limits = [
        f"{number(part.results['sd'])} at {power(part.results['points'])}"
        for part in _rows(results, "limit", inputs)
    ]
    words = f"Under the exact kernel the sd is {', '.join(limits)}: none of this prior is smaller."
    return f"{words}\n\n" if limits else ""


def _sources(parts: Sequence[Measured]) -> str:
    """Where rows come from, each of which names its commit."""
    places = dict.fromkeys(part.place for part in parts)
    notes = dict.fromkeys(f"{part.commit}: {part.note}" for part in parts if part.note)
    return f"*`python benchmarks/scale.py`, {'; '.join([*places, *notes])}*"


@region
def scale_2d(results: Results) -> str:
    return _scale(results, 2)


@region
def scale_3d(results: Results) -> str:
    return _scale(results, 3)


@region
def streaming(results: Results) -> str:
    rows = [part.results for part in _rows(results, "ours", 2)]
    streamed = [row for row in rows if row["streamed"]]
    words = " and ".join(
        f"{number(row['making'])} of the {number(row['fit'])} seconds at {power(row['points'])}"
        for row in streamed
        if "making" in row
    )
    return (
        f"From {power(streamed[0]['points'])} points on the data are made anew, chunk by chunk, in "
        f"every pass and never in memory, which takes {words}."
    )


@region
def others(results: Results) -> str:
    exact, dense, (sparse,) = (_rows(results, name, 2) for name in ("exact", "dense", "svgp"))
    svgp = sparse.results
    (own,) = (
        part.results
        for part in _rows(results, "ours", 2)
        if part.results["points"] == svgp["points"]
    )
    fits = " and ".join(
        f"{number(row.results['fit'])} s for {power(row.results['points'])} points "
        f"(error {number(row.results['error'])})"
        for row in exact
    )
    evaluations = ", ".join(
        f"{number(row.results['evaluation'])} s for {power(row.results['points'])}" for row in dense
    )
    gib = dense[-1].results["MiB"] / 1024
    return (
        f"`ExactGP` with the exact kernel and L-BFGS takes {fits}; one evaluation of evidence and "
        f"gradient with dense matrices in plain torch {evaluations} points, the last in "
        f"{number(gib, 1)} GiB. gpytorch's SVGP with the same kernel, 500 inducing variables and "
        f"natural gradients takes {number(svgp['fit'])} s ({svgp['steps']} steps) at "
        f"{power(svgp['points'])} points until its ELBO gains less than 0.002 nats per number in "
        f"200 steps, and stands at an error of {number(svgp['error'])}, with "
        f"{percent(svgp['inside'])} of the truth inside its 95 % intervals "
        f"({number(own['error'])} and {percent(own['inside'])} above, in {number(own['fit'])} "
        f"s). {_commits([*exact, *dense, sparse])}"
    )


def _commits(parts: Sequence[Measured]) -> str:
    commits = dict.fromkeys(part.commit for part in parts)
    notes = dict.fromkeys(part.note for part in parts if part.note)
    places = dict.fromkeys(part.place for part in parts)
    words = [f"commit {', '.join(commits)}", *notes, *places]
    return f"*`python benchmarks/scale.py`, {', '.join(words)}*"
