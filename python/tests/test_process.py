"""A load and the process around it: threads, signals, forks, imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hoistway
import numpy as np
import pytest
from conftest import assert_threads_end, make_cold, run, thread_count, write_model
from interrupting import open_links, threads_of, wait_until
from python_server import Server


def test_importing_hoistway_imports_no_framework() -> None:
    done = run(
        """
        import sys, hoistway
        assert hoistway.__version__
        loaded = {"torch", "numpy", "jax", "ml_dtypes", "tqdm"} & set(sys.modules)
        assert not loaded, loaded
        """
    )
    assert done.returncode == 0, done.stderr


def test_without_torch_the_error_says_what_to_do(model: Path) -> None:
    done = run(
        """
        import sys, hoistway
        sys.modules["torch"] = None
        try:
            hoistway.load_file(sys.argv[1])
        except ImportError as error:
            assert "framework='numpy'" in str(error)
            assert error.__suppress_context__, "one error is one traceback"
        else:
            raise SystemExit("no error")
        print(hoistway.load_file(sys.argv[1], framework="numpy")["embed"].shape)
        """,
        model,
    )
    assert done.returncode == 0, done.stderr
    assert "(1000, 64)" in done.stdout


def test_a_torch_that_fails_as_it_is_imported_says_why(model: Path, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("from torch import lost\n")
    done = run(
        """
        import sys, traceback, hoistway
        sys.path.insert(0, sys.argv[2])
        try:
            hoistway.load_file(sys.argv[1])
        except hoistway.errors.MissingPackageError as error:
            assert "lost" in "".join(traceback.format_exception(error)), error
        else:
            raise SystemExit("no error")
        """,
        model,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_other_threads_run_during_a_load(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [3 << 20])})
    # What the load reads comes from threads of this process.
    server = Server(path.read_bytes())
    loaded = hoistway.load_file(f"http://127.0.0.1:{server.port}/m.safetensors", framework="numpy")
    server.close()
    assert loaded["a"].nbytes == 3 << 20


# Reads so short and so few at a time that a load takes much longer than the test waits.
SLOW = 'framework="raw", route="threads", direct="always", chunk="4KiB", threads=1'


def reads(process: int, _: Path) -> bool:
    """Whether a load of a process reads."""
    return any(name.startswith("hoistway") for name in threads_of(process))


def has_open(process: int, path: Path) -> bool:
    """Whether a process has a file open."""
    return str(path) in open_links(process)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model whose load takes long, which is written once."""
    path = tmp_path_factory.mktemp("large") / "m.safetensors"
    yield write_model(path, {f"t{i}": ("U8", [1 << 20]) for i in range(512)})
    path.unlink()


@pytest.mark.parametrize(
    ("work", "has_begun"),
    [
        (f"hoistway.load_file(path, {SLOW})", reads),
        (f"hoistway.load_file(path, {SLOW}, progress=lambda done, total: None)", reads),
        (f"list(hoistway.open(path, {SLOW}))", reads),
        ("while True: hoistway.open(path).manifest()", has_open),
        ("while True: hoistway.open(path).warm()", has_open),
    ],
)
def test_ctrl_c_ends_what_is_under_way(
    large: Path, work: str, has_begun: Callable[[int, Path], bool]
) -> None:
    make_cold(large)
    script = f"""
        import os, signal, sys, time, hoistway
        # A shell that runs the tests in the background makes them ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        path = sys.argv[1]
        hoistway.open(path)  # Imports torch, which is deaf meanwhile.
        threads = len(os.listdir("/proc/self/task"))
        try:
            print("started", flush=True)
            {work}
        except KeyboardInterrupt:
            print("interrupted")
        # A thread that was joined may be listed for a moment more.
        for _ in range(3000):
            if len(os.listdir("/proc/self/task")) <= threads:
                break
            time.sleep(0.01)
        else:
            raise SystemExit("threads of the load are left")
        print(len(hoistway.load_file(path, framework="raw", select="t1")))
        """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), large],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "started\n"
    wait_until(lambda: has_begun(child.pid, large))
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    assert output.split() == ["interrupted", "1"]


