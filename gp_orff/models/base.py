"""The modules of a `VectorFieldGP`: kernel, likelihoods, mean and rule; its state, and files."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import ConstantMean, Mean, MultitaskMean
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.noise.covariances import noise_of
from gp_orff.data.noise.likelihoods import NamedLikelihoods, default_likelihood
from gp_orff.data.patterns import DEFAULT
from gp_orff.data.reading import Options
from gp_orff.data.repeats.copies import without_copies
from gp_orff.data.repeats.request import Repeats
from gp_orff.data.sources import Arrays, Chunks, Reader, base_means, is_constant
from gp_orff.data.survey import DataWarning
from gp_orff.data.tracks.reading import check_repeated
from gp_orff.features.frequencies.auto import Auto
from gp_orff.features.frequencies.rule import Rule
from gp_orff.inference.conditioning.left_out_points import warn_of_left_out
from gp_orff.inference.representation import Representation
from gp_orff.kernels.learned_spectrum import learned_spectra
from gp_orff.kernels.products import require_field_products
from gp_orff.kernels.tree import terms
from gp_orff.models.fitting.history import History
from gp_orff.models.fitting.noise.known import learn_scales
from gp_orff.models.fitting.noise.tracks import remember_all, spans_of
from gp_orff.models.fitting.progress import Progress, show_pass
from gp_orff.models.fitting.starting_values import with_amplitude
from gp_orff.models.fitting.strategy import fit
from gp_orff.models.frozen_model import ModelSnapshot
from gp_orff.models.heights import take_heights
from gp_orff.models.report.fit_report import FitReport
from gp_orff.models.state import ModelState, Represented, copied_if_small, with_groups
from gp_orff.models.storage import files
from gp_orff.models.storage.pack import pack_state, unpack_state
from gp_orff.models.storage.recipes import build, build_rule, describe, describe_rule

_KIND = "gp_orff.VectorFieldGP"


class FieldModel(torch.nn.Module):
    """A kernel, the likelihood of every group, a mean and a frequency rule, with the data."""

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
        require_field_products(kernel)
        self.num_outputs = outputs[0]
        self.kernel = with_amplitude(kernel)
        self.likelihood = default_likelihood(self.num_outputs) if likelihood is None else likelihood
        self.mean = default_mean(self.num_outputs) if mean is None else mean
        self.frequencies = frequencies
        self.likelihoods = NamedLikelihoods()  # of groups with a name
        self._assigned: ModelState | None = None
        self._learned: Float[Tensor, "k"] | None = None  # hyperparameters of a fit with weak priors
        self.double()
        noise_of(self.likelihood, self.num_outputs)  # raises if it is not supported
        check_mean(self.mean, self.num_outputs)

    @property
    def report(self) -> FitReport:
        """A `FitReport`: what the model holds and how it was fitted; `print` shows it as text."""
        if self._assigned is None:
            return FitReport.without_data(self.kernel, self._every_likelihood)
        self._snapshot()
        return self.state.report(self.mean)

    def save(self, path: str | os.PathLike) -> None:
        """Save the model to one file at `path`.

        The file has the data, with the weights of Student-t noise, or their `statistics`, whichever
        take fewer bytes; an exact kernel, tracks, a `HarmonicKernel` and random frequencies that
        outnumber the observed values need the data. A loaded model predicts, is updated and is
        fitted again as the saved one; of statistics, for lengthscales and in a domain as
        `statistics` has them. The new file replaces an old one only when it is complete.
        `torch.load(path, weights_only=True)` reads the file too.
        """
        content = {
            "kernel": describe(self.kernel),
            "likelihood": describe(self.likelihood),
            "likelihoods": {name: describe(noise) for name, noise in self.likelihoods.items()},
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
        """Load a saved model, on the CPU.

        Args:
            path: the file.
            kernel, likelihood, mean, frequencies: parts of the saved model, built as they were for
                it; needed only where their classes, constraints or priors are neither gpytorch's
                nor this package's.

        Raises:
            FileNotFoundError: no file at `path`.
            ValueError: a file that is damaged or newer than this package; a part that the file
                cannot describe and that is not given, or another one than was saved.

        Example:
            >>> import gp_orff, os, tempfile, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> model = model.condition(torch.rand(20, 2), torch.randn(20, 2))
            >>> path = os.path.join(tempfile.mkdtemp(), "field.pt")
            >>> model.save(path)
            >>> loaded = gp_orff.VectorFieldGP.load(path)
            >>> bool(loaded.log_marginal_likelihood().isclose(model.log_marginal_likelihood()))
            True
        """
        content = files.read(path, _KIND)
        template = None if kernel is None else with_amplitude(kernel)
        model = cls(
            build(content["kernel"], template, "kernel"),
            likelihood=build(content["likelihood"], likelihood, "likelihood"),
            mean=build(content["mean"], mean, "mean"),
            frequencies=build_rule(content["frequencies"], frequencies),
        )
        for label, description in content["likelihoods"].items():
            model.likelihoods[label] = build(description, None, "likelihood")
        if content["fit"] is not None:
            parts = model.kernel, model._every_likelihood, model.frequencies
            model._assign(unpack_state(content["fit"], *parts))
        return model

    def get_extra_state(self) -> Float[Tensor, "k"]:
        """What a fit has learned with weak priors, for `state_dict`: while the hyperparameters stay
        as they are, `condition` gives a posterior that integrates over them, as the fit does. Empty
        without such a fit."""
        return torch.empty(0) if self._learned is None else self._learned

    def set_extra_state(self, state: Float[Tensor, "k"]) -> None:
        self._learned = state.double().cpu() if len(state) else None

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        state_dict.setdefault(prefix + "_extra_state", torch.empty(0))  # of earlier versions
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _hyperparameters(self) -> Float[Tensor, "k"]:
        """Raw parameters of the kernel and all likelihoods, and a fixed mean."""
        modules, mean = [self.kernel, *self._every_likelihood.values()], self._fixed_mean
        values = [p.detach().flatten().double() for module in modules for p in module.parameters()]
        return torch.cat(values if mean is None else [*values, mean.double()]).cpu()

    @property
    def _every_likelihood(self) -> dict[str, Likelihood]:
        """The likelihoods of all groups, with that of observations without a group name."""
        return {DEFAULT: self.likelihood, **self.likelihoods}

    @property
    def _held(self) -> ModelState:
        """The state as it was assigned last."""
        if self._assigned is None:
            raise RuntimeError("the model has no data yet: call fit(x, y) or condition(x, y) first")
        return self._assigned

    @property
    def state(self) -> ModelState:
        """The state, on frequencies that fit the present kernel and hyperparameters."""
        self._assigned = self._held.current(self.kernel, self._every_likelihood)
        return self._assigned

    def _assign(self, state: ModelState) -> "FieldModel":
        """Assign a new state, the last step of a call."""
        for label, likelihood in state.likelihoods.items():
            if label == DEFAULT:
                self.likelihood = likelihood
            else:
                self.likelihoods[label] = likelihood
        self._assigned = state
        self._learned = self._hyperparameters() if state.history.weak_priors else None
        return self

    def _assign_with_posterior(self, state: ModelState) -> "FieldModel":
        """Compute the posterior and assign the state; a failure leaves the model as it was."""
        snapshot = self._assign(state.with_posterior(self.mean))._snapshot()
        if snapshot.fixed_mean is None:
            _warn_of_unknown_mean(snapshot.posterior.evidence.unknown_means())
        return self

    def _snapshot(self, marginalize: bool | None = None) -> ModelSnapshot:
        """A snapshot of the present model; sets a trained constant mean to its best value.
        `marginalize`: as for `posterior`."""
        snapshot = self.state.snapshot(self.mean)
        if is_trained(self.mean):
            for mean, value in zip(base_means(self.mean), snapshot.constant, strict=True):
                mean.initialize(constant=value)
        return snapshot if marginalize is None else self.state.snapshot(self.mean, marginalize)

    def _read(self, x: object, y: object, options: Options, learning: bool = False) -> Dataset:
        """Check the arguments of `fit`, in one pass over the data; `learning`, the blocks of tracks
        are chosen anew."""
        self.double()
        spans = {} if learning else spans_of(self._every_likelihood)
        reader = Reader(self.kernel, self.mean, self.num_outputs)
        chunked = y is None
        source = Chunks(reader, x, options, show_pass) if chunked else Arrays(reader, x, y, options)
        num_points = 0 if self._assigned is None else self._assigned.data.survey.num_points
        data = Dataset.of(source, num_points, spans)
        if learning:
            check_repeated(data.tracks)
        return data

    def copied(self, x: object, y: object, options: Options, learning: bool = False) -> Dataset:
        """Data as by `_read`, with a copy of small arrays that the caller cannot change."""
        data = self._read(x, y, options, learning)
        data = replace(data, repeats=Repeats(options.merge))
        return data if y is None else copied_if_small(data)

    def counted_once(
        self, x: object, y: object, options: Options, learning: bool = False
    ) -> Dataset:
        """Data as by `copied`, of which small arrays count copies of records once."""
        data = self.copied(x, y, options, learning)
        single = y is not None and data.is_small and not data.tracks
        return without_copies(data) if single else data

    def _representation_of(self, data: Data) -> Representation:
        """Choose a representation for data, at the present hyperparameters."""
        take_heights(self.kernel, data)
        likelihoods = with_groups(self._every_likelihood, data, self.kernel)
        representation = Representation.of(self.kernel, likelihoods, self.frequencies, data).mended
        warn_of_left_out(data, representation.data)
        return representation

    def _condition_state(
        self, representation: Representation, notes: Sequence[str] = ()
    ) -> ModelState:
        """The state of a model that is conditioned at the present hyperparameters."""
        history = History("conditioned") if self._assigned is None else self._assigned.history
        learned = self._learned is not None and torch.equal(self._learned, self._hyperparameters())
        history = replace(history.conditioned, weak_priors=learned).with_notes(notes)
        return ModelState.of(Represented.of(representation), self._fixed_mean, history)

    def _fit_state(
        self, data: Data, warm_start: bool, progress: Progress, scale_noise: bool | None
    ) -> ModelState:
        """Learn the hyperparameters from data; the state of the fitted model. `scale_noise`: learn
        the factor of known noise, or keep it at one; None, as before."""
        take_heights(self.kernel, data, anew=not warm_start)
        likelihoods = with_groups(self._every_likelihood, data, self.kernel)
        remember_all(likelihoods, data)
        if scale_noise is not None:
            learn_scales(likelihoods, data, scale_noise)
        parts = self.kernel, likelihoods, self._fixed_mean, self.frequencies
        result = fit(*parts, data, warm_start, progress)
        return ModelState.of(Represented.of(result.representation), result.mean, result.history)

    @property
    def _fixed_mean(self) -> Float[Tensor, "p"] | None:
        """The constant mean if it is not trained, zero beside a mean that is not constant; None for
        a trained constant mean."""
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


def _warn_of_unknown_mean(unknown: Float[Tensor, "k p"]) -> None:
    """Warn of directions of the constant mean of which the data say nothing."""
    if not len(unknown):
        return
    signs = unknown.gather(-1, unknown.abs().argmax(-1, keepdim=True)).sign()
    along = [", ".join(f"{v:.3g}" for v in vector) for vector in (signs * unknown + 0.0).tolist()]
    words = " and ".join(f"({vector})" for vector in along)
    warnings.warn(
        f"no observation depends on the constant mean of the outputs along {words}: it is "
        "taken as zero there; observe other components or directions, or give a mean "
        "that is known, such as mean=gpytorch.means.ZeroMean()",
        DataWarning,
        stacklevel=3,
    )


@contextmanager
def restored_on_failure(module: torch.nn.Module) -> Iterator[None]:
    """Set all parameters and buffers back to their values if the block raises, and to whether they
    are trained; learned spectra to where they end."""
    held = [*module.parameters(), *module.buffers()]
    before = [(tensor.detach().clone(), tensor.requires_grad) for tensor in held]
    curves = learned_spectra(module)
    continued = [curve.continued for curve in curves]
    try:
        yield
    except BaseException:
        for tensor, (value, trained) in zip(held, before, strict=True):
            tensor.data.copy_(value)
            tensor.requires_grad_(trained)
        for curve, value in zip(curves, continued, strict=True):
            curve.continued = value
        raise


def default_mean(num_outputs: int) -> Mean:
    return MultitaskMean(ConstantMean(), num_outputs) if num_outputs > 1 else ConstantMean()


def is_trained(mean: Mean) -> bool:
    """Whether the mean is a trained constant for every output."""
    means = base_means(mean)
    return all(isinstance(m, ConstantMean) and m.raw_constant.requires_grad for m in means)


def check_mean(mean: Mean, num_outputs: int) -> None:
    """Raise unless constant means have closed-form values: one for each output, all trained or
    none, without priors and constraints if trained."""
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
            "expected constant means without priors and constraints, all trained or none, because "
            "their best values are computed in closed form; for a Gaussian prior on a constant, "
            "add the term MultitaskKernel(ConstantKernel(), num_tasks=...) to the kernel"
        )
