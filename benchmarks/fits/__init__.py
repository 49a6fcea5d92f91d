"""Fits of models to data, generated and public: errors, intervals and evidence."""
