"""Columns φ from the plain values that `Columns.plain` gives."""

from collections.abc import Mapping

from gp_orff.features import phases
from gp_orff.features.columns import (
    Columns,
    DotProductColumns,
    HarmonicColumns,
    SideBySide,
    TemplateColumns,
    TrigColumns,
)
from gp_orff.features.lattice import LatticeColumns
from gp_orff.features.phases import LinearPhases, Phases, ProjectedPhases, SumOfPhases
from gp_orff.kernels.dot_product import legendre


def unpack_columns(content: Mapping) -> Columns:
    """The columns from the content that `Columns.plain` gave."""
    if "families" in content:
        return SideBySide(tuple(map(unpack_columns, content["families"])))
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
