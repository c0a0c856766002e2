"""From source text to kernels that can be launched: compiled through cuda.core (NVRTC), or from the cache."""

from __future__ import annotations

import builtins
import ctypes
import importlib
import io
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import _cuda
from ..errors import ArgumentError, ArgumentTypeError, ConfigError, TransportUnavailable
from . import cache

_HERE = Path(__file__).resolve().parent
_STANDARD = "c++17"
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(')

_modules: dict[tuple[str, int], Module] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel on one device, ready to be launched. Made by `load()` and `compile()`."""

    name: str
    device: int
    function: Any  # CUfunction
    module: Any  # CUmodule, never unloaded: a graph may hold the kernel for as long as the process lives


class Module(Mapping[str, Kernel]):
    """The kernels of one source by their names: those declared `extern "C" __global__ void name(...)`."""

    def __init__(self, name: str, device: int, kernels: dict[str, Kernel]) -> None:
        self.name = name
        self.device = device
        self._kernels = kernels

    def __getitem__(self, name: str) -> Kernel:
        return self._kernels[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"<te.kernels.Module {self.name} on cuda:{self.device}: {', '.join(self._kernels)}>"


def include_dir() -> Path:
    """The folder with transfer_engine.cuh, for -I."""
    return _HERE


def source_names() -> list[str]:
    """The modules that `load()` knows."""
    return sorted(path.stem for path in _HERE.glob("*.cu"))


def load(name: str, device: Any) -> Module:
    """The kernels of one of our sources, loaded on the device: nothing is left to be loaded at the first launch.

    (Loading waits for running kernels, so a kernel that is first loaded while another one waits for it would never
    start.)

    Args:
        name: "waits", "copy", "spin_check" or "pingpong".
        device: an index, "cuda:<index>" or a torch.device.

    Raises:
        TransportUnavailable: cuda.core, NVRTC, the driver or the device is missing.
        ConfigError: the source does not compile here; the message has the compiler's log.
        ArgumentError: no such module, or no such device.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a string, not {type(name).__name__}", operation="load kernels")
    if name not in source_names():
        raise ArgumentError(
            f"no kernels named {name!r}; there are {', '.join(source_names())}", operation="load kernels"
        )
    return _module(name, (_HERE / f"{name}.cu").read_text(), device, "load kernels")


def compile(source: str, device: Any, *, name: str = "user") -> Module:  # noqa: A001 - as in kernels.compile
    """The kernels of a source of the caller's, which may include transfer_engine.cuh. Cached as our own are.

    Args:
        source: CUDA C++ 17; kernels are those declared `extern "C" __global__ void name(...)`.
        device: an index, "cuda:<index>" or a torch.device.
        name: for the compiler's messages.

    Raises:
        ConfigError: it does not compile, or has no such kernel.
        TransportUnavailable, ArgumentError: as for `load()`.
    """
    if not isinstance(source, str):
        raise ArgumentTypeError(f"source must be a string, not {type(source).__name__}", operation="compile kernels")
    return _module(name, source, device, "compile kernels")


def _module(name: str, source: str, device: Any, operation: str) -> Module:
    index = _cuda.device_index(device, operation)
    driver = _cuda.driver(operation)
    capability = [
        _cuda.attribute(driver, index, f"COMPUTE_CAPABILITY_{part}", operation) for part in ("MAJOR", "MINOR")
    ]
    with _lock:
        found = _modules.get((source, index))
        if found is None:
            binary = cubin(name, source, "sm_{}{}".format(*capability), operation)
            found = _modules[source, index] = _loaded(driver, name, source, binary, index, operation)
        return found


def cubin(name: str, source: str, architecture: str, operation: str = "compile kernels") -> builtins.bytes:
    """The source compiled for an architecture ("sm_90"), from the cache where it is there. Needs no device."""
    core, version = _compiler(operation)
    options = {"arch": architecture, "std": _STANDARD, "lineinfo": True}
    sources = [text for path in sorted(_HERE.glob("*.cu*")) for text in (path.name, path.read_bytes())]
    entry = f"{cache.key(name, source, *sources, repr(sorted(options.items())), version)}.cubin"
    binary = cache.read(entry)
    if binary is None:
        binary = _compiled(core, name, source, options, operation)
        cache.write(entry, binary)
    return binary


def _compiler(operation: str) -> tuple[Any, str]:
    """cuda.core, and NVRTC's version."""
    try:
        core = importlib.import_module("cuda.core")
        core.Program  # noqa: B018 - releases before 1.0 have it elsewhere
    except (ImportError, AttributeError) as cause:
        raise _cuda.missing("cuda.core", cause, operation) from None
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        version = _cuda.check(nvrtc, "nvrtcVersion")
    except (ImportError, RuntimeError, _cuda.CudaError) as cause:  # RuntimeError: the library was not found
        text = str(cause).strip().partition("\n")[0]
        raise TransportUnavailable(
            f"NVRTC, which compiles kernels, is missing: {text}", operation=operation, hint=_cuda.INSTALL
        ) from None
    return core, ".".join(map(str, version))


def _compiled(core: Any, name: str, source: str, options: dict[str, Any], operation: str) -> builtins.bytes:
    log = io.StringIO()
    try:
        settings = core.ProgramOptions(name=f"{name}.cu", include_path=[str(_HERE)], **options)
        return bytes(core.Program(source, "c++", settings).compile("cubin", logs=log).code)
    except Exception as cause:
        text = "\n".join(part for part in (str(cause).strip(), log.getvalue().strip()) if part)
        raise ConfigError(
            f"{name}.cu does not compile for {options['arch']}:\n{text}",
            operation=operation,
            hint="correct the source; if it is one of ours, NVRTC is too old for this device: " + _cuda.INSTALL,
        ) from cause


def _loaded(driver: Any, name: str, source: str, binary: builtins.bytes, index: int, operation: str) -> Module:
    names = _KERNEL.findall(source)
    if not names:
        raise ConfigError(
            f'{name}.cu has no kernel declared extern "C" __global__ void', operation=operation, hint="add one"
        )
    image = ctypes.create_string_buffer(binary, len(binary))
    problem = f"{name}.cu cannot be loaded on cuda:{index}"
    with (
        _cuda.failures(
            TransportUnavailable, problem, operation, "NVRTC must not be newer than the driver's major version"
        ),
        _cuda.current(driver, index, operation),
    ):
        module = _cuda.check(driver, "cuModuleLoadData", ctypes.addressof(image))
        kernels = {}
        for kernel in names:
            function = _cuda.check(driver, "cuModuleGetFunction", module, kernel.encode())
            if hasattr(driver, "cuFuncLoad"):  # CUDA 12.4; before, getting the function loads it
                _cuda.check(driver, "cuFuncLoad", function)
            kernels[kernel] = Kernel(kernel, index, function, module)
    return Module(name, index, kernels)
