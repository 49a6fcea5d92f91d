"""Prediction of exact field kernels: gpytorch's default, with fantasies that work."""

from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy


class ExactFieldPredictionStrategy(DefaultPredictionStrategy):
    """gpytorch's exact prediction for kernels with several outputs.

    Its own `get_fantasy_strategy` adds residuals of shapes (n, p) and (n·p) and fails for every
    multitask model; here the model with more data is conditioned anew.
    """

    def get_fantasy_strategy(
        self, inputs, targets, full_inputs, full_targets, full_output, **kwargs
    ) -> "ExactFieldPredictionStrategy":
        likelihood = self.likelihood.get_fantasy_likelihood(**kwargs)
        return type(self)(full_inputs, full_output, full_targets, likelihood)
