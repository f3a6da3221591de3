"""`ParallelLoader`: one tensor after the other, while the next ones are being loaded."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeVar

from hoistway import Checkpoint, Report, _native, distributed
from hoistway.compat.fastsafetensors._budget import bytes_in_flight
from hoistway.compat.fastsafetensors._config import LoaderConfig, check_producers, load_config
from hoistway.compat.fastsafetensors._dtypes import DType
from hoistway.compat.fastsafetensors._ignored import warn_without_effect
from hoistway.compat.fastsafetensors._loader import SafeTensorsFileLoader
from hoistway.distributed._agreement import confer
from hoistway.distributed._link import Link
from hoistway.distributed._load import SECONDS
from hoistway.errors import FormatError, OptionError

Predicate = Callable[[str], bool]
_T = TypeVar("_T")
_USUAL = {"overlap_io": True, "broadcast_run_bytes": 16 << 20, "broadcast_run_tensors": 64}


class ParallelLoader:
    """Gives all tensors of files to every rank, in the order of the files, with a bound on what is loaded ahead.

    Tensors stay valid as long as someone holds them; nothing is copied once it is loaded.

    Args:
        pg: The ranks that load together: a process group of torch's, or `None` for one rank alone.
        hf_weights_files: The files.
        max_concurrent_producers: 1.
        queue_size: Batches that wait for the consumer; -1 for one batch in all.
        use_tqdm_on_load: Whether to show progress, if tqdm is installed.
        device: Where tensors go.
        bbuf_size_kb: Has no effect, of which a warning tells.
        max_threads: Most threads that read, if fewer than usual.
        nogds: As for `SafeTensorsFileLoader`.
        set_numa: Has no effect, of which a warning tells.
        debug_log: Whether to log reports of loads as information.
        framework: ``"pytorch"``, or ``"paddle"`` for a single rank.
        tensor_filter: Loads only tensors for whose names this is true. For one rank, or ``all_local``.
        all_local: Whether each rank loads for itself alone.
        max_batch_bytes: Bytes of a batch; 512 MiB if it is not given.
        use_chunk_budget_as_allocation_size: Has no effect but that there must be a budget.
        device_memory_budget: Bytes that tensors which stay and those on their way may have together.
        accumulate_resident: Whether the consumer keeps tensors where they were loaded.
        resident_tensor: Which ones it keeps, if not all.
        use_fgds: An error if true.
        broadcast_run_bytes: Has no effect, of which a warning tells.
        broadcast_run_tensors: Has no effect, of which a warning tells.
        overlap_io: Has no effect, of which a warning tells: loading always goes on while tensors are consumed.
        borrowed_tensors: Has no effect but that nothing may be kept: tensors stay valid anyway.
        timeout: Seconds that a rank waits for the others, where there are several.
        options: As for `SafeTensorsFileLoader`.

    Where several ranks load together, each calls this. If the files fail on one of them, all get the error.
    """

    def __init__(  # noqa: PLR0917  (the parameters are the interface's)
        self,
        pg: Any,
        hf_weights_files: Sequence[str],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        device: Any = "cpu",
        bbuf_size_kb: int = 16 * 1024,
        max_threads: int = 16,
        nogds: bool = False,
        set_numa: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        tensor_filter: Predicate | None = None,
        all_local: bool = False,
        max_batch_bytes: int | None = None,
        use_chunk_budget_as_allocation_size: bool = False,
        device_memory_budget: int | None = None,
        accumulate_resident: bool = True,
        resident_tensor: Predicate | None = None,
        use_fgds: bool = False,
        broadcast_run_bytes: int = 16 << 20,
        broadcast_run_tensors: int = 64,
        overlap_io: bool = True,
        borrowed_tensors: bool = False,
        *,
        timeout: float = SECONDS,
        **options: Any,
    ) -> None:
        check_producers(max_concurrent_producers)
        self.loader = SafeTensorsFileLoader(
            None if all_local else pg,
            device,
            bbuf_size_kb=bbuf_size_kb,
            set_numa=set_numa,
            max_threads=max_threads,
            nogds=nogds,
            debug_log=debug_log,
            framework=framework,
            use_fgds=use_fgds,
            **options,
        )
        for name, is_asked in (
            ("tensor_filter", tensor_filter is not None),
            ("borrowed_tensors", borrowed_tensors),
        ):
            if is_asked and self.loader.pg.size() > 1:
                raise OptionError(f"{name} is for one rank alone, or for all_local=True")
        if use_chunk_budget_as_allocation_size and max_batch_bytes is None and device_memory_budget is None:
            raise OptionError(
                "use_chunk_budget_as_allocation_size needs max_batch_bytes or device_memory_budget"
            )
        if resident_tensor is not None and not accumulate_resident:
            raise OptionError("resident_tensor needs accumulate_resident=True: without it no tensor stays")
        if borrowed_tensors and accumulate_resident:
            raise OptionError(
                "borrowed_tensors needs accumulate_resident=False: what is borrowed is not kept"
            )
        if min(broadcast_run_bytes, broadcast_run_tensors) < 0:
            raise OptionError("broadcast_run_bytes and broadcast_run_tensors cannot be negative")
        warn_without_effect(
            {
                "overlap_io": overlap_io,
                "broadcast_run_bytes": broadcast_run_bytes,
                "broadcast_run_tensors": broadcast_run_tensors,
            },
            _USUAL,
        )
        if not timeout > 0:
            raise OptionError(f"timeout cannot be {timeout!r}: it must be a number of seconds")
        self.hf_weights_files = [os.fspath(path) for path in hf_weights_files]
        self._group = None if all_local else pg
        self._keep = tensor_filter
        self._shows_progress = use_tqdm_on_load and self.loader.pg.rank() == 0
        self._report: Any = None
        self.loader.set_tensor_filter(tensor_filter)
        self._timeout = timeout
        self._checkpoints, self._names, self._in_flight = self._agreed(
            lambda: self._opened(
                queue_size=queue_size,
                max_batch_bytes=max_batch_bytes,
                device_memory_budget=device_memory_budget,
                stays=lambda name: accumulate_resident and (resident_tensor is None or resident_tensor(name)),
            )
        )

    @property
    def report(self) -> Any:
        """The report of the last iteration, as far as it went; `None` before the first.

        A report of hoistway's, or one of `hoistway.distributed` where there are several ranks.
        """
        return self._report

    def iterate_weights(self) -> Generator[tuple[str, Any], None, None]:
        """Gives ``(name, tensor)``, in the same order on every rank. Closing it early ends the load."""
        tensors = self._by_copier() if self.loader.has_own_copier else self._stream()
        with closing(tensors), _bar(len(self._names), self._shows_progress) as advance:
            for name, tensor in tensors:
                advance()
                yield name, tensor
                # The consumer decides how long it lives.
                del tensor

    def close(self) -> None:
        """Closes the files. Tensors that were given stay valid."""
        for checkpoint in self._checkpoints:
            checkpoint.close()
        self.loader.close()

    def _opened(self, **bounds: Any) -> tuple[list[Checkpoint], list[str], int]:
        """The files, the names of what is wanted of them, and the bytes to have on their way."""
        checkpoints = self._opened_files()
        names: list[str] = []
        sizes: dict[str, int] = {}
        for checkpoint in checkpoints:
            for name in filter(self._keep, checkpoint.keys()) if self._keep else checkpoint.keys():
                names.append(name)
                sizes[name] = max(sizes.get(name, 0), _size(checkpoint, name))
        return checkpoints, names, bytes_in_flight(sizes, **bounds)

    def _opened_files(self) -> list[Checkpoint]:
        """All files as one checkpoint, or each as one of its own, where several have a tensor of one name."""
        try:
            return [self.loader.open(self.hf_weights_files)]
        except FormatError as error:
            if self.loader.pg.size() > 1 or len(self.hf_weights_files) < 2:
                raise
            apart = [self.loader.open([path]) for path in self.hf_weights_files]
            counts: Counter[str] = Counter()
            for checkpoint in apart:
                counts.update(checkpoint.keys())
            if max(counts.values(), default=1) == 1:
                raise error
            return apart

    def _agreed(self, prepare: Callable[[], _T]) -> _T:
        """What is prepared; fails on all ranks if that fails on one: the others would wait for it."""
        if self.loader.pg.size() == 1:
            return prepare()
        link = Link(self._group, self.loader.device.as_str(), self._timeout)
        try:
            prepared = prepare()
        except BaseException as error:
            confer(link, None, error)
            raise
        confer(link, None)
        return prepared

    def _stream(self) -> Generator[tuple[str, Any], None, None]:
        if self.loader.pg.size() > 1:
            with closing(self._of_all_ranks()) as stream:
                try:
                    yield from stream
                finally:
                    self._report = stream.report
            return
        before: _native.Report | None = None
        for checkpoint in self._checkpoints:
            with checkpoint.iter_tensors(
                select=self._keep, order="file", max_in_flight=self._in_flight
            ) as stream:
                try:
                    yield from stream
                finally:
                    so_far = stream.native_report()
                    before = so_far if before is None else before.merged(so_far)
                    self._report = Report._from_native(before)

    def _of_all_ranks(self) -> Any:
        return distributed.iter_tensors(
            self.hf_weights_files,
            group=self._group,
            device=self.loader.device.as_own(),
            max_in_flight=self._in_flight,
            timeout=self._timeout,
            **self.loader.options,
        )

    def _by_copier(self) -> Generator[tuple[str, Any], None, None]:
        ranks = self.loader.pg.size()
        for first in range(0, len(self.hf_weights_files), ranks):
            batch = self.hf_weights_files[first : first + ranks]
            self.loader.reset()
            self.loader.add_filenames({rank: [path] for rank, path in enumerate(batch)})
            buffer = self.loader.copy_files_to_device()
            for name in buffer.key_to_rank_lidx:
                yield name, buffer.get_tensor(name)
            buffer.close()


class AutoLoader:
    """A `ParallelLoader` with the settings of `load_config`.

    Args:
        pg: The ranks that load together.
        hf_weights_files: The files.
        device: Where tensors go.
    """

    def __init__(self, pg: Any, hf_weights_files: Sequence[str], device: Any = "cpu") -> None:
        self._config = load_config()
        self._loader = ParallelLoader(
            pg,
            hf_weights_files,
            device=device,
            framework=self._config.framework,
            debug_log=self._config.debug_log,
            set_numa=self._config.set_numa,
            **_arguments(self._config),
            **self._config.create_parallel_kwargs(),
        )

    @property
    def config(self) -> LoaderConfig:
        """The settings."""
        return self._config

    @property
    def report(self) -> Any:
        """The report of the last iteration; see `ParallelLoader.report`."""
        return self._loader.report

    def iterate_weights(self) -> Generator[tuple[str, Any], None, None]:
        """Gives ``(name, tensor)``, in the same order on every rank."""
        return self._loader.iterate_weights()

    def close(self) -> None:
        """Closes the files. Tensors that were given stay valid."""
        self._loader.close()


def _arguments(config: LoaderConfig) -> dict[str, Any]:
    """The section of the chosen loader, as arguments of `ParallelLoader`."""
    if config.loader not in ("base", "3fs"):
        raise OptionError(f"loader cannot be {config.loader!r}: it must be base or 3fs")
    section = config.get_extension_config(config.loader)
    if config.loader == "3fs" and section.setdefault("copier_type", "3fs") != "3fs":
        raise OptionError(f"copier_type cannot be {section['copier_type']!r} for loader 3fs: it must be 3fs")
    return SafeTensorsFileLoader.process_extension_config(section)


def _size(checkpoint: Checkpoint, name: str) -> int:
    return math.prod(checkpoint.get_shape(name)) * DType(checkpoint.get_dtype(name)).bits // 8


@contextmanager
def _bar(total: int, is_shown: bool) -> Iterator[Callable[[], object]]:
    tqdm = _tqdm() if is_shown else None
    if tqdm is None:
        yield lambda: None
        return
    with tqdm(total=total, desc="Loading safetensors", unit="tensor") as bar:
        yield bar.update


def _tqdm() -> Callable[..., Any] | None:
    try:
        from tqdm.auto import tqdm  # noqa: PLC0415
    except ImportError:
        return None
    return tqdm
