"""Builds the wheel without `cluster/__init__.py`.

PyPI has an unrelated package `cluster`, and pip would overwrite its file of that name, or ours.
Without it both work in one environment. Everything else is in pyproject.toml.
"""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildModules(build_py):
    """Leaves out the file that two distributions would own."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return (package, module, file) of each module of a package."""
        modules: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [each for each in modules if each[:2] != ("cluster", "__init__")]


setup(cmdclass={"build_py": BuildModules})
