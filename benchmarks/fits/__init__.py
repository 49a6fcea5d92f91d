"""Fits of models to generated and public data: errors, intervals and evidence."""
