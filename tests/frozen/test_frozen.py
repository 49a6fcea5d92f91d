"""Numbers from the commit before the package was divided into subpackages, and its files."""

import pytest

import gp_orff
from tests.frozen import values

TOLERANCE = 1e-10  # of the largest number of its kind: rounding, in another order
SINGLE = 1e-5  # where raw parameters are set in single precision: processors round them differently
KEPT = values.kept()
BUILT = dict(values.items())
OFTEN = (*values.NOISY_CASES, "symbols")
LOADED = {f"loaded {name}": name for name in values.SAVED}


def assert_same(numbers, name):
    tolerance = SINGLE if "spectral_mixture" in name else TOLERANCE
    assert values.error(numbers, KEPT[name]) <= tolerance, name


def subject(name):
    """The kernel and the rule."""
    return " ".join(name.split()[: 3 if name.startswith("gpytorch") else 2])


def often(name):
    """What is looked at in every run; `python -m tests.frozen.values` looks at all of it."""
    words = name.removeprefix("gpytorch ").split()
    return name in BUILT and (words[0] in OFTEN or words[1] in values.FEW_RULES)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of few features, of data as they are
@pytest.mark.parametrize("which", sorted({subject(name) for name in KEPT if often(name)}))
def test_numbers_are_what_they_were(which):
    with gp_orff.settings.check_features(False):
        for name in KEPT:
            if name in BUILT and subject(name) == which:
                assert_same(BUILT[name](), name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOADED)
def test_files_load_and_predict_the_same(name):
    with gp_orff.settings.check_features(False):
        assert_same(values.loaded(LOADED[name]), name)


def test_every_entry_is_looked_at():
    assert set(KEPT) == {name for name in BUILT if name in KEPT} | set(LOADED)
