"""Seconds of single steps."""

from regions.markdown import Results, grouped, number, power, table
from regions.registry import region


@region
def derived_maps(results: Results) -> str:
    measured = results.one("derived_maps")
    found = measured.results
    return (
        f"Maps of divergence and vorticity with error bars at {power(found['places'])} points, "
        f"{found['F']} features: {number(found['seconds'], 1)} s. {measured.source}"
    )


@region
def robot_loop(results: Results) -> str:
    measured = results.one("robot_loop")
    found = measured.results
    own, bare = (
        f"{number(1000 * found[name]['median'])} ms"
        for name in ("update and prediction", "one Cholesky")
    )
    return (
        "A robot's loop, `update` with one observation, then mean and variance at the next place, "
        f"with {found['F']} features: {own} (median; one Cholesky factorisation alone: {bare}). "
        f"{measured.source}"
    )


@region
def exactgp_step(results: Results) -> str:
    measured = results.one("exactgp_step")
    rows = {row["contestant"]: row for row in measured.results["rows"]}
    own, exact = rows["orff"], rows["exact"]
    names = {
        "orff": "`ORFFKernel`",
        "low_rank": "`LowRankRootLinearOperator`",
        "bare": "bare work",
        "exact": f"exact kernel, N = {grouped(exact['points'])}",
    }
    lines = [
        [
            names[name],
            number(row["seconds"]),
            number(row["ratio"]),
            number(row["MiB"]),
            number(row["MiB"] / own["MiB"]),
        ]
        for name, row in rows.items()
    ]
    setting = (
        "One training step (evidence and gradient), curl-free RBF, "
        f"N = {grouped(own['points'])}, {measured.results['columns']} trigonometric columns, "
        "against the same features as gpytorch's `LowRankRootLinearOperator`, against the bare "
        "work no method avoids (one cosine and sine of every phase, φᵀφ, φ·G), and the exact "
        f"kernel on {grouped(exact['points'])} points."
    )
    head = ["", "seconds", "time / ORFF", "extra MiB", "MiB / ORFF"]
    return f"{setting}\n\n{table(head, lines)}\n\n{measured.source}"


@region
def kronecker_step(results: Results) -> str:
    measured = results.one("kronecker_step")
    found = measured.results
    one, _, written = found["rows"]
    return (
        f"A separable kernel with {written['outputs']} outputs, N = {grouped(found['points'])} and "
        f"{found['columns']} columns: {number(found['ratio of 20 outputs to one'])} times the step "
        f"of one output ({number(one['seconds'])} s), against {number(written['seconds'])} s "
        f"without the Kronecker algebra. {measured.source}"
    )
