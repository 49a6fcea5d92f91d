"""Fixed points of maps that increase an objective, extrapolated."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

_LONGEST = 64.0  # the longest extrapolation, in steps
_FARTHEST = 2.0  # the largest change of a log weight in one extrapolation


def climb(
    step: Callable[[Float[Tensor, "n"]], tuple[float, Float[Tensor, "n"]]],
    point: Float[Tensor, "n"],
    near: float,
    settled: float,
    rounds: int,
) -> tuple[Float[Tensor, "n"], bool]:
    """The fixed point of a map that increases an objective, and whether the objective has settled.

    `step(u)` returns the objective at u and the next u; at most `rounds` rounds, until one gains
    less than `settled`. Where steps gain less than `near`, they are extrapolated, unless that
    lowers the objective (SQUAREM: Varadhan & Roland 2008, scheme S3).
    """
    value, image = step(point)
    for _ in range(rounds):
        next_value, next_image = step(image)
        if next_value - value < settled:
            return next_image, True
        if next_value - value > near:
            point, value, image = image, next_value, next_image
            continue
        first, second = image - point, next_image - 2 * image + point
        length = (first.norm() / second.norm()).clamp(1.0, _LONGEST)
        move = 2 * length * first + length**2 * second
        point = point + move.clamp(-_FARTHEST, _FARTHEST)
        value, image = step(point)
        if not value >= next_value:
            point = next_image
            value, image = step(point)
    return next_image, False
