"""Sums of groups as plain values; the keys are those of the file format, and stay."""

import math
from collections.abc import Mapping
from dataclasses import astuple

from torch import Tensor

from gp_orff.data.packing.keys import pack_key, unpack_key
from gp_orff.data.patterns import GroupKey
from gp_orff.data.statistics import Moments, Statistics, Weights
from gp_orff.features.columns import Columns


def pack_group(key: GroupKey, group: Statistics) -> dict:
    """The sums of a group, without the columns, which all groups share."""
    return {
        **pack_key(key),
        "moments": [[_own(m.gram), _own(m.column_sum), float(m.mass)] for m in group.moments],
        "cross": _own(group.cross),
        "second_moment": _own(group.second_moment),
        "total": _own(group.total),
        "weights": list(astuple(group.weights)),
    }


def unpack_group(content: Mapping, phi: Columns) -> tuple[GroupKey, Statistics]:
    """The key and the sums of a group of columns `phi`."""
    key = unpack_key(content)
    return key, Statistics(
        phi,
        key.pattern,
        tuple(Moments(*parts) for parts in content["moments"]),
        content["cross"],
        content["second_moment"],
        content["total"],
        _unpack_weights(content),
    )


def _own(values: Tensor) -> Tensor:
    """Values on the CPU with memory of their own: files hold the whole memory of a view."""
    values = values.detach().cpu()
    whole = values.untyped_storage().nbytes() == values.nbytes
    return values if whole else values.clone()


def _unpack_weights(group: Mapping) -> Weights:
    """The sums of weights; older files have N and Σ log w_n only, and get equal weights."""
    if "weights" in group:
        return Weights(*group["weights"])
    count, weight = group["count"], math.exp(group["log_weight"] / group["count"])
    return Weights(count, weight * count, weight**2 * count, group["log_weight"])
