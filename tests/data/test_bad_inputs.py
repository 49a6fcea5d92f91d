"""Hundreds of bad inputs: each raises a clear error and leaves the model unchanged."""

import gpytorch
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gp_orff
from tests.support.fields import curl_free, directions, flow

N = 24
X, Y, _ = flow(N)
XS = torch.zeros(1, 2).double()
pytestmark = pytest.mark.filterwarnings("ignore:the truncated variance of the given grid")


def fitted(rule):
    model = gp_orff.VectorFieldGP(curl_free(0.4), frequencies=rule)
    model.likelihood.noise = 0.01
    return model.condition(X, Y).update(X[:4], Y[:4], group="radar")


RULES = {"exact": None, "grid": gp_orff.Grid(spacing=1.0, cutoff=12.0)}


def state(model):
    field = model.posterior()
    learned = model.state_dict()
    texts = [str(learned.pop(name)) for name in list(learned) if name.endswith("_extra_state")]
    numbers = [*learned.values(), field.mean(XS), field.variance(XS)]
    return [tensor.clone() for tensor in numbers], texts, list(model.likelihoods), model.report


@pytest.fixture(scope="module", params=RULES)
def model(request):
    return fitted(RULES[request.param])


@pytest.fixture(scope="module")
def before(model):
    return state(model)


broken = st.sampled_from([float("nan"), float("inf"), -float("inf")])
places = st.integers(0, N - 1)
odd = st.one_of(
    st.none(),
    st.text(max_size=5),
    st.builds(object),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.just(np.array(["a", "b"])),
    st.just([[1.0, 2.0], [3.0]]),
    st.just(torch.zeros(N, 2, dtype=torch.bool)),
    st.just(torch.zeros(N, 2, dtype=torch.complex64)),
)


@st.composite
def spoiled(draw, values):
    """Numbers of which one is none."""
    values = values.clone()
    values[draw(places), draw(st.integers(0, values.shape[1] - 1))] = draw(broken)
    return values


@st.composite
def misshapen(draw):
    """Numbers of another shape."""
    shape = draw(
        st.lists(st.integers(0, 4), max_size=3)
        | st.tuples(st.just(N), st.sampled_from([0, 3, 4]))
        | st.tuples(st.integers(0, N - 1), st.just(2))
    )
    return draw(st.sampled_from([torch.zeros, np.zeros]))(tuple(shape))


@st.composite
def data(draw):
    """Arguments of `fit`, `condition`, `update`, `statistics_of`, one of them wrong."""
    what = draw(
        st.sampled_from(["x", "y", "variances", "directions", "group", "missing", "chunks"])
    )
    if what == "x":
        return (draw(odd.filter(lambda v: v is not None) | spoiled(X) | misshapen()), Y), {}
    if what == "y":
        return (X, draw(odd | spoiled(Y) | misshapen())), {}
    if what == "variances":
        wrong = st.floats(max_value=0.0) | broken
        values = torch.ones(N).double()
        values[draw(places)] = draw(wrong)
        other = st.sampled_from([torch.ones(N + 1), torch.ones(N, 3), "one", object()])
        return (X, Y), {"variances": draw(st.just(values) | other)}
    if what == "directions":
        u = directions(N)
        u[draw(places)] *= draw(st.sampled_from([0.0, 0.5, 1.1, float("nan")]))
        other = st.sampled_from([directions(N + 1), np.ones((N, 3)), "east"])
        y = Y if draw(st.booleans()) else Y[:, 0]
        return (X, y), {"directions": draw(st.just(u) | other)}
    if what == "group":
        wrong = st.lists(st.text(max_size=3), max_size=N - 1) | st.just(np.ones((N, 2)))
        return (X, Y), {"group": draw(wrong)}
    if what == "missing":
        y = Y if draw(st.booleans()) else draw(spoiled(Y))
        return (X, y), {"missing": draw(st.text().filter(lambda t: t != "mask" and t != "raise"))}
    bad = st.one_of(
        st.just([]),
        st.just([(X, Y), (X, Y[:3])]),
        st.just([(X, Y, Y)]),
        st.just([{"x": X}]),
        st.just([{"x": X, "y": Y, "noise": 1.0}]),
        st.just([(X, Y), None]),
        st.builds(lambda y: [(X, Y), (X, y)], spoiled(Y)),
        st.builds(lambda x: [(X, Y), (x, Y)], misshapen().filter(lambda v: v.shape != (N, 2))),
        st.builds(lambda: iter([(X, Y)])),
        st.just(X),
    )
    return (draw(bad),), {}


points = odd | spoiled(X) | st.just(torch.zeros(0, 3)) | st.just(torch.zeros(3, 5))
POSTERIOR = ("mean", "variance", "__call__")
CALLS = {
    **dict.fromkeys(["condition", "update", "statistics_of"], data()),
    "leave_one_out": data().filter(lambda call: len(call[0]) == 2),
    "fit": data().filter(lambda call: call[0][0] is not None),  # which is to learn again
    **dict.fromkeys(POSTERIOR, st.tuples(st.tuples(points), st.just({}))),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", CALLS)
def test_a_bad_input_is_a_clear_error_and_nothing_is_lost(method, model, before):
    """Of data 48 for each method, of points 16, with each model: 576."""
    examples = 16 if method in POSTERIOR else 48

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(CALLS[method])
    def check(call):
        arguments, how = call
        owner = model.posterior() if method in POSTERIOR else model
        if method == "fit":
            how = {**how, "progress": False}
        with pytest.raises((ValueError, TypeError), match="expect"):
            getattr(owner, method)(*arguments, **how)
        after = state(model)
        assert before[1:] == after[1:]
        assert all(map(torch.equal, before[0], after[0]))

    check()


BAD_MODELS = {
    "class": (lambda: gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel), "an instance"),
    "nothing": (lambda: gp_orff.VectorFieldGP(None), "a gpytorch kernel"),
    "rule": (lambda: gp_orff.VectorFieldGP(curl_free(1.0), frequencies=300), "a frequency rule"),
    "outputs": (
        lambda: gp_orff.VectorFieldGP(curl_free(1.0) + gp_orff.HelmholtzKernel(num_dims=3)),
        "same number of outputs",
    ),
    "mean": (
        lambda: gp_orff.VectorFieldGP(curl_free(1.0), mean=gpytorch.means.ConstantMean()),
        "a constant mean for each",
    ),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_a_bad_model_is_refused(name):
    build, message = BAD_MODELS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        build()
