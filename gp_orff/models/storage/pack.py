"""Data and statistics as plain values, for files.

The keys are those of the file format, and stay.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from gp_orff.data.dataset import Data, Dataset, StatisticsOnly
from gp_orff.data.field_statistics import FieldStatistics
from gp_orff.data.observations import Observations, SymbolObservations
from gp_orff.data.packing.keys import pack_key, unpack_key
from gp_orff.data.repeats.request import Repeats
from gp_orff.data.survey import Survey
from gp_orff.features.frequencies.rule import Rule
from gp_orff.inference.conditioning import FeatureInference
from gp_orff.inference.representation import Representation
from gp_orff.models.fitting.history import History, Stage
from gp_orff.models.state import ModelState, Represented
from gp_orff.models.storage.recipes import (
    build_rule,
    build_symbol,
    describe_rule,
    describe_symbol,
)
from gp_orff.models.storage.tracks import pack_tracks, unpack_tracks

_SAMPLE = 500  # points, of each sample in a file with statistics


def pack_state(state: ModelState) -> dict:
    """Pack a state: data or their statistics, rules and history."""
    return {
        "history": asdict(state.history),
        "mean": state.mean,
        "choice": describe_rule(state.representation.rule),
        "dense": state.representation.dense,
        "exact": not isinstance(state.inference, FeatureInference),
        "conditioned_by": describe_rule(state.represented.rule),
        **_pack_data_or_statistics(state),
    }


def _pack_data_or_statistics(state: ModelState) -> dict:
    """The data with their learned weights, or the statistics that serve in their place, whichever
    take fewer bytes; the data where statistics would not serve."""
    data, inference = state.data, state.inference
    needed = not isinstance(inference, FeatureInference) or data.tracks
    needed = needed or inference.written_out(state.kernel)
    if needed or not state.representation.on_lattice:  # whose statistics serve no other waves
        return {"known": None, "data": pack_data(data)}
    shared = inference.draws[0].shared_columns() is not None
    statistics = {
        "known": pack_statistics(inference.statistics) if shared else None,
        "data": pack_data(state.statistics_only()),
    }
    if not (data.revisitable and data.is_small):
        return statistics
    return min({"known": None, "data": pack_data(data)}, statistics, key=_num_bytes)


def _num_bytes(content: object) -> int:
    """The bytes of all tensors in a tree of plain values."""
    if isinstance(content, Tensor):
        return content.nbytes
    parts = content.values() if isinstance(content, Mapping) else content
    return sum(map(_num_bytes, parts)) if isinstance(content, Mapping | list | tuple) else 0


def unpack_state(
    content: Mapping, kernel: Kernel, likelihoods: Mapping[str, Likelihood], requested: Rule
) -> ModelState:
    """The state from the content that `pack_state` wrote."""
    data, packed = unpack_data(content["data"]), content["known"]
    choice, rule = (
        None if content["exact"] else build_rule(packed_rule, None if packed_rule else requested)
        for packed_rule in (content["choice"], content["conditioned_by"])
    )
    dense = content.get("dense", False)  # files of version 2 lack it
    representation = Representation(kernel, likelihoods, requested, data, choice, dense=dense)
    statistics = None if packed is None else unpack_statistics(packed)
    represented = Represented.from_statistics(representation, rule, statistics)
    return ModelState.of(represented, content["mean"], _history(content))


def _history(content: Mapping) -> History:
    """The history; older files have sentences instead, which become notes."""
    if "history" not in content:
        sentence, notes = content["story"][0], content["notes"]
        action = sentence.split()[0]
        return History(action).with_notes([*([sentence] if sentence != action else []), *notes])
    history = {key: value for key, value in content["history"].items() if key != "zero_mean"}
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
    return statistics.plain()


def unpack_statistics(content: Mapping) -> FieldStatistics:
    """The statistics from the content that `pack_statistics` wrote."""
    return FieldStatistics.from_plain(content)


def _pack_observations(part: Observations) -> dict:
    tensors = {"x": part.x, "y": part.y, "weight": part.weight, "direction": part.direction}
    copies = {name: None if t is None else t.detach().cpu().clone() for name, t in tensors.items()}
    return {**pack_key(part.key), **copies}


def _unpack_observations(content: Mapping) -> Observations:
    tensors = (content[name] for name in ("x", "y", "weight", "direction"))
    return Observations(unpack_key(content), *tensors)
