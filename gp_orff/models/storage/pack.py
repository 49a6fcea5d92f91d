"""Data and statistics as plain values, for files.

The keys are those of the file format, and stay.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, astuple, replace

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood

from gp_orff.data.dataset import Data, Dataset, StatisticsOnly
from gp_orff.data.field_statistics import FieldStatistics
from gp_orff.data.observations import Observations, SymbolObservations
from gp_orff.data.patterns import GroupKey
from gp_orff.data.repeats.request import Repeats
from gp_orff.data.statistics import Moments, Statistics, Weights
from gp_orff.data.survey import Survey
from gp_orff.features import phases
from gp_orff.features.columns import (
    Columns,
    DotProductColumns,
    HarmonicColumns,
    SideBySide,
    TemplateColumns,
    TrigColumns,
)
from gp_orff.features.frequencies.rule import Rule
from gp_orff.features.lattice import LatticeColumns
from gp_orff.features.phases import LinearPhases, Phases, ProjectedPhases, SumOfPhases
from gp_orff.inference.conditioning import FeatureInference
from gp_orff.inference.representation import Representation
from gp_orff.kernels.dot_product import legendre
from gp_orff.models.fitting.history import History, Stage
from gp_orff.models.state import ModelState, Represented
from gp_orff.models.storage.keys import pack_key, unpack_key
from gp_orff.models.storage.recipes import (
    build_rule,
    build_symbol,
    describe_rule,
    describe_symbol,
)
from gp_orff.models.storage.tracks import pack_tracks, unpack_tracks

_SAMPLE = 500  # points, of each sample in a file with statistics


def pack_state(state: ModelState) -> dict:
    """Pack a state: small data as they are, larger data as statistics; rules and history."""
    inference = state.inference
    exact = not isinstance(inference, FeatureInference)
    small = exact or state.data.tracks or inference.written_out(state.kernel)
    small = small or not state.representation.on_lattice  # whose statistics serve no other waves
    statistics = None if exact else pack_statistics(inference.statistics_of(state.kernel))
    return {
        "history": asdict(state.history),
        "mean": state.mean,
        "choice": describe_rule(state.representation.rule),
        "exact": exact,
        "conditioned_by": describe_rule(state.represented.rule),
        "known": statistics,
        "data": pack_data(state.data if small else state.statistics_only()),
    }


def unpack_state(
    content: Mapping, kernel: Kernel, likelihoods: Mapping[str, Likelihood], requested: Rule
) -> ModelState:
    """The state from the content that `pack_state` wrote."""
    data, packed = unpack_data(content["data"]), content["known"]
    choice, rule = (
        None if content["exact"] else build_rule(packed_rule, None if packed_rule else requested)
        for packed_rule in (content["choice"], content["conditioned_by"])
    )
    representation = Representation(kernel, likelihoods, requested, data, choice)
    statistics = None if packed is None else unpack_statistics(packed)
    represented = Represented.from_statistics(representation, rule, statistics)
    return ModelState.of(represented, content["mean"], _history(content))


def _history(content: Mapping) -> History:
    """The history; older files have sentences instead, which become notes."""
    if "history" not in content:
        sentence, notes = content["story"][0], content["notes"]
        action = sentence.split()[0]
        return History(action).with_notes([*([sentence] if sentence != action else []), *notes])
    history = content["history"]
    stages = tuple(Stage(**stage) for stage in history["stages"])
    return History(**{**history, "stages": stages, "notes": tuple(history["notes"])})


def pack_data(data: Data) -> dict:
    """Pack a `Dataset` with its observations, or `StatisticsOnly` with a sample of points."""
    content = {
        "bound": data.elbo_correction,
        "further": [_pack_symbol_data(part) for part in data.symbol_data],
    }
    if isinstance(data, Dataset):
        content["repeats"] = asdict(data.repeats)
        content["tracks"] = [pack_tracks(part) for part in data.tracks]
        content["readings"] = [_pack_observations(part) for part in data.unweighted().visit()]
        if data.weights is not None:
            content["weights"] = [w.cpu() for w in data.weights]
        return content
    survey = data.survey
    sample = [part.take(slice(0, _SAMPLE)) for part in survey.sample[:4]]
    return {
        **content,
        "sums": pack_statistics(data.field_statistics),
        "domain": data.domain,
        "box": survey.box,
        "num_points": survey.num_points,
        "num_values": survey.num_values,
        "sample": [_pack_observations(part) for part in sample],
    }


def unpack_data(content: Mapping) -> Data:
    """The data from the content that `pack_data` wrote."""
    symbol_data = tuple(map(_unpack_symbol_data, content["further"]))
    if "readings" in content:
        observations = [_unpack_observations(part) for part in content["readings"]]
        tracks = [unpack_tracks(part) for part in content.get("tracks", [])]
        data = Dataset.in_memory([*observations, *tracks]).copied()
        repeats = Repeats(**content.get("repeats", {}))
        data = replace(data, symbol_data=symbol_data, repeats=repeats)
        weights = content.get("weights")
        return data if weights is None else data.weighted(weights, content["bound"])
    sample = [_unpack_observations(part) for part in content["sample"]]
    statistics = unpack_statistics(content["sums"])
    ranks = [torch.linspace(0, 1, len(part)) for part in sample]
    box = tuple(map(tuple, content["box"]))
    weights = {key: group.weights for key, group in statistics.groups.items()}
    survey = Survey(box, content["num_points"], content["num_values"], weights, sample, ranks)
    domain = content["domain"]
    domain = None if domain is None else tuple(map(tuple, domain))
    return StatisticsOnly(statistics, domain, survey, symbol_data)


def _pack_symbol_data(part: SymbolObservations) -> dict:
    tensors = {name: getattr(part, name).cpu().clone() for name in ("x", "y", "noise")}
    return {"symbol": describe_symbol(part.symbol), "space": list(part.space), **tensors}


def _unpack_symbol_data(content: Mapping) -> SymbolObservations:
    symbol, space = build_symbol(content["symbol"]), tuple(content["space"])
    return SymbolObservations(symbol, content["x"], content["y"], content["noise"], space)


def pack_statistics(statistics: FieldStatistics) -> dict:
    """Pack statistics: the columns, the sums of each group, and the ELBO correction."""
    return {
        "columns": statistics.phi.plain(),
        "groups": [_pack_group(key, group) for key, group in statistics.groups.items()],
        "bound": statistics.elbo_correction,
    }


def unpack_statistics(content: Mapping) -> FieldStatistics:
    """The statistics from the content that `pack_statistics` wrote."""
    phi, groups = _unpack_columns(content["columns"]), {}
    for group in content["groups"]:
        key = unpack_key(group)
        groups[key] = Statistics(
            phi,
            key.pattern,
            tuple(Moments(*parts) for parts in group["moments"]),
            group["cross"],
            group["second_moment"],
            group["total"],
            _unpack_weights(group),
        )
    return FieldStatistics(phi, groups, content["bound"])


def _unpack_columns(content: Mapping) -> Columns:
    if "families" in content:
        return SideBySide(tuple(map(_unpack_columns, content["families"])))
    if "indices" in content:
        return LatticeColumns.of(content["indices"], content["spacing"], content["origin"])
    if "polynomials" in content:
        return _unpack_dot_product(content)
    if "wavevectors" in content:
        parts = (content["side"], content["origin"], tuple(content["dims"]))
        return HarmonicColumns(content["wavevectors"], *parts)
    if "templates" in content:
        return TemplateColumns(**{**content, "dims": tuple(content["dims"])})
    return TrigColumns(_unpack_phases(content), content["sampled"])


def _unpack_dot_product(content: Mapping) -> DotProductColumns:
    polynomials = dict(content["polynomials"])
    cls = getattr(legendre, polynomials.pop("class"))
    return DotProductColumns(
        phases=_unpack_phases(content["phases"]),
        polynomials=cls(**polynomials),
        dims=tuple(content["dims"]),
        **{name: content[name] for name in ("degrees", "orders", "scale", "offset")},
    )


def _unpack_phases(content: Mapping) -> Phases:
    if "parts" in content:
        return SumOfPhases(tuple(map(_unpack_phases, content["parts"])))
    if "omega" in content:
        return LinearPhases(content["omega"])
    arguments = {key: content[key] for key in ("radius", "inverse_lengthscale", "chosen")}
    dims, num_inputs = phases.as_range(tuple(content["dims"])), content["num_inputs"]
    projection = dict(content["projection"])
    cls = getattr(phases, projection.pop("class"))
    return ProjectedPhases(cls(**projection), dims=dims, num_inputs=num_inputs, **arguments)


def _unpack_weights(group: Mapping) -> Weights:
    """The sums of weights; older files have N and Σ log w_n only, and get equal weights."""
    if "weights" in group:
        return Weights(*group["weights"])
    count, weight = group["count"], math.exp(group["log_weight"] / group["count"])
    return Weights(count, weight * count, weight**2 * count, group["log_weight"])


def _pack_group(key: GroupKey, group: Statistics) -> dict:
    return {
        **pack_key(key),
        "moments": [[m.gram.cpu(), m.column_sum.cpu(), float(m.mass)] for m in group.moments],
        "cross": group.cross.cpu(),
        "second_moment": group.second_moment.cpu(),
        "total": group.total.cpu(),
        "weights": list(astuple(group.weights)),
    }


def _pack_observations(part: Observations) -> dict:
    tensors = {"x": part.x, "y": part.y, "weight": part.weight, "direction": part.direction}
    copies = {name: None if t is None else t.detach().cpu().clone() for name, t in tensors.items()}
    return {**pack_key(part.key), **copies}


def _unpack_observations(content: Mapping) -> Observations:
    tensors = (content[name] for name in ("x", "y", "weight", "direction"))
    return Observations(unpack_key(content), *tensors)
