"""The number of threads of a fit and of other calls, with artificial measurements."""

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

import gp_orff
from gp_orff import threads
from gp_orff.settings import num_threads
from gp_orff.threads import Measurement, chosen_threads, fixed_threads


class Machine:
    """What each number of threads takes, a clock, and how often was measured."""

    def __init__(self):
        self.seconds = {1: 2.0, 2: 1.5, 4: 1.0}
        self.now = 0.0
        self.measured = []

    def measure(self, number, budget):
        torch.set_num_threads(number)
        self.measured.append(number)
        self.now += self.seconds[number]
        return self.seconds[number]

    def perf_counter(self):
        return self.now


@pytest.fixture
def machine(monkeypatch):
    """Of four threads outside every call."""
    found = Machine()
    monkeypatch.setattr(threads, "mean_seconds", found.measure)
    monkeypatch.setattr(threads, "last", Measurement(1, 1, 0.0))
    monkeypatch.setattr(threads, "time", found)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield found
    torch.set_num_threads(before)


BUSY = {1: 1.0, 2: 8.0, 4: 20.0}


def test_an_idle_machine_gives_all_threads(machine):
    with chosen_threads(measure=True) as own:
        assert torch.get_num_threads() == 4
    assert str(own) == "4 threads"


@pytest.mark.parametrize(
    ("seconds", "number", "text"),
    [
        (BUSY, 1, "1 thread (the machine is busy: 4 were slower)"),
        ({1: 2.0, 2: 1.1, 4: 9.0}, 2, "2 threads (the machine is busy: 4 were slower)"),
        ({1: 1.0, 2: 1.0, 4: 1.1}, 4, "4 threads"),  # a draw is for large regions to decide
    ],
)
def test_the_fastest_number_is_taken_and_put_back(machine, seconds, number, text):
    machine.seconds = seconds
    with chosen_threads(measure=True) as own:
        assert torch.get_num_threads() == number
    assert torch.get_num_threads() == 4
    assert str(own) == text


def test_every_power_of_two_is_tried_and_all(machine):
    machine.seconds = dict.fromkeys(range(1, 13), 1.0)
    for most, tried in ((2, {1, 2}), (4, {1, 2, 4}), (12, {1, 2, 4, 8, 12})):
        machine.measured.clear()
        torch.set_num_threads(most)
        with chosen_threads(measure=True):
            assert set(machine.measured) == tried


def test_the_number_is_put_back_after_an_error(machine):
    machine.seconds = BUSY
    with pytest.raises(KeyError, match="inside"), chosen_threads(measure=True):
        raise KeyError("inside")
    assert torch.get_num_threads() == 4
    with chosen_threads() as own:  # which is no call inside another
        assert own.most == 4


def test_the_number_is_put_back_after_an_error_in_the_measurement(machine):
    machine.seconds = {1: 1.0}
    with pytest.raises(KeyError), chosen_threads(measure=True):
        raise AssertionError("not reached")
    assert torch.get_num_threads() == 4


def test_calls_inside_a_call_take_its_number(machine):
    machine.seconds = {1: 2.0, 2: 1.0, 4: 8.0}
    with chosen_threads(measure=True):
        count = len(machine.measured)
        with chosen_threads() as inner:
            assert torch.get_num_threads() == inner.number == 2
        assert torch.get_num_threads() == 2
        assert len(machine.measured) == count


def test_measurements_of_fits_take_a_hundredth_of_the_time(machine):
    for _ in range(100_000):
        with chosen_threads(measure=True):
            machine.now += 0.1
    share = sum(machine.seconds[number] for number in machine.measured) / machine.now
    assert 0.005 < share < 0.015


def test_a_later_fit_follows_the_machine(machine):
    for seconds, number in ((machine.seconds, 4), (BUSY, 1), (machine.seconds, 4)):
        machine.seconds = seconds
        machine.now += 1e4
        with chosen_threads(measure=True):
            assert torch.get_num_threads() == number


def test_other_calls_use_the_number_of_the_last_fit(machine):
    with chosen_threads() as before:
        assert torch.get_num_threads() == before.number == 4
    machine.seconds = BUSY
    with chosen_threads(measure=True):
        machine.measured.clear()
    machine.now += 1e9
    with chosen_threads() as after:
        assert torch.get_num_threads() == after.number == 1
    torch.set_num_threads(3)  # of which the last fit measured nothing
    with chosen_threads() as other:
        assert torch.get_num_threads() == other.number == 3
    assert not machine.measured


