"""Data with a sample of the blocks of tracks, where they are many."""

from dataclasses import replace

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.statistics import Weights

_MANY = 1.5  # times as many blocks as are wanted


def sampled(data: Data, most: int) -> Data:
    """The data with about `most` blocks of the tracks of each group that has many more."""
    if not (isinstance(data, Dataset) and any(len(p.y) > _MANY * most for p in data.tracks)):
        return data
    tracks, weights = [], dict(data.survey.weights)
    num_points, num_values = data.survey.num_points, data.survey.num_values
    for part in data.tracks:
        chosen = part.sample(most) if len(part.y) > _MANY * most else part
        fewer, count = len(part.y) - len(chosen.y), len(chosen.y)
        num_points, num_values = num_points - fewer, num_values - fewer * part.y.shape[-1]
        weights[part.key] = Weights(count, count, count)
        tracks.append(chosen)
    survey = replace(data.survey, num_points=num_points, num_values=num_values, weights=weights)
    return replace(data, tracks=tuple(tracks), survey=survey)
