"""What the tests of plug-ins share: hosts' sources, entry points as an installation has them, ranks."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import re
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import serving

ROOT = Path(__file__).parents[3]

# What hosts warn of is theirs; what hoistway warns of is not.
HOST_WARNINGS = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:::hoistway")]


def import_host(module: str) -> None:
    """Imports a module of a host's, or skips the tests of that host."""
    host = module.partition(".")[0]
    if importlib.util.find_spec(host) is None:
        pytest.skip(
            f"the sources of {host} are not on the path: run just test-hosts", allow_module_level=True
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(module)


def host_is_before(package: str, first: str) -> bool:
    """Whether the host on the path is older than a version: tests leave nothing out for a newer one."""
    found, limit = (
        [int(number) for number in re.findall(r"\d+", text)[:3]]
        for text in (importlib.metadata.version(package), first)
    )
    return found < limit


def entry_points() -> dict[str, dict[str, str]]:
    """The entry points that pyproject.toml declares."""
    groups: dict[str, dict[str, str]] = {}
    group = None
    # Python 3.10 has no parser of TOML; what is looked for is two lines a group.
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if line.startswith("["):
            found = line.startswith("[project.entry-points.")
            group = groups.setdefault(line.split('"')[1], {}) if found else None
        elif group is not None and "=" in line:
            name, _, value = line.partition("=")
            group[name.strip()] = value.strip().strip('"')
    return groups


def install(directory: Path) -> None:
    """Writes what an installation of hoistway tells importlib.metadata."""
    info = directory / "hoistway-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hoistway\nVersion: 0.0.0\n")
    lines = []
    for group, names in entry_points().items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """The messages that a logger gets."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger(name), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def in_store(directory: Path) -> Iterator[Callable[..., None]]:
    """Serves the folders of a directory as buckets that the environment leads to.

    Gives what stands for the ``pull_files`` of Run:ai's package, by which hosts fetch what is not weights.
    """

    def pull(url: str, to: str, allow: list[str] | None = None, ignore: list[str] | None = None) -> None:
        for file in (directory / url.removeprefix("s3://")).iterdir():
            named = any(file.match(pattern) for pattern in allow or ["*"])
            if file.is_file() and named and not any(file.match(pattern) for pattern in ignore or []):
                shutil.copy(file, to)

    with serving(directory) as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield pull


def shared_kib(line: str) -> tuple[float, float]:
    """What a rank's line says of the tensors' size, and of what this rank read."""
    found = re.search(r" ([\d.]+) KiB to cpu in [\d.]+ s \(share, ([\d.]+) KiB read, ", line)
    assert found is not None, line
    return float(found[1]), float(found[2])


def on_ranks(count: int, work: Callable[[int], object]) -> list:
    """What a function returns on each of several ranks. They are forks: importing a host takes long."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def rank_of(rank: int) -> None:
        try:
            results.put((rank, work(rank), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))

    ranks = [context.Process(target=rank_of, args=(rank,)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    try:
        found = sorted(results.get() for _ in ranks)
        for rank in ranks:
            rank.join(60)
    finally:
        for rank in ranks:
            rank.kill()
    for rank, _, error in found:
        assert error is None, f"rank {rank}: {error}"
    return [result for _, result, _ in found]
