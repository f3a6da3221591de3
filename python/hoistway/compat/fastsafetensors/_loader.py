"""`SafeTensorsFileLoader`: files are shared out to ranks, and each loads its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hoistway import Checkpoint, Report
from hoistway._frameworks import Framework
from hoistway.compat.fastsafetensors import _copiers
from hoistway.compat.fastsafetensors._devices import Device
from hoistway.compat.fastsafetensors._dtypes import DType
from hoistway.compat.fastsafetensors._errors import UnknownTensorError
from hoistway.compat.fastsafetensors._files_buffer import FilesBufferOnDevice, LoadedFile
from hoistway.compat.fastsafetensors._framework import TensorBase, framework_of
from hoistway.compat.fastsafetensors._groups import Group
from hoistway.compat.fastsafetensors._ignored import warn_without_effect
from hoistway.compat.fastsafetensors._metadata import SafeTensorsMetadata, TensorFrame
from hoistway.errors import FileChangedError, OptionError, UnsupportedDtypeError

_logger = logging.getLogger(__name__)
# Without a word about threads, hoistway chooses: the usual limit is none.
_USUAL_THREADS = 16
_USUAL = {"bbuf_size_kb": 16 * 1024, "set_numa": True}

Keep = Callable[[str], bool]


class SafeTensorsFileLoader:
    """Loads safetensors files to a device, each on the rank that it is assigned to.

    Args:
        pg: The ranks that load together: a process group of torch's, or `None` for one rank alone.
        device: Where tensors go: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        bbuf_size_kb: Has no effect, of which a warning tells: ``in_flight=`` bounds the memory that copies go through.
        max_threads: Most threads that read, if fewer than usual.
        nogds: Whether to go by host memory. If not, a CUDA device gets its tensors by GPUDirect Storage or not at all.
        set_numa: Has no effect, of which a warning tells: ``numa=`` is what hoistway goes by.
        disable_cache: Whether to let go of what was exchanged between ranks, or to keep it for later calls.
        debug_log: Whether to log reports of loads as information, not only for debugging.
        framework: ``"pytorch"``, or ``"paddle"`` for a single rank.
        use_fgds: No other way than cuFile is known: an error if true, and nogds is not.
        copier_type: The copier by name, in place of ``nogds``, which it may not contradict: ``"gds"``, ``"nogds"``,
            ``"unified"``, ``"3fs"``, ``"dstorage"`` on Windows, or a registered one.
        options: With copier ``"3fs"`` those of its section: ``mount_point``, which all files must be on,
            ``buffer_size``, which is ``in_flight=``, ``entries`` and ``io_depth``, which have no effect. Options of
            hoistway's loads; see `hoistway.LoadOptions`. Also ``allocator`` and ``lenient``.
    """

    @classmethod
    def process_extension_config(cls, ext_config: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Arguments of this class from a section of a configuration: those of the same names."""
        del kwargs
        if ext_config.get("copier_type") == "nogds" and not ext_config.get("nogds", True):
            raise OptionError("nogds: false contradicts copier_type: nogds; give one of them")
        return dict(ext_config)

    def __init__(  # noqa: PLR0917  (the parameters are the interface's)
        self,
        pg: Any,
        device: Any = "cpu",
        bbuf_size_kb: int = 16 * 1024,
        max_threads: int = _USUAL_THREADS,
        nogds: bool = False,
        set_numa: bool = True,
        disable_cache: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        use_fgds: bool = False,
        *,
        copier_type: str | None = None,
        **options: Any,
    ) -> None:
        warn_without_effect({"bbuf_size_kb": bbuf_size_kb, "set_numa": set_numa}, _USUAL)
        self.framework = framework_of(framework)
        is_torch = self.framework.get_name() == "pytorch"
        if not is_torch and pg is not None and pg.size() != 1:
            raise OptionError(f"framework {framework!r} is for a single rank, and there are {pg.size()}")
        self.pg = Group(pg)
        self.device = Device.of(device)
        self.meta: dict[str, tuple[SafeTensorsMetadata, int]] = {}
        self.frames: dict[str, TensorFrame] = {}
        self.disable_cache = disable_cache
        self._keep: Keep | None = None
        self._report: Report | None = None
        for name, is_asked, fitting in (
            ("nogds", nogds, ("nogds", "unified")),
            ("use_fgds", use_fgds, ("fgds",)),
        ):
            if is_asked and copier_type is not None and copier_type not in fitting:
                raise OptionError(f"{name}=True contradicts copier_type={copier_type!r}; give one of them")
        copier = copier_type or ("nogds" if nogds else "fgds" if use_fgds else "gds")
        self._construct = _copiers.registered(copier, self.device, options)
        self.options: dict[str, Any] = {}
        """The options of hoistway's loads that follow from all arguments."""
        self._mount_point: str | None = None
        if self._construct is None:
            if copier == "3fs":
                self._mount_point, options = _copiers.options_of_3fs(options)
            if not is_torch:
                # Memory of torch's allocator is of use to torch alone.
                options.setdefault("allocator", "driver")
            threads = max_threads if max_threads < _USUAL_THREADS else None
            self.options = _copiers.load_options(copier, self.device, threads, options)
        is_loud = debug_log or os.environ.get("FASTSAFETENSORS_DEBUG", "").lower() == "true"
        self._log_level = logging.INFO if is_loud else logging.DEBUG

    @property
    def report(self) -> Report | None:
        """The report of the last load; `None` before it, without files on this rank, and after a registered copier."""
        return self._report

    @property
    def has_own_copier(self) -> bool:
        """Whether a registered copier loads, not hoistway."""
        return self._construct is not None

    def open(self, paths: Sequence[str], **options: Any) -> Checkpoint:
        """Opens files for loads as this loader has them, with further options."""
        for path in paths if self._mount_point else ():
            # Mounts are found by the files, so a mount is right or wrong, and never followed.
            if not Path(path).resolve().is_relative_to(Path(str(self._mount_point)).resolve()):
                raise OptionError(
                    f"mount_point cannot be {self._mount_point!r}: {path} is not on it", path=path
                )
        framework: Framework = "paddle" if self.framework.get_name() == "paddle" else "torch"
        return Checkpoint(
            paths, device=self.device.as_own(), framework=framework, **{**self.options, **options}
        )

    def add_filenames(self, filenames: Mapping[int, Sequence[str]]) -> None:
        """Assigns files to ranks. Every rank reads the headers of all."""
        # One of each rank's at a time: in this order tensors are named.
        for paths in zip_longest(*filenames.values()):
            for rank, path in zip(filenames, paths, strict=True):
                if path is not None:
                    self._add(os.fspath(path), rank)

    def set_tensor_filter(self, keep_tensor: Keep | None) -> None:
        """Loads only tensors for whose names this is true; their bytes alone are read."""
        self._keep = keep_tensor

    def get_keys(self) -> list[str]:
        """Names of the tensors in all files, without those that are filtered out."""
        return [name for name in self.frames if self._is_kept(name)]

    def get_shape(self, tensor_name: str) -> list[int]:
        """Shape of a tensor."""
        if tensor_name not in self.frames or not self._is_kept(tensor_name):
            raise UnknownTensorError(f"there is no tensor {tensor_name!r} in the files", tensor=tensor_name)
        return self.frames[tensor_name].shape

    def copy_files_to_device(
        self,
        dtype: DType = DType.AUTO,
        use_buf_register: bool = True,
        max_copy_block_size: int = 16 << 30,
        allow_inflight: bool = False,
        borrowed_tensors: bool = False,
    ) -> FilesBufferOnDevice:
        """Loads this rank's files.

        Args:
            dtype: Converts all tensors, which must not have narrower types.
            use_buf_register: For registered copiers.
            max_copy_block_size: For registered copiers.
            allow_inflight: Has no effect: when this returns, everything is loaded.
            borrowed_tensors: Has no effect but that there must be one rank: tensors stay valid anyway.
        """
        del allow_inflight
        if borrowed_tensors and self.pg.size() != 1:
            raise ValueError(f"borrowed_tensors is for a single rank, and there are {self.pg.size()}")
        self._check_conversion(dtype)
        own = {
            path: metadata for path, (metadata, rank) in sorted(self.meta.items()) if rank == self.pg.rank()
        }
        if self._construct is None:
            tensors = self._load(own, dtype)
        else:
            tensors = {}
            for metadata in own.values():
                tensors |= _copiers.copy_with(
                    self._construct,
                    metadata,
                    self.device,
                    self._is_kept,
                    framework=self.framework,
                    dtype=dtype,
                    use_buf_register=use_buf_register,
                    max_copy_block_size=max_copy_block_size,
                )
        files: dict[int, list[LoadedFile]] = {rank: [] for rank in range(self.pg.size())}
        for path, (metadata, rank) in sorted(self.meta.items()):
            loaded = metadata if dtype is DType.AUTO else metadata.converted(dtype, self._is_kept)
            mine = {name: tensors[name] for name in loaded.tensors if name in tensors} if path in own else {}
            files.setdefault(rank, []).append(LoadedFile(loaded, self.device, mine))
        return FilesBufferOnDevice(
            files,
            self.pg,
            self.framework,
            keep_tensor=self._keep,
            borrowed_tensors=borrowed_tensors,
            cache=not self.disable_cache,
            report=self._report,
        )

    # The name that the README of fastsafetensors has.
    copy_file_to_device = copy_files_to_device

    def reset(self) -> None:
        """Forgets all files."""
        self.frames = {}
        self.meta = {}

    def close(self) -> None:
        """Forgets all files. Loaded tensors stay valid: their buffer and their references own them."""
        self.reset()

    def init_numa(self, set_numa: bool = True) -> None:
        """Has no effect: ``numa=`` is what hoistway goes by."""
        warn_without_effect({"set_numa": set_numa}, {"set_numa": None})

    def _add(self, path: str, rank: int) -> None:
        # The engine is the judge of files; what it finds good, the header is then read of.
        with self.open([path]):
            metadata = SafeTensorsMetadata.from_file(
                path, self.framework, lenient=self.options.get("lenient")
            )
        self.meta[path] = metadata, rank
        self.frames.update(metadata.tensors)

    def _is_kept(self, name: str) -> bool:
        return self._keep is None or bool(self._keep(name))

    def _check_conversion(self, dtype: DType) -> None:
        if dtype is DType.AUTO:
            return
        for name, frame in self.frames.items():
            packed = DType.F4 in (dtype, frame.dtype) and dtype is not frame.dtype
            if self._is_kept(name) and (dtype.bits > frame.dtype.bits or packed):
                raise UnsupportedDtypeError(
                    f"tensor {name!r} is of type {frame.dtype.value} and cannot be converted to {dtype.value} as it is "
                    "loaded: only to types as wide or narrower, and not those that are packed",
                    tensor=name,
                )

    def _load(self, own: Mapping[str, SafeTensorsMetadata], dtype: DType) -> dict[str, TensorBase]:
        self._report = None
        wanted = [
            (name, frame, metadata.src)
            for metadata in own.values()
            for name, frame in metadata.tensors.items()
            if self._is_kept(name)
        ]
        if not wanted:
            return {}
        for name, frame, _ in wanted:
            self._check_type(name, frame.dtype)
        with self.open(list(own)) as checkpoint:
            # What is converted is to go at once. A mapping has no such memory.
            is_freed = dtype is not DType.AUTO and not checkpoint._is_mapped(self.options)
            is_open = not self.options.get("layout")
            loaded = checkpoint.load(select=self._keep, layout="tensor" if is_freed and is_open else None)
        self._report = loaded.report
        _logger.log(self._log_level, "%s", self._report)
        tensors: dict[str, TensorBase] = {}
        for name, frame, path in wanted:
            raw = loaded.pop(name, None)
            # Other ranks, and callers that asked for shapes, rely on the headers as they were read first.
            if raw is None or not self._is_as(raw, frame):
                raise FileChangedError(
                    f"{path}: tensor {name!r} is not what it was when the file was added",
                    path=path,
                    tensor=name,
                )
            tensors[name] = self.framework.wrap_loaded(raw, frame.dtype, self.device).to(dtype=dtype)
        return tensors

    def _is_as(self, raw: Any, frame: TensorFrame) -> bool:
        dtype, shape = (
            self.framework.native_dtype(frame.dtype),
            self.framework.native_shape(frame.dtype, frame.shape),
        )
        return raw.dtype == dtype and list(raw.shape) == shape

    def _check_type(self, name: str, dtype: DType) -> None:
        """Fails before anything is read, if the framework has no such type."""
        try:
            self.framework.native_dtype(dtype)
        except UnsupportedDtypeError as error:
            raise UnsupportedDtypeError(
                f"tensor {name!r}: {error}; leave it out by a filter", tensor=name
            ) from None
