"""The price and the loss by which a fit chooses its searches, and its posterior.

The price of a plan is the number of floating-point operations that it takes, its loss what it is
expected to lack, in nats of the evidence of all data under the kernel itself. The cheapest plan
that loses at most `aim` is taken, or that of the smallest loss within the budget. The plans are
those of searches in `fitting.plans`, and those of a posterior in `representation.exact_instead`.

The constants of this file decide which searches are made, and where they end.
"""

NATS = 1.0  # of loss, with which a fit may end: less changes no decision between models
NATS_OF_A_NUMBER = 1e-4  # nats, likewise, for each of many observed numbers
NEGLIGIBLE = 0.1  # of a standard deviation, or of nats; a hundredth of a variance, therefore
BUDGET = 2e12  # operations of all searches of a fit: about a minute of one core
SUBSET_VALUES = 600  # numbers, of which an evaluation takes as long as its overhead
FINALISTS = 3  # starting values that are searched from on more data: as many maxima are usual
SHORT = 6  # evaluations, of which a search shows which maximum it goes to
MOST_EVALUATIONS = 100  # of a search: ten for each hyperparameter of usual kernels
LONGEST_STEP = 2.0  # of the logarithm of a hyperparameter: the evidence is no parabola beyond
MOST_TRAINING = 4096  # features, or numbers, of a step of a search that takes about ten seconds
MOST_ITERATIVE = 2**15  # features of the posterior, by default: iterations take about a minute
MANY = 2**16  # points or numbers, of which a pass takes longer than an evaluation
FINE_FACTOR = 1.2  # of lengthscales that one lattice serves: its features grow by it for each input


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
