"""The numbers of the commit before the package got its rooms, and its files."""

import pytest

import gp_orff
from tests.frozen import values

TOLERANCE = 1e-10  # of the largest number of its kind: rounding, in another order
KEPT = values.kept()
BUILT = dict(values.items())
LOADED = {f"loaded {name}": name for name in values.SAVED}


def assert_same(numbers, name):
    for key, own in KEPT[name].items():
        error = (numbers[key] - own).abs().max() if own.numel() else 0.0
        assert error <= TOLERANCE * (own.abs().max() if own.numel() else 1.0), (name, key, error)


def subject(name):
    """The kernel and the rule."""
    return " ".join(name.split()[: 3 if name.startswith("gpytorch") else 2])


@pytest.mark.filterwarnings("ignore")  # of few features, of data as they are
@pytest.mark.parametrize("which", sorted({subject(name) for name in KEPT if name in BUILT}))
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
