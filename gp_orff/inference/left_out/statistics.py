"""Readings left out by blocks, for inference by features: their statistics are subtracted."""

from dataclasses import replace

import torch

from gp_orff.data.dataset import StatisticsOnly
from gp_orff.data.field_statistics import FieldStatistics
from gp_orff.features.assemble import expand
from gp_orff.inference.conditioning import FeatureInference
from gp_orff.inference.equations import DenseRows, whole_vectors
from gp_orff.inference.equations.choice import has_blocks
from gp_orff.inference.left_out.closed_form import Rows, left_out_of_rows
from gp_orff.inference.left_out.conditioning import left_out, predicted
from gp_orff.settings import check_features


@left_out.register
@torch.no_grad()
def _(inference: FeatureInference, kernel, noises, mean, blocks):
    data = inference.data
    expansion = expand(kernel, inference.draws, data.num_inputs).double()
    cheap = has_blocks(expansion) and whole_vectors(data.observations)
    if inference.prefers_dual_algebra(expansion) and not cheap:  # fewer numbers than features
        rows = Rows.of(data)
        delta = inference.truncated(kernel, expansion)
        truncated = None if delta is None else (delta, torch.zeros_like(delta))
        dense = DenseRows.of(rows.observed, expansion, noises, truncated)
        covariance = dense.features @ dense.features.mT + dense.noise
        yield from left_out_of_rows(rows, covariance, noises, mean, blocks)
        return
    total = inference.statistics_of(kernel)
    for block in blocks:
        parts = [part.take(block.left_out[part.index]) for part in data.visit()]
        rest = total - FieldStatistics.of([part for part in parts if len(part)], total.phi)
        known = StatisticsOnly(rest, None, data.survey)
        with check_features(False):  # the model's own posterior is checked
            conditioned = replace(inference, data=known, known=rest)
            posterior = conditioned.posterior(kernel, noises, mean)
        yield predicted(data, block, posterior, mean)
