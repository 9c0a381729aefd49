"""Builds the native kernels along with the Python packages; everything else is in pyproject.toml."""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

spec = importlib.util.spec_from_file_location("build_kernels", Path("paged", "kernels", "build.py"))
assert spec is not None
assert spec.loader is not None
build_kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_kernels)


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        build_kernels.build_or_explain(Path(self.get_ext_fullpath(ext.name)))


setup(
    ext_modules=[Extension("paged.kernels.libpaged", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