def threads_of_blas():
    """The numbers of threads of the libraries of NumPy and SciPy."""
    libraries = [own for own in threadpool_info() if own["user_api"] == "blas"]
    assert libraries
    return {own["num_threads"] for own in libraries}


def test_numpy_and_scipy_use_at_most_as_many_threads(machine):
    with threadpool_limits(3, user_api="blas"):
        for number, limited in ((2, {2}), (1, {1}), (8, {3})):
            with num_threads(number), chosen_threads():
                assert threads_of_blas() == limited
                with num_threads(4), chosen_threads():  # a call inside another
                    assert threads_of_blas() == limited
            assert threads_of_blas() == {3}


def test_calls_at_the_same_time_restore_the_threads_of_numpy():
    """The first call ends while the second one runs."""
    with threadpool_limits(3, user_api="blas"):
        first, second = fixed_threads(1), fixed_threads(2)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert threads_of_blas() == {1}
        second.__exit__(None, None, None)
        assert threads_of_blas() == {3}


def test_a_single_thread_is_not_measured(machine):
    torch.set_num_threads(1)
    with chosen_threads(measure=True) as own:
        assert torch.get_num_threads() == 1
    assert not machine.measured
    assert str(own) == "1 thread"


def test_settings_override_the_measurement(machine):
    machine.seconds = BUSY
    with num_threads(3), chosen_threads(measure=True) as own:
        assert torch.get_num_threads() == 3
        assert str(own) == "3 threads"
    assert not machine.measured
    assert torch.get_num_threads() == 4
    assert num_threads.value() is None


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
def test_numbers_that_are_none_are_refused(value):
    with pytest.raises(ValueError, match="expects a positive integer"):
        num_threads(value)


def test_the_work_is_measured_with_as_many_threads():
    before = torch.get_num_threads()
    try:
        assert threads.mean_seconds(2, 0.0) > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def field(n=16):
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, torch.stack([torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1)


def model():
    return gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*poorly:gp_orff.DataWarning")
def test_a_fit_says_its_threads_and_puts_them_back(machine):
    machine.seconds = BUSY
    fitted = model().fit(*field(), progress=False)
    assert fitted.report.threads == 1
    assert any("the machine is busy: 4 were slower" in note for note in fitted.report.notes)
    assert torch.get_num_threads() == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        lambda own, x, y: own.condition(x, y),
        lambda own, x, y: own.update(x, y),
        lambda own, x, y: own.observe(x, 0 * x[:, 0], gp_orff.Divergence(), noise=1e-2),
        lambda own, x, y: own.leave_one_out(x, y),
        lambda own, x, y: own.posterior(),
        lambda own, x, y: own.posterior().mean(x),
        lambda own, x, y: own.posterior().variance(x),
        lambda own, x, y: own.posterior().divergence(x),
    ],
)
def test_no_other_call_measures(machine, call):
    own = model().condition(*field())
    call(own, *field())
    assert not machine.measured
    assert torch.get_num_threads() == 4


def test_a_prediction_uses_the_number_of_the_last_fit(machine, monkeypatch):
    used, values = [], gp_orff.HelmholtzKernel.forward
    own = model().condition(*field()).posterior()
    monkeypatch.setattr(threads, "last", Measurement(4, 1, 0.0))
    monkeypatch.setattr(
        gp_orff.HelmholtzKernel,
        "forward",
        lambda *a, **b: used.append(torch.get_num_threads()) or values(*a, **b),
    )
    own.mean(field()[0])
    own.variance(field()[0])
    assert set(used) == {1}


def test_a_ridge_regression_measures_once(machine):
    machine.seconds = BUSY
    x, y = field()
    ridge = gp_orff.regression.ORFFRidge(gp_orff.CurlFreeKernel(num_dims=2)).fit(
        x.numpy(), y.numpy()
    )
    assert set(machine.measured) == {1, 2, 4}
    machine.measured.clear()
    ridge.predict(x.numpy())
    assert not machine.measured
