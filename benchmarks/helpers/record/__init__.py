"""The main job on fixed work: data sets with their kernels, the objective of each, and times."""
