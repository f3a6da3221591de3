"""`fastsafe_open`: files that are loaded when they are opened."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from hoistway import Report
from hoistway.compat.fastsafetensors._framework import TensorBase
from hoistway.compat.fastsafetensors._loader import SafeTensorsFileLoader


class fastsafe_open:  # noqa: N801  (the name that people look for)
    """Files that are loaded when they are opened, and give tensors by name.

    Args:
        filenames: One file, a list of files, or the files of each rank.
        framework: ``"pytorch"`` or ``"pt"``.
        pg: As for `SafeTensorsFileLoader`, like all others.
        device: Where tensors go.
        nogds: Whether to go by host memory.
        debug_log: Whether to log reports as information.
        max_copy_block_size: For registered copiers.
        use_fgds: An error if true.
        lenient: Whether to take files with bytes after the last tensor.
    """

    def __init__(  # noqa: PLR0917  (the parameters are the interface's)
        self,
        filenames: str | list[str] | dict[int, list[str]],
        framework: str = "pt",
        pg: Any = None,
        device: Any = "cpu",
        nogds: bool = False,
        debug_log: bool = False,
        max_copy_block_size: int = 16 << 30,
        use_fgds: bool = False,
        *,
        lenient: bool | None = None,
    ) -> None:
        options: dict[str, Any] = {} if lenient is None else {"lenient": lenient}
        self.loader = SafeTensorsFileLoader(
            pg,
            device,
            nogds=nogds,
            debug_log=debug_log,
            framework=framework,
            use_fgds=use_fgds,
            **options,
        )
        by_rank = filenames if isinstance(filenames, dict) else {0: _listed(filenames)}
        self.loader.add_filenames(by_rank)
        self.fb = self.loader.copy_files_to_device(max_copy_block_size=max_copy_block_size)

    @property
    def report(self) -> Report | None:
        """The report of the load; `None` if this rank had no files."""
        return self.fb.report

    def metadata(self) -> dict[str, dict[str, str]]:
        """The metadata of each file, by its path."""
        return {path: metadata.metadata for path, (metadata, _) in self.loader.meta.items()}

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self.fb.key_to_rank_lidx)

    get_keys = keys

    def get_tensor(self, name: str) -> Any:
        """A tensor, which stays valid as long as someone holds it."""
        return self.fb.get_tensor(name)

    def get_tensor_wrapped(self, name: str) -> TensorBase:
        """As `get_tensor`, with its type and device."""
        return self.fb.get_tensor_wrapped(name)

    def __enter__(self) -> fastsafe_open:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.fb.close()
        self.loader.close()


def _listed(filenames: str | list[str]) -> list[str]:
    return [filenames] if isinstance(filenames, str) else filenames
