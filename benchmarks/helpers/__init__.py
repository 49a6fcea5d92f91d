"""Known fields, models, measures and result files that several benchmarks use."""
