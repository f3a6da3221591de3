"""Buffers of memory: what copiers in Python use of `fastsafetensors.cpp`, which is a library in C++."""

from __future__ import annotations

import ctypes

from hoistway.compat.fastsafetensors._absent import absent


class gds_device_buffer:  # noqa: N801  (the name that copiers use)
    """A range of memory, of which nothing is owned.

    Args:
        dev_ptr_base: Its address.
        length: Its bytes.
        use_cuda: Whether it is memory of a CUDA device.
    """

    def __init__(self, dev_ptr_base: int, length: int, use_cuda: bool) -> None:
        self._address = dev_ptr_base
        self._length = length
        self.use_cuda = use_cuda

    def get_base_address(self) -> int:
        """Its address."""
        return self._address

    def get_length(self) -> int:
        """Its bytes."""
        return self._length


def read_buffer(dst: int, length: int) -> bytes:
    """Returns a copy of ``length`` bytes of host memory at an address."""
    return ctypes.string_at(dst, length)


_READERS = "hoistway reads by itself; use SafeTensorsFileLoader, or hoistway.compat.threefs for a 3FS"
_DSTORAGE = (
    "on Windows, SafeTensorsFileLoader reads by DirectStorage, and no other way, with copier_type='dstorage'"
)
_MEMORY = "memory comes from the framework or from hoistway"
_MACHINE = "hoistway finds libraries and devices by itself; hoistway.doctor() tells what there is"

__getattr__ = absent(
    "fastsafetensors.cpp",
    {
        **dict.fromkeys(
            [
                "dma_completion",
                "dma_load_runs",
                "dma_load_runs_progress",
                "fgds_device_buffer",
                "fgds_file_handle",
                "fgds_file_reader",
                "gds_file_handle",
                "gds_file_reader",
                "nogds_file_reader",
            ],
            _READERS,
        ),
        **dict.fromkeys(
            ["dstorage_file_handle", "dstorage_file_reader", "dstorage_stream_reader", "init_dstorage"],
            _DSTORAGE,
        ),
        **dict.fromkeys(
            [
                "cpu_free",
                "cpu_malloc",
                "fgds_deregmem",
                "fgds_regmem",
                "gpu_free",
                "gpu_malloc",
                "memcpy_h2d_async",
            ],
            _MEMORY,
        ),
        **dict.fromkeys(
            [
                "close_fgds",
                "close_gds",
                "cpp_metrics",
                "cufile_version",
                "gds_device_cache_size",
                "get_alignment_size",
                "get_cpp_metrics",
                "get_device_pci_bus",
                "get_gil_release",
                "init_fgds",
                "init_gds",
                "is_cuda_found",
                "is_cufile_found",
                "is_fgds_found",
                "is_gds_supported",
                "is_hip_found",
                "is_hipfile_memory_budget_supported",
                "load_fgds_library",
                "load_library_functions",
                "set_debug_log",
                "set_gil_release",
                "set_numa_node",
            ],
            _MACHINE,
        ),
    },
)

__all__ = ["gds_device_buffer", "read_buffer"]
