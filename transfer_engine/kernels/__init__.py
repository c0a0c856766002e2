"""Kernels in CUDA C++: the sources in this folder, compiled for the device at hand and kept on disk.

`load()` gives a module of ours ("waits", "copy", "spin_check", "pingpong"), `compile()` one of the caller's, which may
include transfer_engine.cuh; `launch()` puts a kernel into any stream, also while it is captured. Nothing of CUDA is
imported before the first of these calls.
"""

from .launching import launch, stream_handle
from .loading import Kernel, Module, compile, include_dir, load  # noqa: A004 - as in kernels.compile

__all__ = ["Kernel", "Module", "compile", "include_dir", "launch", "load", "stream_handle"]
