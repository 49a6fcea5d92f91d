"""Fields and their error bars: accuracy on known and on public data."""

from collections.abc import Mapping

from regions.markdown import decimal, grouped, number, power, table
from regions.registry import sentence, tabulated


@tabulated
def demo(found: Mapping) -> str:
    head = ["", "vectors", "RMSE", "RMSE, valid", "NLPD", "95 %"]
    names = ("rmse_px", "rmse_valid_px", "nlpd", "inside_95")
    rows = [
        [row["part"], str(row["vectors"]), *(decimal(row[name], 3) for name in names)]
        for row in found["rows"]
    ]
    gains = [
        f"{row['vectors']} vectors ({row['draws']} draws): {decimal(row['divergence_free'], 3)} "
        f"and {decimal(row['independent'], 3)}"
        for row in found["few"]
    ]
    setting = (
        f"`make demo`, {number(found['seconds'])} s: every square of 128 pixels predicted from "
        f"all other vectors, {found['rows'][0]['model']} kernel, Student-t noise in two groups; "
        "RMSE in pixels, also at the vectors that pass the median test; NLPD per component; "
        "share inside 95 % intervals."
    )
    gain = f"RMSE of divergence-free and of independent outputs, {'; '.join(gains)}."
    return f"{setting}\n\n{table(head, rows)}\n\n{gain}"


@sentence
def survey(found: Mapping) -> str:
    return (
        f"A total-field survey of {grouped(found['readings'])} readings (Rio de Janeiro), every "
        f"fifth line held out: {'; '.join(map(_of_survey, found['rows']))}."
    )


def _of_survey(row: Mapping) -> str:
    error = f"RMSE {decimal(row['RMSE'], 1)} nT"
    readings = f"{grouped(row['readings'])} readings of the other lines"
    seconds = f"({number(row['seconds'])} s)"
    if row["model"] != "harmonic kernel":
        return f"equivalent sources of harmonica, tuned by lines: {error} {seconds}"
    noise = row["noise"]
    if (nu := row.get("deg_free")) is not None:
        noise = f"{noise} noise of {decimal(nu, 1)} degrees of freedom"
    else:
        noise = f"{noise} noise"
    return (
        f"exact harmonic kernel, {readings}, {noise}: {error}, NLPD "
        f"{decimal(row['NLPD'], 2)}, {decimal(row['inside'], 3)} inside 95 % intervals {seconds}"
    )


@sentence
def calibration(found: Mapping) -> str:
    return (
        f"{found['fields']} fields drawn from Helmholtz priors, hyperparameters learned from "
        f"{power(found['points'])} vectors each: 95 % intervals hold {_interval(found['inside'])} "
        "of the latent field."
    )


def _interval(share: dict) -> str:
    return f"{decimal(share['mean'], 3)} ± {decimal(share['standard_error'], 3)}"


@sentence
def anything(found: Mapping) -> str:
    every, sizes = found["all"], [int(row["data"].split()[0]) for row in found["sets"]]
    return (
        f"{every['fits']} default fits of every kernel to each of {len(found['sets'])} generated "
        "data sets (tracks, clusters, repeated stations, lines, flat axes; "
        f"{min(sizes)} to {grouped(max(sizes))} vectors): "
        f"95 % intervals hold {decimal(every['inside'], 3)} of the readings held out, and at least "
        f"{decimal(every['least, not warned'], 2)} in every fit without a warning; "
        f"{every['warned']} fits warn. The median fit takes {number(every['median CPU s'])} s of "
        f"a core; {every['slow']} took more than 60 s, and {every['errors']} were given up. "
        f"Measured at the commits {' and '.join(found['commits'])}."
    )


@sentence
def exact_fit(found: Mapping) -> str:
    parts = [
        f"{grouped(row['numbers'])} numbers: {number(row['ours seconds'])} s, "
        f"{number(row['time'])} of their time, and {number(row['behind'])} nats a number behind"
        for row in found["rows"]
    ]
    return (
        f"A fit by the exact kernel against the best of {found['starts']} starts, searched to the "
        f"end: {'; '.join(parts)}."
    )


@sentence
def derived_fields(found: Mapping) -> str:
    shares = found["calibration"]
    divergence, vorticity = (
        _interval(shares[name]["inside"]) for name in ("divergence", "vorticity")
    )
    rows = [
        f"on `{row['simulation']}` ({row['points']} vectors) the error of the {row['symbol']} is "
        f"{number(row['error'])}, its posterior sd {number(row['sd'])}, its size "
        f"{number(row['size'])}"
        for row in found["simulations"]
        if row["size"] > 0.01  # the other one is zero
    ]
    return (
        f"95 % intervals of divergence and vorticity hold {divergence} and {vorticity} of the "
        f"truth over {shares['fields']} simulated fields of {shares['points']} vectors; "
        f"{'; '.join(rows)}."
    )


