"""The solvers of `ORFFRidge`, by name."""

from gp_orff.regression.solvers.base import Solver
from gp_orff.regression.solvers.direct import Cholesky, Stein
from gp_orff.regression.solvers.lsmr import Lsmr
from gp_orff.regression.solvers.sgd import Sgd

SOLVERS: dict[str, Solver] = {
    solver.name: solver for solver in (Cholesky(), Stein(), Lsmr(), Sgd())
}
