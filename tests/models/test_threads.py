"""The number of threads of a call, with measurements that are made up."""

import threading

import pytest
import torch

import gp_orff
from gp_orff import threads
from gp_orff.settings import num_threads
from gp_orff.threads import chosen_threads, update_threads


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
    monkeypatch.setattr(threads, "measurements", {})
    monkeypatch.setattr(threads, "time", found)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield found
    torch.set_num_threads(before)


BUSY = {1: 1.0, 2: 8.0, 4: 20.0}


def test_an_idle_machine_gives_all_threads(machine):
    with chosen_threads() as own:
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
    with chosen_threads() as own:
        assert torch.get_num_threads() == number
    assert torch.get_num_threads() == 4
    assert str(own) == text


def test_every_power_of_two_is_tried_and_all(machine):
    machine.seconds = dict.fromkeys(range(1, 13), 1.0)
    for most, tried in ((2, {1, 2}), (4, {1, 2, 4}), (12, {1, 2, 4, 8, 12})):
        machine.measured.clear()
        torch.set_num_threads(most)
        with chosen_threads():
            assert set(machine.measured) == tried


def test_the_number_is_put_back_after_an_error(machine):
    machine.seconds = BUSY
    with pytest.raises(KeyError, match="inside"), chosen_threads():
        raise KeyError("inside")
    assert torch.get_num_threads() == 4
    with chosen_threads() as own:  # which is no call inside another
        assert own.most == 4


def test_the_number_is_put_back_after_an_error_in_the_measurement(machine):
    machine.seconds = {1: 1.0}
    with pytest.raises(KeyError), chosen_threads():
        raise AssertionError("not reached")
    assert torch.get_num_threads() == 4


def test_calls_inside_a_call_neither_measure_nor_put_back(machine):
    machine.seconds = BUSY
    with chosen_threads() as outer:
        count = len(machine.measured)
        machine.now = 1e9
        with chosen_threads() as inner:
            assert inner is outer
        assert torch.get_num_threads() == 1
        assert len(machine.measured) == count


def test_measurements_take_a_hundredth_of_the_time(machine):
    for _ in range(100_000):
        with chosen_threads():
            machine.now += 0.1
    share = sum(machine.seconds[number] for number in machine.measured) / machine.now
    assert 0.005 < share < 0.015


def test_a_long_call_follows_the_machine(machine):
    with chosen_threads() as own:
        machine.seconds = BUSY
        update_threads()
        assert torch.get_num_threads() == 4  # measured a moment ago
        machine.now += 1e4
        update_threads()
        assert torch.get_num_threads() == 1
        machine.seconds = {1: 2.0, 2: 1.5, 4: 1.0}
        machine.now += 1e4
        update_threads()
        assert torch.get_num_threads() == 4
    assert str(own) == "1 to 4 threads (the machine is busy: 4 were slower)"


def test_outside_of_a_call_nothing_is_chosen(machine):
    update_threads()
    assert not machine.measured
    assert torch.get_num_threads() == 4


def test_a_single_thread_is_not_measured(machine):
    torch.set_num_threads(1)
    with chosen_threads() as own:
        assert torch.get_num_threads() == 1
    assert not machine.measured
    assert str(own) == "1 thread"


def test_settings_override_the_measurement(machine):
    machine.seconds = BUSY
    with num_threads(3), chosen_threads() as own:
        assert torch.get_num_threads() == 3
        assert str(own) == "3 threads"
    assert not machine.measured
    assert torch.get_num_threads() == 4
    assert num_threads.value() is None


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
def test_numbers_that_are_none_are_refused(value):
    with pytest.raises(ValueError, match="expects a positive integer"):
        num_threads(value)


def test_other_python_threads_have_calls_of_their_own(machine):
    found = []

    def call():
        torch.set_num_threads(4)
        with chosen_threads() as own:
            found.append(own)

    with chosen_threads() as outer:
        other = threading.Thread(target=call)
        other.start()
        other.join()
        assert found[0] is not outer


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
def test_every_call_chooses_its_threads(machine, call):
    own = model().condition(*field())
    threads.measurements.clear()
    machine.measured.clear()
    call(own, *field())
    assert machine.measured
    assert torch.get_num_threads() == 4
