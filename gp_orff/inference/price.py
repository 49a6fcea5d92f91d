"""The price and the loss by which a fit chooses its searches, and its posterior.

The price of a plan is the number of floating-point operations that it takes, its loss what it is
expected to lack, in nats of the evidence of all data under the kernel itself. The cheapest plan
that loses at most `aim` is taken, or that of the smallest loss within the budget. The plans are
those of searches in `fitting.plans`, and those of a posterior in `representation.exact_instead`.

The constants of this file decide which searches are made, and where they end.
"""

NATS = 1.0  # of loss, with which a fit may end: a factor of e in the marginal likelihood
NATS_OF_A_NUMBER = 1e-4  # nats, likewise, for each of many observed numbers
NEGLIGIBLE = 0.1  # of a standard deviation, or of nats; hence a hundredth of a variance
BUDGET = 2e12  # operations of all searches of a fit: about a minute of one core
RATIO = 8.0  # of prices, of a search over one on the way to it: half of the values, for a factor
SUBSET_VALUES = 600  # numbers, on which starting values are found: 4·10⁸ operations an evaluation
FINALISTS = 3  # starting values that are searched from on more data: one may lead astray
SHORT = 6  # evaluations of a search, after which its maximum can be foreseen
UNSURE = 3.0  # times the gain that is foreseen, from where it is often more: at 2, a fit lost a nat
MOST_EVALUATIONS = 100  # of a search on one plan, whatever it still gains
LONGEST_STEP = 2.0  # of the logarithm of a hyperparameter, over which curvature is not known
MOST_TRAINING = 4096  # features or numbers of a search: 10¹¹ operations an evaluation
MOST_ITERATIVE = 2**15  # features of a posterior, whose matrix would take 8 GiB
MANY = 2**16  # numbers whose sites are sought on the way
MANY_POINTS = 10**5  # that are visited once for all lattices, which takes twice the memory
MOST_ON_SITES = 10**6  # numbers whose sites are sought for a posterior: each width sorts them
FINE_FACTOR = 1.2  # of lengthscales that one lattice serves: more takes more features
STEP = 4  # ratio of tolerances of posteriors, and quarters of lengthscales: few points change them
LONGEST = 3.0  # extents of the data: a longer lengthscale is like a constant
FARTHEST = 16.0  # of a logarithm without ranges, from its start: 18 has cost a fit 858 nats
MOVED = 1.5  # of a logarithm, beyond which an information misleads: at 2, a fit lost 2.5 nats
CONVERGED = 1e-9  # nats of a number: of weights and pseudo-observations, near rounding
LEAST_SHARE = 1e-8  # of the variance of data, of noise: the posterior variance is rounding below


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
