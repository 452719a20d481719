"""Measuring instead of predicting: the job, the worker process, the disk cache."""
