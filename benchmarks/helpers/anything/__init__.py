"""Generated data sets of many kinds, the kernels that suit them, and fits that may not last."""
