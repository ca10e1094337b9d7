"""Package list: all packages below tunekit/, plus three top-level directories that are installed inside it."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["tunekit*"]), "tunekit.recipes", "tunekit.kernels", "tunekit.configs"])
