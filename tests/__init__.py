"""Tests, one folder for each of the package."""
