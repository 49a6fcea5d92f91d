"""What several benchmarks need: known fields, models, measures, and where numbers go."""
