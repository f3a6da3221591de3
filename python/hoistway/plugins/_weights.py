"""Common code of the plug-ins: their options, the stream of weights, the progress, the line of the report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoistway import distributed
from hoistway._checkpoint import Checkpoint
from hoistway._options import LoadOptions
from hoistway._report import Refusal, Report
from hoistway._stream import TensorStream
from hoistway._words import counted, in_words, rate_in_words
from hoistway.distributed import DistributedReport
from hoistway.errors import FormatError, OptionError

if TYPE_CHECKING:
    from logging import Logger

LOAD_FORMAT = "hoistway"
"""The value of ``--load-format``."""

# The model says which types its parameters have; a converted weight would be another model's.
LOAD_KEYS = tuple(name for name in LoadOptions.__annotations__ if name not in ("dtype", "populate"))
OWN_KEYS = ("device", "max_in_flight", "progress", "share")
SHARED_KEYS = ("strategy", "timeout")
SHARES = ("auto", "world", "tp", "none")


@dataclass(frozen=True)
class Options:
    """The options in ``--model-loader-extra-config``."""

    load: Mapping[str, Any]
    """Options of hoistway's loads."""
    device: str | None = None
    """The device of the weights; ``None``: where the host computes."""
    max_in_flight: int | str = "1GiB"
    """Most bytes that are loaded and not yet handed over."""
    progress: bool | None = None
    """Whether to show a bar; ``None``: as the host does."""
    share: str = "auto"
    """The ranks that read together; see `SHARES`."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Options of loads by many ranks."""

    @classmethod
    def parse(cls, extra: object, host_keys: Sequence[str] = ()) -> Options:
        """Options from the extra configuration; ``host_keys`` are the host's own, left to it."""
        if not isinstance(extra, Mapping):
            raise OptionError(f"model_loader_extra_config cannot be {extra!r}: it must be a dictionary")
        known = (*LOAD_KEYS, *OWN_KEYS, *SHARED_KEYS, *host_keys)
        for key in extra:
            if key not in known:
                listed = ", ".join(sorted(known))
                raise OptionError(f"model_loader_extra_config cannot have {key!r}: its keys are {listed}")
        options = cls(
            load={key: extra[key] for key in LOAD_KEYS if key in extra},
            shared={key: extra[key] for key in SHARED_KEYS if key in extra},
            **{key: extra[key] for key in OWN_KEYS if key in extra},
        )
        if options.share not in SHARES:
            raise OptionError(f"share cannot be {options.share!r}: it must be one of {', '.join(SHARES)}")
        if options.progress is not None and not isinstance(options.progress, bool):
            raise OptionError(f"progress cannot be {options.progress!r}: it must be true or false")
        return options


@dataclass(frozen=True)
class Bar:
    """How the host shows progress."""

    shown: bool
    form: str | None = None


def weights(
    files: Sequence[str],
    options: Options,
    *,
    prefix: str = "",
    device: str,
    wanted: Callable[[str], bool],
    group: Any,
    bar: Bar,
    log: Logger,
) -> Iterator[tuple[str, Any]]:
    """The weights in the files, in their order, as torch tensors; at the end a line of the log says how they came.

    Args:
        files: Safetensors files, or the URL of a folder of a store.
        options: What the user said.
        prefix: What the names begin with when they are given, and not in the files.
        device: Where to deliver them.
        wanted: Says of a name whether this rank needs the weight; others are not read.
        group: Ranks that read together, each byte once: a process group of torch's, or ``None``.
        bar: How to show progress.
        log: Where the line goes.
    """
    _check_formats(file for file in files if not is_url(file))
    files = sorted(files, key=_in_natural_order)
    chosen: set[str] = set()

    def choose(name: str) -> bool:
        if wanted(name):
            chosen.add(name)
        return name in chosen

    with _opened(files, options, device, choose, group) as loading:
        with _progress(chosen, bar, options) as step:
            for name, tensor in loading:
                yield prefix + name, tensor
                # The bound on memory holds for those who let go of each tensor before they ask for the next one.
                del tensor
                step()
        report = loading.report
    log.info("%s", describe(report, device))


