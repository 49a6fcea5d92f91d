"""The price and the loss by which a fit chooses its searches, and its posterior.

The price of a plan is the number of floating-point operations that it takes, its loss what it is
expected to lack, in nats of the evidence of all data under the kernel itself. The cheapest plan
that loses at most `aim` is taken, or that of the smallest loss within the budget. The plans are
those of searches in `fitting.plans`, and those of a posterior in `representation.exact_instead`.
"""

NATS = 1.0  # of loss, with which a fit may end
NATS_OF_A_NUMBER = 1e-4  # likewise, for each of many observed numbers
BUDGET = 2e12  # operations of all searches of a fit: about a minute of one core


def aim(num_values: float) -> float:
    """The loss with which a fit may end."""
    return max(NATS, NATS_OF_A_NUMBER * num_values)


def cubic(size: float) -> float:
    """Operations of a Cholesky factor, an inverse and products of matrices of a size."""
    return 2.0 * size**3


def loss_of_noise(ratio: float, num_values: float) -> float:
    """M/4 s², with s = r/(1 + r), where a variance of the field of r times that of the noise is
    taken for white noise: what a lattice truncates, or what the field changes by within sites."""
    return loss_of_share(ratio / (1 + ratio), num_values)


def loss_of_share(share: float, num_values: float) -> float:
    """M/4 s², with the share s of the variance of what is taken for noise that is the field's."""
    return 0.25 * num_values * share**2
