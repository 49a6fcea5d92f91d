"""Noise that comes with the readings: an absolute variance or covariance of each.

A reading y = f + ε, ε ~ N(0, R), tells the same as its components along the axes u_k of
R = Σ_k λ_k u_k u_kᵀ: the numbers u_kᵀ y = u_kᵀ f + ε_k, with independent noise of variance λ_k.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.data.observations import Observations
from gp_orff.data.patterns import GroupKey, LineOfSight
from gp_orff.data.validation import as_real

_ASYMMETRY = 1e-5  # over √(R_ii R_jj): beyond rounding in single precision
_SINGULAR = 100 * torch.finfo(torch.float64).eps  # the least eigenvalue, over the largest


def given_noise(
    noise: object, count: int, num_values: int, observed: Bool[Tensor, "N v"] | None = None
) -> Float[Tensor, "N ..."]:
    """The noise of N readings of v values: variances (N,) or (N, v), or covariances (N, v, v).

    What belongs to values that were not observed is neither checked nor used.

    Args:
        noise: (N,), (N, v) or (N, v, v), in squared units of y.
        count: N.
        num_values: v, the components of a reading; 1 for readings along directions.
        observed: whether each value was observed; None if all were.

    Raises:
        TypeError: values that are not real numbers.
        ValueError: another shape; variances that are not positive and finite; a covariance that is
            not symmetric or not positive definite.

    Example:
        >>> from gp_orff.data.noise.given import given_noise
        >>> given_noise([[[0.1]], [[0.2]]], count=2, num_values=1).tolist()
        [0.1, 0.2]
    """
    values = as_real(noise, "noise").detach()
    each, components = (count,), (count, num_values)
    shapes = (each, components, (*components, num_values))
    if values.shape not in shapes:
        raise ValueError(
            f"expected noise of shape {shapes[0]}, a variance for each reading, {shapes[1]}, one "
            f"for each number, or {shapes[2]}, covariances, got {tuple(values.shape)}"
        )
    if observed is None:
        observed = torch.ones(components, dtype=torch.bool)
    observed = observed.to(values.device)
    if num_values == 1:
        values = values.reshape(each)
    if values.dim() == 3:
        return _covariances(values, observed)
    _check_variances(values, observed.any(-1) if values.dim() == 1 else observed)
    return values


def along_axes(part: Observations, covariance: Float[Tensor, "n p p"]) -> list[Observations]:
    """The components of readings along the axes of their noise covariances, axis by axis.

    Args:
        part: readings of some components of vectors.
        covariance: their noise, as `given_noise` returns it.
    """
    variances, axes = torch.linalg.eigh(part.apply_to_covariance(covariance))
    directions = part.pattern.embed(axes.mT)  # (n, v, p): the rows are axes
    y = (axes.mT @ part.y.unsqueeze(-1)).squeeze(-1)
    key = GroupKey(part.key.label, LineOfSight(part.pattern.num_outputs), known=True)
    return [
        Observations(key, part.x, y[:, [k]], 1 / variances[:, k], directions[:, k], part.index)
        for k in range(y.shape[-1])
    ]


def _check_variances(values: Tensor, observed: Bool[Tensor, "..."]) -> None:
    wrong = observed & ~((values > 0) & torch.isfinite(values))
    if wrong.any():
        reading = int(torch.nonzero(wrong)[0, 0])
        raise ValueError(
            f"expected positive, finite noise variances, got {int(wrong.sum())} others, first "
            f"{values[wrong][0].item():.6g} of reading {reading}; drop readings of unknown noise"
        )


def _covariances(
    values: Float[Tensor, "N v v"], observed: Bool[Tensor, "N v"]
) -> Float[Tensor, "N v v"]:
    """The covariances, symmetric to the last digit; the identity where nothing was observed."""
    both = observed.unsqueeze(-1) & observed.unsqueeze(-2)
    eye = torch.eye(values.shape[-1]).to(values)
    values = torch.where(both, values, eye)
    _require(torch.isfinite(values).all(-1).all(-1), values, "finite")
    size = values.diagonal(dim1=-1, dim2=-2).abs().sqrt()
    skew = (values - values.mT).abs() / (size.unsqueeze(-1) * size.unsqueeze(-2))
    _require(~(skew > _ASYMMETRY).any(-1).any(-1), values, "symmetric")
    values = 0.5 * (values + values.mT)
    eigenvalues = torch.linalg.eigvalsh(values)
    positive = eigenvalues[:, 0] > _SINGULAR * eigenvalues[:, -1]
    _require(positive, values, "positive definite")
    return values


def _require(holds: Bool[Tensor, "N"], values: Float[Tensor, "N v v"], what: str) -> None:
    if not holds.all():
        reading = int(torch.nonzero(~holds)[0, 0])
        raise ValueError(
            f"expected {what} noise covariances, got {int((~holds).sum())} of {len(values)} that "
            f"are not, first that of reading {reading}: {values[reading].tolist()}; drop these "
            "readings, or give variances"
        )
