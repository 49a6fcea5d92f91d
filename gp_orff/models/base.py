"""The modules of a `VectorFieldGP`, and what it holds."""

import os
from collections.abc import Callable, Sequence

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, Mean, MultitaskMean
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.noise.covariances import noise_of
from gp_orff.data.noise.likelihoods import NamedLikelihoods
from gp_orff.data.patterns import DEFAULT
from gp_orff.data.reading import Options
from gp_orff.data.sources import Arrays, Chunks, Reader, base_means, is_constant
from gp_orff.features.frequencies.auto import Auto
from gp_orff.features.frequencies.rule import Rule
from gp_orff.inference.representation import Representation
from gp_orff.kernels.tree import terms
from gp_orff.models.fitting.starting_values import with_amplitude
from gp_orff.models.fitting.strategy import fit
from gp_orff.models.frozen_model import ModelSnapshot
from gp_orff.models.report import FitReport
from gp_orff.models.state import ModelState, Represented, copied_if_small, with_groups
from gp_orff.models.storage import files
from gp_orff.models.storage.pack import pack_state, unpack_state
from gp_orff.models.storage.recipes import build, build_rule, describe, describe_rule

_KIND = "gp_orff.VectorFieldGP"


class FieldModel(torch.nn.Module):
    """A kernel, the noise of every group, a mean and a rule, and the data they have been given."""

    def __init__(
        self,
        kernel: Kernel,
        *,
        likelihood: Likelihood | None = None,
        mean: Mean | None = None,
        frequencies: Rule | None = None,
    ):
        super().__init__()
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"VectorFieldGP expects an instance of a gpytorch kernel, got {kernel!r}; for "
                "instance VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))"
            )
        frequencies = Auto() if frequencies is None else frequencies
        if isinstance(frequencies, type) or not hasattr(frequencies, "draw"):
            raise TypeError(
                f"VectorFieldGP expects a frequency rule, got {frequencies!r}; for instance "
                "gp_orff.Auto()"
            )
        outputs = sorted({term.num_outputs for term in terms(kernel)})
        if len(outputs) != 1:
            raise ValueError(
                f"VectorFieldGP expects terms with one number of outputs, got {outputs}; wrap "
                "scalar kernels in gpytorch.kernels.MultitaskKernel"
            )
        self.num_outputs = outputs[0]
        self.kernel = with_amplitude(kernel)
        self.likelihood = default_likelihood(self.num_outputs) if likelihood is None else likelihood
        self.mean = default_mean(self.num_outputs) if mean is None else mean
        self.frequencies = frequencies
        self.likelihoods = NamedLikelihoods()  # that have a name
        self._assigned: ModelState | None = None
        self.double()
        noise_of(self.likelihood, self.num_outputs)  # raises for what is not known
        check_mean(self.mean, self.num_outputs)

    @property
    def report(self) -> str:
        """What was done to the data, and what is held, in words."""
        if self._assigned is None:
            return "not fitted: call fit(x, y) or condition(x, y)"
        self._snapshot()
        return str(FitReport.of(self.state, self.mean))

    def save(self, path: str | os.PathLike) -> None:
        """Everything to one file, that `torch.load(path, weights_only=True)` reads too: few data as
        they are, others as their `statistics`, from which a loaded model predicts, is updated and
        learns again. The old file, if there is one, stays whole until the new one is.
        """
        content = {
            "kernel": describe(self.kernel),
            "likelihood": describe(self.likelihood),
            "likelihoods": {label: describe(own) for label, own in self.likelihoods.items()},
            "mean": describe(self.mean),
            "frequencies": describe_rule(self.frequencies),
            "fit": None if self._assigned is None else pack_state(self.state),
        }
        files.write(path, _KIND, content)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        kernel: Kernel | None = None,
        *,
        likelihood: Likelihood | None = None,
        mean: Mean | None = None,
        frequencies: Rule | None = None,
    ) -> "VectorFieldGP":
        """A model as it was saved, on the CPU.

        Args:
            kernel, likelihood, mean, frequencies: built as they were for the saved model, where
                their classes, constraints or priors are not gpytorch's or this package's.

        Raises:
            FileNotFoundError: no file.
            ValueError: a file that is damaged, or newer than this package; a kernel that the file
                cannot name and that is not given, or another one than was saved.
        """
        found = files.read(path, _KIND)
        given = None if kernel is None else with_amplitude(kernel)
        model = cls(
            build(found["kernel"], given, "kernel"),
            likelihood=build(found["likelihood"], likelihood, "likelihood"),
            mean=build(found["mean"], mean, "mean"),
            frequencies=build_rule(found["frequencies"], frequencies),
        )
        for label, described in found["likelihoods"].items():
            model.likelihoods[label] = build(described, None, "likelihood")
        if found["fit"] is not None:
            parts = model.kernel, model._every_likelihood, model.frequencies
            model._assign(unpack_state(found["fit"], *parts))
        return model

    @property
    def _every_likelihood(self) -> dict[str, Likelihood]:
        """Of every group, the one of readings that name none included."""
        return {DEFAULT: self.likelihood, **self.likelihoods}

    @property
    def _held(self) -> ModelState:
        """As it was assigned last."""
        if self._assigned is None:
            raise RuntimeError("the model has no data yet: call fit(x, y) or condition(x, y) first")
        return self._assigned

    @property
    def state(self) -> ModelState:
        """What is held, on frequencies that serve kernel and hyperparameters as they are."""
        self._assigned = self._held.current(self.kernel, self._every_likelihood)
        return self._assigned

    def _assign(self, state: ModelState) -> "FieldModel":
        """The last step of a call."""
        for label, own in state.likelihoods.items():
            if label not in self._every_likelihood:
                self.likelihoods[label] = own
        self._assigned = state
        return self

    def _assign_whole(self, state: ModelState) -> "FieldModel":
        """With a posterior: what fails, fails before the state is assigned."""
        state.snapshot(self.mean)
        self._assign(state)._snapshot()
        return self

    def _snapshot(self) -> ModelSnapshot:
        """Of the model as it is now; the constant mean is brought up to date."""
        found = self.state.snapshot(self.mean)
        if is_trained(self.mean):
            for own, value in zip(base_means(self.mean), found.constant, strict=True):
                own.initialize(constant=value)
        return found

    def _read(self, x: object, y: object, how: Options) -> Dataset:
        """Data that have been looked at once."""
        self.double()
        reader = Reader(self.kernel, self.mean, self.num_outputs)
        source = Chunks(reader, x, how) if y is None else Arrays(reader, x, y, how)
        seen = 0 if self._assigned is None else self._assigned.data.survey.num_points
        return Dataset.of(source, seed=seen)

    def copied(self, x: object, y: object, how: Options) -> Dataset:
        """The same, with a copy of arrays that are small."""
        data = self._read(x, y, how)
        return data if y is None else copied_if_small(data)

    def _represented(self, data: Data) -> Representation:
        """Chosen for data, at the hyperparameters as they are."""
        likelihoods = with_groups(self._every_likelihood, data.keys, self.kernel)
        return Representation.of(self.kernel, likelihoods, self.frequencies, data)

    def _conditioned(self, own: Representation, notes: Sequence[str] = ()) -> ModelState:
        return ModelState.of(Represented.of(own), self._fixed_mean, notes, "conditioned")

    def _learned(self, data: Data, warm_start: bool, progress: Callable[..., None]) -> ModelState:
        """Data, under hyperparameters that are learned from them."""
        likelihoods = with_groups(self._every_likelihood, data.keys, self.kernel)
        parts = self.kernel, likelihoods, self._fixed_mean, self.frequencies
        found = fit(*parts, data, warm_start, progress)
        return ModelState.of(Represented.of(found.representation), found.mean, found.notes)

    @property
    def _fixed_mean(self) -> Float[Tensor, "p"] | None:
        """A constant one that is taken as it is, zero beside one that varies; None for the best."""
        if is_trained(self.mean):
            return None
        means = base_means(self.mean)
        fixed = torch.zeros(self.num_outputs).to(next(self.kernel.parameters()))
        if is_constant(self.mean) and len(means) == self.num_outputs:
            constants = [getattr(m, "constant", fixed[0]).detach() for m in means]
            fixed = torch.stack([value.reshape(()) for value in constants])
        return fixed

    def _apply(self, fn, recurse=True):
        """`.to(device)` moves the data too."""
        before = next(self.kernel.parameters()).device
        super()._apply(fn, recurse)
        device = next(self.kernel.parameters()).device
        if self._assigned is not None and device != before:
            self._assigned = self._assigned.to(device)
        return self


