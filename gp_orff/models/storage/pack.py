"""Data and statistics as plain values."""

import math
from collections.abc import Mapping
from dataclasses import astuple, replace

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood

from gp_orff.data.dataset import Data, Dataset, StatisticsOnly
from gp_orff.data.field_statistics import FieldStatistics
from gp_orff.data.observations import Observations, SymbolObservations
from gp_orff.data.patterns import Components, GroupKey, LineOfSight, Pattern
from gp_orff.data.statistics import Moments, Statistics, Weights
from gp_orff.data.survey import Survey
from gp_orff.features.columns import Columns, SideBySide, TrigColumns
from gp_orff.features.frequencies.rule import Rule
from gp_orff.features.lattice import LatticeColumns
from gp_orff.inference.conditioning import FeatureInference
from gp_orff.inference.representation import Representation
from gp_orff.models.state import ModelState, Represented
from gp_orff.models.storage.recipes import (
    build_rule,
    build_symbol,
    describe_rule,
    describe_symbol,
)

_SAMPLE = 500  # points a file keeps of data whose statistics it holds


def pack_state(state: ModelState) -> dict:
    """Few data as they are, others as their statistics, and what is known of their frequencies."""
    inference = state.inference
    exact = not isinstance(inference, FeatureInference)
    few = exact or inference.written_out(state.kernel)
    known = None if exact else pack_statistics(inference.statistics_of(state.kernel))
    return {
        "story": [state.story],
        "notes": list(state.notes),
        "mean": state.mean,
        "choice": describe_rule(state.representation.rule),
        "exact": exact,
        "conditioned_by": describe_rule(state.represented.rule),
        "known": known,
        "data": pack_data(state.data if few else state.statistics_only()),
    }


def unpack_state(
    found: Mapping, kernel: Kernel, likelihoods: Mapping[str, Likelihood], requested: Rule
) -> ModelState:
    """The state again."""
    data, (known, exact) = unpack_data(found["data"]), (found["known"], found["exact"])
    choice, by = (
        None if exact else build_rule(rule, None if rule else requested)
        for rule in (found["choice"], found["conditioned_by"])
    )
    own = Representation(kernel, likelihoods, requested, data, choice)
    known = None if known is None else unpack_statistics(known)
    represented = Represented.resumed(own, by, known)
    return ModelState.of(represented, found["mean"], found["notes"], found["story"][0])


def pack_data(data: Data) -> dict:
    """Few data as they are, others as their statistics."""
    found = {
        "bound": data.elbo_correction,
        "further": [_pack_symbol_data(own) for own in data.symbol_data],
    }
    if isinstance(data, Dataset):
        found["readings"] = [_readings(part) for part in data.unweighted().visit()]
        if data.weights is not None:
            found["weights"] = [w.cpu() for w in data.weights]
        return found
    survey = data.survey
    sample = [part.take(slice(0, _SAMPLE)) for part in survey.sample[:4]]
    return {
        **found,
        "sums": pack_statistics(data.field_statistics),
        "domain": data.domain,
        "box": survey.box,
        "num_points": survey.num_points,
        "num_values": survey.num_values,
        "sample": [_readings(part) for part in sample],
    }


def unpack_data(found: Mapping) -> Data:
    """The data again."""
    if "readings" in found:
        data = Dataset.in_memory([_unpack_readings(own) for own in found["readings"]]).copied()
        weights, data = found.get("weights"), replace(data, symbol_data=_further(found))
        return data if weights is None else data.weighted(weights, found["bound"])
    sample = [_unpack_readings(own) for own in found["sample"]]
    sums = unpack_statistics(found["sums"])
    ranks = [torch.linspace(0, 1, len(part)) for part in sample]
    box = tuple(map(tuple, found["box"]))
    weights = {key: own.weights for key, own in sums.groups.items()}
    survey = Survey(box, found["num_points"], found["num_values"], weights, sample, ranks)
    domain = found["domain"]
    domain = None if domain is None else tuple(map(tuple, domain))
    return StatisticsOnly(sums, domain, survey, _further(found))


def _pack_symbol_data(own: SymbolObservations) -> dict:
    tensors = {name: getattr(own, name).cpu().clone() for name in ("x", "y", "noise")}
    return {"symbol": describe_symbol(own.symbol), "space": list(own.space), **tensors}


def _further(found: Mapping) -> tuple[SymbolObservations, ...]:
    return tuple(
        SymbolObservations(
            build_symbol(own["symbol"]), own["x"], own["y"], own["noise"], tuple(own["space"])
        )
        for own in found["further"]
    )


def pack_statistics(statistics: FieldStatistics) -> dict:
    """As plain values."""
    return {
        "columns": statistics.phi.plain(),
        "groups": [_group(key, own) for key, own in statistics.groups.items()],
        "bound": statistics.elbo_correction,
    }


def unpack_statistics(found: Mapping) -> FieldStatistics:
    """The statistics again."""
    phi, groups = _columns(found["columns"]), {}
    for own in found["groups"]:
        key = _key(own)
        groups[key] = Statistics(
            phi,
            key.pattern,
            tuple(Moments(*parts) for parts in own["moments"]),
            own["cross"],
            own["second_moment"],
            own["total"],
            _weights(own),
        )
    return FieldStatistics(phi, groups, found["bound"])


def _columns(found: Mapping) -> Columns:
    if "families" in found:
        return SideBySide(tuple(map(_columns, found["families"])))
    if "indices" in found:
        return LatticeColumns.of(found["indices"], found["spacing"], found["origin"])
    return TrigColumns.of(found["omega"], found["sampled"])


def _weights(own: Mapping) -> Weights:
    """Of files that know N and Σ log w_n alone, as if all weights were alike."""
    if "weights" in own:
        return Weights(*own["weights"])
    count, weight = own["count"], math.exp(own["log_weight"] / own["count"])
    return Weights(count, weight * count, weight**2 * count, own["log_weight"])


def _group(key: GroupKey, own: Statistics) -> dict:
    return {
        **_named(key),
        "moments": [[m.gram.cpu(), m.column_sum.cpu(), float(m.mass)] for m in own.moments],
        "cross": own.cross.cpu(),
        "second_moment": own.second_moment.cpu(),
        "total": own.total.cpu(),
        "weights": list(astuple(own.weights)),
    }


def _readings(part: Observations) -> dict:
    tensors = {"x": part.x, "y": part.y, "weight": part.weight, "direction": part.direction}
    copies = {name: None if t is None else t.detach().cpu().clone() for name, t in tensors.items()}
    return {**_named(part.key), **copies}


def _unpack_readings(found: Mapping) -> Observations:
    return Observations(_key(found), found["x"], found["y"], found["weight"], found["direction"])


def _named(key: GroupKey) -> dict:
    pattern: Pattern = key.pattern
    columns = list(pattern.columns) if isinstance(pattern, Components) else None
    return {"label": key.label, "columns": columns, "num_outputs": pattern.num_outputs}


def _key(found: Mapping) -> GroupKey:
    columns, outputs = found["columns"], found["num_outputs"]
    pattern = LineOfSight(outputs) if columns is None else Components(tuple(columns), outputs)
    return GroupKey(found["label"], pattern)