def test_a_child_of_fork_loads_by_itself(model: Path) -> None:
    done = run(
        """
        import os, sys, hoistway
        checkpoint = hoistway.open(sys.argv[1], framework="numpy")
        expected = checkpoint.get_tensor("embed").tobytes()
        child = os.fork()
        if child == 0:
            assert checkpoint.get_tensor("embed").tobytes() == expected
            assert hoistway.load_file(sys.argv[1], framework="numpy")["embed"].tobytes() == expected
            sys.exit(7)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        model,
    )
    assert done.returncode == 7, done.stderr


def test_no_load_waits_for_a_framework_that_another_imports(model: Path) -> None:
    done = run(
        """
        import importlib.util, os, signal, sys, threading, hoistway

        begun, go_on = threading.Event(), threading.Event()

        class Slow:
            def find_spec(self, name, path, target=None):
                return importlib.util.spec_from_loader(name, self) if name == "numpy" else None

            def create_module(self, spec):
                return None

            def exec_module(self, module):
                begun.set()
                go_on.wait()
                raise ImportError

        def load(framework):
            hoistway.load_file(sys.argv[1], framework=framework)

        sys.meta_path.insert(0, Slow())
        slow = threading.Thread(target=load, args=["numpy"], daemon=True)
        slow.start()
        assert begun.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            load("raw")
            os._exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status)
        """,
        model,
    )
    assert done.returncode == 7, (done.returncode, done.stderr)


def test_a_child_of_fork_waits_for_no_report_of_its_parent(model: Path) -> None:
    done = run(
        """
        import os, signal, sys, threading, hoistway
        from hoistway import _checkpoint

        begun, end = threading.Event(), threading.Event()

        def note():
            with _checkpoint._noting:
                begun.set()
                end.wait()

        thread = threading.Thread(target=note)
        checkpoint = hoistway.open(sys.argv[1], framework="raw")
        thread.start()
        assert begun.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            checkpoint.load()
            os._exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        end.set()
        thread.join()
        os._exit(status)
        """,
        model,
    )
    assert done.returncode == 7, (done.returncode, done.stderr)


def test_a_child_of_fork_waits_for_no_thread_that_loads_from_its_file(model: Path) -> None:
    done = run(
        """
        import os, signal, sys, threading
        from hoistway.compat import safetensors
        from hoistway.compat.safetensors import _reports

        with safetensors.safe_open(sys.argv[1], "numpy") as file:
            first, *others = file.keys()
            file.get_tensor(first)
            begun, end = threading.Event(), threading.Event()

            # The sum so far, to which a thread adds for long.
            class Report:
                def merged(self, report):
                    begun.set()
                    end.wait()
                    return report

            (account,) = _reports._recent
            account._native = Report()
            thread = threading.Thread(target=account.add, args=(None,))
            thread.start()
            assert begun.wait(60)
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                account._native = None
                for name in others:
                    file.get_tensor(name)
                os._exit(7)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            end.set()
            thread.join()
        os._exit(status)
        """,
        model,
    )
    assert done.returncode == 7, (done.returncode, done.stderr)


def test_a_load_under_way_is_refused_to_a_child_of_fork(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{i}": ("U8", [1 << 20]) for i in range(16)})
    done = run(
        """
        import os, sys, hoistway
        iterator = iter(hoistway.open(sys.argv[1], framework="raw"))
        next(iterator)
        child = os.fork()
        if child == 0:
            try:
                list(iterator)
            except hoistway.errors.ForkedError:
                sys.exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert len(list(iterator)) == 15
        sys.exit(status)
        """,
        path,
    )
    assert done.returncode == 7, done.stderr


def test_many_threads_load_at_once(model: Path) -> None:
    expected = np.asarray(hoistway.load_file(model, framework="raw")["embed"]).tobytes()
    failures = []

    def load() -> None:
        for _ in range(20):
            if np.asarray(hoistway.load_file(model, framework="raw")["embed"]).tobytes() != expected:
                failures.append("other bytes")

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_loads_leave_nothing_behind(model: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    hoistway.load_file(model, framework="raw")
    before = descriptors(), thread_count()
    for _ in range(50):
        hoistway.load_file(model, framework="raw")
        for _ in hoistway.open(model, framework="raw"):
            break
        with pytest.raises(hoistway.HoistwayError):
            hoistway.load_file(model, framework="raw", select="missing")
    # Of tests before this one some may be closed meanwhile.
    assert descriptors() <= before[0]
    assert_threads_end(before[1])


def test_a_signal_with_a_handler_does_not_disturb(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [128 << 20])})
    make_cold(path)
    seen = []
    previous = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        tensors = hoistway.load_file(path, framework="numpy")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert tensors["a"].tobytes() == path.read_bytes()[-(128 << 20) :]
    assert seen


def test_a_signal_handler_may_load_while_a_load_is_counted(model: Path) -> None:
    done = run(
        """
        import signal, sys
        from types import SimpleNamespace
        import hoistway
        from hoistway import _totals

        report = _totals.Report

        def interrupted(native):
            _totals.Report = report
            signal.raise_signal(signal.SIGUSR1)
            return report._from_native(native)

        def load(*_):
            hoistway.load_file(sys.argv[1], framework="raw")

        signal.signal(signal.SIGUSR1, load)
        _totals.Report = SimpleNamespace(_from_native=interrupted)
        load()
        assert _totals.Report is report, "no signal came"
        """,
        model,
        HOISTWAY_REPORT="1",
    )
    assert done.returncode == 0, done.stderr
    count = 2 * len(hoistway.open(model).keys())
    assert f"hoistway: {count} tensors" in done.stderr
    assert " from 2 files in " in done.stderr


@pytest.mark.parametrize("where", ["as the lock is taken", "in the midst of it"])
def test_what_a_signal_handler_interrupts_is_counted_all_the_same(model: Path, where: str) -> None:
    done = run(
        """
        import signal, sys, threading
        from types import SimpleNamespace
        import hoistway
        from hoistway import _totals

        def load():
            hoistway.load_file(sys.argv[1], framework="raw")

        def interrupt(*_):
            raise KeyboardInterrupt

        class Lock:
            def acquire(self, blocking=True):
                assert lock.acquire(blocking=blocking)
                signal.raise_signal(signal.SIGUSR1)

        signal.signal(signal.SIGUSR1, interrupt)
        totals, report = _totals._totals, _totals.Report
        lock = totals._lock
        if sys.argv[2] == "as the lock is taken":
            totals._lock = Lock()
        else:
            _totals.Report = SimpleNamespace(_from_native=lambda _: signal.raise_signal(signal.SIGUSR1))
        try:
            load()
        except KeyboardInterrupt:
            totals._lock, _totals.Report = lock, report
        else:
            raise AssertionError("no signal came")
        other = threading.Thread(target=load)
        other.start()
        other.join()
        load()
        assert not totals._pending
        """,
        model,
        where,
        HOISTWAY_REPORT="1",
    )
    assert done.returncode == 0, done.stderr
    count = 3 * len(hoistway.open(model).keys())
    assert f"hoistway: {count} tensors" in done.stderr
    assert " from 3 files in " in done.stderr


def test_without_threads_files_are_loaded_and_saved() -> None:
    """A user who may start no thread: the caller's thread does the work."""
    program = """
import os, pathlib, resource, hoistway

def load_and_save():
    loaded = hoistway.load_file("model.safetensors", framework="numpy")
    hoistway.save_file(loaded, "copy.safetensors")
    with hoistway.open("copy.safetensors") as copy:
        assert set(copy.manifest()["tensors"]) == set(loaded)
    return loaded

load_and_save()  # Imports what it needs, which the other user may not read.
os.unlink("copy.safetensors")
if os.geteuid() == 0:
    user = 1_000_000 + os.getpid()
    os.setresuid(user, user, user)
resource.setrlimit(resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
loaded = load_and_save()
print(*(refusal.what for refusal in loaded.report.refused), sep="\\n")
"""
    # The folder of tests is its owner's alone.
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder, "model.safetensors"), {"a": ("U8", [3 << 20]), "b": ("F32", [7])})
        Path(folder).chmod(0o777)
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert "threads of the load's own" in done.stdout


