"""What pyproject.toml cannot say: every package under tunekit/, and three folders beside it that ship inside it."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["tunekit*"]), "tunekit.recipes", "tunekit.kernels", "tunekit.configs"])