def describe(report: Report | DistributedReport, device: str) -> str:
    """A report in one line."""
    reads: Report | None
    if isinstance(report, Report):
        who, reads, seconds = "hoistway", report, report.total_seconds
        how = rate_in_words(report.tensor_bytes / max(seconds, 1e-9))
    else:
        who, reads, seconds = f"hoistway, rank {report.rank} of {report.ranks}", report.reads, report.seconds
        how = f"{report.strategy}, {in_words(report.read_bytes)} read, {in_words(report.received_bytes)} received"
    moved = f"{counted(report.tensors, 'tensor')}, {in_words(report.tensor_bytes)}"
    line = f"{who}: {moved} to {device} in {seconds:.2f} s ({how})"
    if reads is not None and reads.carriers:
        line += f"; {reads.shares()}"
    refused = (*report.refused, *(reads.refused if reads is not None and reads is not report else ()))
    if refused:
        # One for each file, often.
        line += "; not used: " + "; ".join(dict.fromkeys(map(_in_words, refused)))
    return line


def _in_words(refusal: Refusal) -> str:
    return f"{refusal.what}: {refusal.reason}" + (f" ({refusal.fix})" if refusal.fix else "")


@contextmanager
def _opened(
    files: Sequence[str], options: Options, device: str, select: Callable[[str], bool], group: Any
) -> Iterator[Any]:
    """A stream of tensors with a report, of this rank's own or of the ranks of a group."""
    if group is None:
        with (
            Checkpoint(files, device=device, **options.load) as checkpoint,
            _stream(checkpoint, select, options) as stream,
        ):
            yield stream
        return
    shared: dict[str, Any] = {**options.load, **options.shared}
    with distributed.iter_tensors(
        files, device, group=group, select=select, max_in_flight=options.max_in_flight, **shared
    ) as tensors:
        _check_formats(tensors.files())
        yield tensors


def _stream(
    checkpoint: Checkpoint[Any], select: Callable[[str], bool], options: Options
) -> TensorStream[Any]:
    # What a URL stands for is known only now.
    _check_formats(checkpoint.files())
    return checkpoint.iter_tensors(select=select, order="file", max_in_flight=options.max_in_flight)


def is_url(location: str) -> bool:
    """Whether a location of weights is a URL."""
    return "://" in location


def folder_url(location: str) -> str | None:
    """The URL of a model's folder, which hosts write with a slash at its end or without; ``None`` if it is no URL."""
    if not is_url(location):
        return None
    return location if location.endswith("/") else f"{location}/"


def _check_formats(files: Iterable[str]) -> None:
    for file in files:
        if file.endswith(".gguf"):
            raise FormatError(
                f"{file} is GGUF, which the plug-in does not load: it is for safetensors; use the host's way to load "
                "GGUF (for vLLM the package vllm-gguf-plugin)",
                path=file,
            )
        if not file.endswith(".safetensors"):
            raise FormatError(
                f"{file} is not safetensors: load this checkpoint with --load-format auto, or convert it",
                path=file,
            )


def _in_natural_order(path: str) -> list[tuple[int, str]]:
    """Sorts part 10 after part 9, and alike on all ranks, whatever order their directories are listed in."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]


@contextmanager
def _progress(chosen: set[str], bar: Bar, options: Options) -> Iterator[Callable[[], object]]:
    """A bar that counts tensors; which ones are chosen is known when the first one comes."""
    if not (bar.shown if options.progress is None else options.progress):
        yield lambda: None
        return
    from tqdm.auto import tqdm  # noqa: PLC0415

    with tqdm(total=0, desc="Loading weights with hoistway", bar_format=bar.form, mininterval=1.0) as shown:

        def step() -> None:
            shown.total = len(chosen)
            shown.update()

        yield step