@pytest.mark.parametrize("is_cancellable", [True, False])
def test_work_that_panics_beside_the_look_for_ctrl_c_is_an_error(is_cancellable: bool) -> None:
    from hoistway import _native  # noqa: PLC0415

    with pytest.raises(hoistway.errors.HoistwayError, match="the work panicked"):
        _native.panic_at_work(is_cancellable)


LIMITED = """
import os, resource, sys
import hoistway
def leave(mib):
    # Of the address space.
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (mib << 20),) * 2)
"""


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_copy_of_bytes_that_has_no_room_is_a_memory_error(tmp_path: Path, device: str) -> None:
    script = """
tensor = hoistway.load_file(sys.argv[1], sys.argv[2], framework="raw", route="threads")["a"]
leave(16)
try:
    tensor.tobytes()
except MemoryError:
    print("no room")
"""
    path = write_model(tmp_path / "model.safetensors", {"a": ("U8", [64 << 20])})
    done = run(LIMITED + script, path, device)
    assert done.stdout == "no room\n", done.stderr


@pytest.mark.parametrize("name", ["m.safetensors", "m.safetensors.index.json"])
def test_a_header_that_has_no_room_is_a_memory_error(tmp_path: Path, name: str) -> None:
    script = """
leave(24)
try:
    hoistway.open(sys.argv[1], framework="raw")
except MemoryError as error:
    print(error)
"""
    text = b'{"weight_map":{}}' if name.endswith("json") else b"{}"
    text = text.ljust(64 << 20)
    (tmp_path / name).write_bytes(text if name.endswith("json") else len(text).to_bytes(8, "little") + text)
    done = run(LIMITED + script, tmp_path / name)
    assert "cannot allocate 64.0 MiB of memory for a" in done.stdout, done.stderr


def test_a_verification_holds_no_copy_of_a_whole_tensor_of_a_device(tmp_path: Path) -> None:
    script = """
from hoistway import _native
def peak(*options):
    arguments = ["load", sys.argv[1], "--device", "cuda:0", "--route", "threads", "--json", *options]
    assert _native.run_command(["hoistway"], arguments) == 0
    # Not that of `getrusage`, which is also the peak of the process that started this one.
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmHWM"))
before = peak()
print(peak("--verify") - before, file=sys.stderr)
"""
    path = write_model(tmp_path / "model.safetensors", {"a": ("U8", [192 << 20])})
    done = run(LIMITED + script, path)
    assert int(done.stderr) < 96, done.stderr
