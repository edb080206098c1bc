"""Measure speed, as ratios within one run."""
