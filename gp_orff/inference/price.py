"""The price and the loss that decide the searches of a fit, and its posterior.

The price of a plan is its number of floating-point operations. Its loss is the log evidence, in
nats, that it is expected to lose relative to all data under the exact kernel. A fit uses the
cheapest plan that loses at most `aim`, or the plan with the smallest loss in the budget. The plans
of searches are in `fitting.plans`, those of a posterior in `representation.exact_instead`.

The constants of this file decide which searches a fit makes, and where they end.
"""

import math

NATS = 1.0  # loss with which a fit may end: a factor of e in the marginal likelihood
NATS_OF_A_NUMBER = 1e-4  # the same for each of many observed values
NEGLIGIBLE = 0.1  # relative to a standard deviation or to a nat; hence a hundredth of a variance
BUDGET = 2e12  # operations of all searches of a fit: about a minute of one core
SUBSET_VALUES = 600  # values of the subset for starting values: 4·10⁸ operations per evaluation
FINALISTS = 3  # starting values for a search on more data: a single one may be misleading
SHORT = 6  # evaluations of a search, after which its maximum can be predicted
UNSURE = 3.0  # factor of a predicted gain, which is often too small: with 2, a fit lost a nat
MOST_EVALUATIONS = 100  # largest number for a search on one plan
LONGEST_STEP = 2.0  # largest step of a logarithm: the curvature may change over longer ones
MOST_TRAINING = 4096  # largest number of features or values in a search: 10¹¹ operations each
MOST_ITERATIVE = 2**15  # largest number of features of a posterior: its matrix would take 8 GiB
MANY = 10**5  # points up to which searches merge positions; above, one pass serves all lattices
MOST_ON_SITES = 10**6  # values up to which a posterior merges positions: each width sorts them
FINE_FACTOR = 1.2  # factor of lengthscales for one lattice: a larger one takes more features
STEP = 4  # ratio of tolerances of posteriors, and quarters of lengthscales
LONGEST = 3.0  # longest lengthscale over the extent of the data: longer ones act like a constant
FARTHEST = 16.0  # range of a logarithm without limits about its start: 18 cost a fit 858 nats
MOVED = 1.5  # change of a logarithm after which B is computed again: with 2, a fit lost 2.5 nats
ROUNDING = 1e-8  # least noise variance over that of the data: below, posteriors are rounding


def aim(num_values: float) -> float:
    """Return the loss of log evidence with which a fit may end, in nats."""
    return max(NATS, NATS_OF_A_NUMBER * num_values)


def cubic(size: float) -> float:
    """The operations of a Cholesky factor, an inverse and products of square matrices."""
    return 2.0 * size**3


RATIO = cubic(2) / cubic(1)  # least price of a plan over that of an earlier one: twice the values

# A search treats a part of the field as white noise: the waves that a lattice truncates, or the
# changes of the field between merged positions. Let r be the variance of this part over the noise
# variance. The part has m independent modes at M values, and white noise has M. Each mode has r M/m
# noise variances, so that the log evidence falls by
#
#     ½ [M log(1 + r) − m log(1 + r M/m)] = r²/4 M (M/m − 1) + O(r³) .
#
# Changes between positions, and waves shorter than the distances between points, have m = M/2.
#
# 1. The tolerance of a lattice follows from this loss, with its number of features for m. Waves
#    just beyond the lattice are about as many.
# 2. The loss of a lattice with its limit of features is computed with m = M/2. Its tolerance is
#    that at the shortest lengthscale of its range. At the optimum of a search, δ is often so much
#    smaller that r²/4 M (M/m − 1) was 75 times too large for 60 000 values.


def loss_of_noise(ratio: float, num_values: float) -> float:
    """Return the loss of log evidence if part of the field is treated as white noise, in nats.

    The loss is M/4 (r/(1 + r))² for M values, where r is the variance of this part divided by the
    noise variance. The part may be truncated by a lattice, or it may be the change of the field
    between merged positions.
    """
    return loss_of_share(ratio / (1 + ratio), num_values)


def loss_of_share(share: float, num_values: float) -> float:
    """Return M/4 s², the loss in nats if the fraction s of the noise variance of a search is in
    fact variance of the field."""
    return 0.25 * num_values * share**2


def ratio_of_loss(nats: float, num_values: float, num_modes: float) -> float:
    """Return the small ratio r for which m modes that are treated as noise lose this many nats."""
    modes = min(num_modes, num_values / 2)
    return 2.0 * math.sqrt(nats * modes / (num_values * (num_values - modes)))