def default_likelihood(num_outputs: int) -> Likelihood:
    """One global noise, positive: a lower bound would have units."""
    if num_outputs == 1:
        return GaussianLikelihood(noise_constraint=GreaterThan(0.0))
    return MultitaskGaussianLikelihood(
        num_outputs, has_task_noise=False, noise_constraint=GreaterThan(0.0)
    )


def default_mean(num_outputs: int) -> Mean:
    return MultitaskMean(ConstantMean(), num_outputs) if num_outputs > 1 else ConstantMean()


def is_trained(mean: Mean) -> bool:
    """Whether it is a constant for every output, to be found."""
    means = base_means(mean)
    return all(isinstance(m, ConstantMean) and m.raw_constant.requires_grad for m in means)


def check_mean(mean: Mean, num_outputs: int) -> None:
    """Constants are found in closed form: one for each output, all trained or none, and free."""
    means = base_means(mean)
    if not all(isinstance(m, ConstantMean) for m in means):
        return
    if len(means) != num_outputs:
        raise ValueError(
            f"expected a constant mean for each of the kernel's {num_outputs} outputs, got "
            f"{len(means)}; use MultitaskMean(ConstantMean(), num_tasks={num_outputs})"
        )
    trained = {m.raw_constant.requires_grad for m in means}
    bound = any([*m.named_priors(), *m.named_constraints()] for m in means)
    if len(trained) > 1 or (bound and True in trained):
        raise ValueError(
            "expected constant means without priors and constraints, all trained or none, since "
            "the best ones are found in closed form; a Gaussian prior on a constant is the term "
            "MultitaskKernel(ConstantKernel(), num_tasks=...) of the kernel"
        )