@sentence
def small_fields(found: Mapping) -> str:
    ours, exact = (number(found["relative error"][name]["50 %"], 3) for name in ("ours", "exact"))
    public = " and ".join(
        f"{number(row['ours'], 3)} on the public `{row['simulation']}` simulation "
        f"(published: {number(row['published'], 3)})"
        for row in found["simulations"]
    )
    return (
        f"{found['fields']} fields of a vortex and a source, from 10 to 30 vectors: median "
        f"relative error {ours}, against {exact} of an exact gpytorch model with the best of "
        f"{found['starts']} starts; vector RMSE {public}."
    )


@tabulated
def magnetometer(found: Mapping) -> str:
    names = {
        "VectorFieldGP": "`VectorFieldGP`, default settings",
        "ExactGP": f"`ExactGP`, `MonteCarlo({found['frequencies']})`",
    }
    head = ["model", "kernel", "vectors", "RMSE", "NLPD", "seconds", "−log evidence"]
    lines = [
        [
            names[row["model"]],
            row["kernel"],
            grouped(row["points"]),
            decimal(row["RMSE"], 2),
            decimal(row["NLPD"], 2),
            number(row["seconds"]),
            grouped(row["NLML"]) if row.get("NLML") else "",
        ]
        for row in found["rows"]
    ]
    return table(head, lines)


@tabulated
def learned_spectrum(found: Mapping) -> str:
    others = ["RBF", "Matérn 3/2", "Matérn 5/2", "RQ"]
    head = ["set", "readings", "learned", *others, "nats ahead", "inside", "evaluations"]
    rows = []
    for row in found["sets"]:
        own = row["learned"]
        densities = [row[name]["nlpd"] for name in ("learned", *others)]
        inside = own.get("inside, field", own["inside"])
        cells = [decimal(value, 3) for value in densities]
        nats = decimal(-row["behind, nats"], 1)
        counts = [decimal(inside, 3), decimal(own["evaluations"], 0)]
        rows.append([row["set"], str(row["points"]), *cells, nats, *counts])
    setting = (
        "`HelmholtzKernel` with a learned spectrum and with other base kernels: NLPD of the "
        "readings held out; nats of evidence, with the learned curves integrated out, ahead of the "
        "best of the others; the share of the true field (of held-out readings, where it is not "
        "known) inside 95 % intervals, and the evaluations of its fit."
    )
    return f"{setting}\n\n{table(head, rows)}"


@tabulated
def few_readings(found: Mapping) -> str:
    head = ["readings", "inside, as fitted", "inside, `marginalize=True`", "time over fit"]
    rows = []
    for row in found["rows"]:
        shares = [
            _interval({"mean": row[name], "standard_error": row[f"error, {name}"]})
            for name in ("fitted", "integrated")
        ]
        rows.append([row["layout"], *shares, decimal(row["time over fit"], 2)])
    setting = (
        f"{found['fields']} fields drawn from a divergence-free prior, all hyperparameters learned "
        "from few readings: shares of the true field inside 95 % intervals of `posterior()` and of "
        "`posterior(marginalize=True)`."
    )
    return f"{setting}\n\n{table(head, rows)}"


@tabulated
def uneven(found: Mapping) -> str:
    parts = ["everywhere", "at the readings", "box averages", "potential"]
    rows = [
        [row["layout"], row["kernel"], str(row["fields"]), *(_interval(row[p]) for p in parts)]
        for row in found["rows"]
    ]
    setting = (
        f"{grouped(found['points'])} readings on 25 tracks, in 60 clusters or evenly, curl-free "
        "kernels with true hyperparameters and no word of tracks: shares inside 95 % intervals of "
        "the true field everywhere and at the readings, of averages over boxes, and of differences "
        "of the potential, over some fields."
    )
    return f"{setting}\n\n{table(['layout', 'kernel', 'fields', *parts], rows)}"


@sentence
def drifters(found: Mapping) -> str:
    return (
        f"{found['drifters']} public ocean drifters, a fifth held out, {found['seeds']} seeds: a "
        "Helmholtz kernel on a grid against the exact kernel, RMSE within "
        f"{number(100 * found['largest |RMSE ratio - 1|'], 1)} %, NLPD within "
        f"{number(found['largest |NLPD difference|'], 1)}."
    )
