"""Streams: order, bound of memory, errors, ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import hoistway
import pytest
from conftest import StandIn, assert_threads_end, make_cold, run, same_bytes, thread_count, write_model
from hoistway.errors import (
    CancelledError,
    FileChangedError,
    OptionError,
    TruncatedError,
    UnsupportedDtypeError,
)
from python_server import Server

MANY = {f"t{number:03}": ("U8", [(1 << 20) + number * 1001]) for number in range(64)}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 tensors of a megabyte and more, at places that are no multiples of anything."""
    return write_model(tmp_path_factory.mktemp("many") / "many.safetensors", MANY)


def descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), thread_count()


def assert_as_before(before: tuple[int, int]) -> None:
    # Of tests before this one some may be closed meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= before[0]
    assert_threads_end(before[1])


@pytest.mark.parametrize("max_in_flight", [None, "16MiB", "1KiB", 0])
@pytest.mark.parametrize("order", ["arrival", "file"])
@pytest.mark.parametrize("route", ["auto", "io_uring", "threads", "mapped"])
def test_every_tensor_comes_once_and_whole(many: Path, route: str, order: str, max_in_flight) -> None:
    expected = hoistway.load_file(many, framework="raw")
    with hoistway.iter_tensors(
        many, framework="raw", route=route, order=order, max_in_flight=max_in_flight
    ) as stream:
        given = [(name, tensor.tobytes()) for name, tensor in stream]
    names = [name for name, _ in given]
    assert names == list(MANY) if order == "file" else sorted(names) == list(MANY)
    assert all(data == expected[name].tobytes() for name, data in given)
    assert stream.report.tensors == len(MANY)
    assert stream.report.route == route


@pytest.mark.parametrize("has_targets", [False, True])
def test_a_signal_handler_may_ask_for_the_report(many: Path, has_targets: bool) -> None:
    script = """
        import signal, sys
        import hoistway, numpy as np
        asked = []
        signal.signal(signal.SIGALRM, lambda *_: asked.append(stream.report.tensors))
        with hoistway.open(sys.argv[1], framework="numpy") as checkpoint:
            targets = {name: np.zeros(checkpoint.get_shape(name), np.uint8) for name in checkpoint.keys()}
            copy_into = targets if sys.argv[2] == "True" else None
            stream = checkpoint.iter_tensors(copy_into=copy_into, max_in_flight="2MiB")
            signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
            count = sum(1 for _ in stream)
            while not asked:
                signal.pause()
            signal.setitimer(signal.ITIMER_REAL, 0)
        print(count)
        """
    done = run(script, many, has_targets)
    assert done.stdout == f"{len(MANY)}\n", done.stderr


def test_code_that_runs_as_an_error_is_made_may_ask_for_the_report(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Error(CancelledError):
        """Stands for a signal handler, which runs as an error is made too."""

        def __init__(self, *arguments: object, **fields: object) -> None:
            super().__init__(*arguments, **fields)
            asked.append(stream.report.tensors)

    with hoistway.open(many, framework="raw") as checkpoint:
        stream = checkpoint.iter_tensors()
        (loading,) = stream._sources
        stream.close()
        monkeypatch.setattr(hoistway.errors, "CancelledError", Error)
        with pytest.raises(Error):
            loading.next()  # type: ignore[attr-defined]
    assert len(asked) == 1


@pytest.mark.parametrize("how", ["the end", "close"])
def test_code_that_runs_as_targets_go_may_ask_for_the_report(many: Path, how: str) -> None:
    script = """
        import sys, weakref
        import hoistway, numpy as np
        asked = []
        def ask():
            stream.close()
            asked.append(stream.report.tensors)
        def target(name, dtype, shape):
            array = np.empty(shape, np.uint8)
            weakref.finalize(array, ask)
            return array
        stream = hoistway.iter_tensors(sys.argv[1], framework="numpy", copy_into=target)
        if sys.argv[2] == "close":
            stream.close()
        else:
            for name, tensor in stream:
                del tensor
        print(len(asked))
        """
    done = run(script, many, how)
    assert done.stdout == f"{len(MANY)}\n", done.stderr


@pytest.mark.parametrize("has_targets", [False, True])
def test_another_thread_may_watch_a_stream_and_end_it(tmp_path: Path, has_targets: bool) -> None:
    server = Server(write_model(tmp_path / "model.safetensors", {"a": ("U8", [3_000_000])}).read_bytes())
    ended: list[Exception] = []

    def read_all() -> None:
        try:
            list(stream)
        except Exception as error:
            ended.append(error)

    with hoistway.open(f"http://127.0.0.1:{server.port}/model.safetensors", framework="numpy") as checkpoint:
        copy_into = {"a": bytearray(3_000_000)} if has_targets else None
        server.trouble = "silent"
        stream = checkpoint.iter_tensors(copy_into=copy_into)
        thread = threading.Thread(target=read_all)
        thread.start()
        assert server.met.wait(60)
        assert stream.report.tensors in (0, 1)
        stream.close()
        thread.join(60)
    server.close()
    assert [type(error) for error in ended] == [CancelledError]


@pytest.mark.parametrize("route", ["threads", "mapped"])
def test_a_loop_that_another_thread_ends_does_not_seem_complete(many: Path, route: str) -> None:
    is_closed, has_some = threading.Event(), threading.Event()
    taken: list[str] = []
    ended: list[Exception] = []

    def read_all() -> None:
        try:
            for name, _ in stream:
                taken.append(name)
                if len(taken) == 3:
                    has_some.set()
                    assert is_closed.wait(60)
        except Exception as error:
            ended.append(error)

    stream = hoistway.iter_tensors(many, framework="raw", route=route, max_in_flight="4MiB")
    thread = threading.Thread(target=read_all)
    thread.start()
    assert has_some.wait(60)
    stream.close()
    is_closed.set()
    thread.join(60)
    assert [type(error) for error in ended] == [CancelledError]
    assert len(taken) < len(MANY)
    # In this thread, which knows.
    assert list(stream) == []


@pytest.mark.parametrize("route", ["threads", "mapped"])
def test_closing_after_the_end_takes_nothing_back(many: Path, route: str) -> None:
    stream = hoistway.iter_tensors(many, framework="raw", route=route)
    assert len(list(stream)) == len(MANY)
    thread = threading.Thread(target=stream.close)
    thread.start()
    thread.join(60)
    assert list(stream) == []


@pytest.mark.parametrize("has_targets", [False, True])
def test_a_child_of_fork_closes_a_stream_that_a_thread_of_its_parent_waits_for(
    tmp_path: Path, has_targets: bool
) -> None:
    path = write_model(tmp_path / "model.safetensors", {"a": ("U8", [3_000_000])})
    script = """
        import os, signal, sys, threading
        import hoistway
        sys.path.insert(0, sys.argv[3])
        from python_server import Server
        server = Server(open(sys.argv[1], "rb").read())
        checkpoint = hoistway.open(f"http://127.0.0.1:{server.port}/model.safetensors", framework="numpy")
        server.trouble = "silent"
        copy_into = {"a": bytearray(3_000_000)} if sys.argv[2] == "True" else None
        stream = checkpoint.iter_tensors(copy_into=copy_into)
        threading.Thread(target=list, args=[stream], daemon=True).start()
        assert server.met.wait(60)
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                with stream:
                    pass
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        print("closed", flush=True)
        os._exit(0)
        """
    done = run(script, path, has_targets, Path(__file__).parent)
    assert done.stdout == "closed\n", done.stderr


@pytest.mark.parametrize("layout", ["file", "packed", "tensor"])
def test_a_bound_holds_for_every_layout(many: Path, layout: str) -> None:
    make_cold(many)
    with hoistway.open(many) as checkpoint:
        stream = checkpoint.iter_tensors(order="file", max_in_flight="4MiB", layout=layout)
        given = dict(stream)
        assert checkpoint.report == stream.report
    expected = hoistway.load_file(many)
    assert list(given) == list(expected)
    assert all(same_bytes(given[name], tensor) for name, tensor in expected.items())


def test_dictionaries_are_in_the_order_of_the_file_however_tensors_arrive(many: Path) -> None:
    for _ in range(5):
        make_cold(many)
        # What is cached arrives before what is cold.
        with many.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            file.seek(32 << 20)
            file.read()
        assert list(hoistway.load_file(many, framework="raw")) == list(MANY)


def test_who_drops_tensors_needs_no_more_memory_than_the_bound(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{i}": ("U8", [4 << 20]) for i in range(96)})
    script = """
        import sys, resource, hoistway

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

        path, order, route, bound = sys.argv[1:]
        list(hoistway.iter_tensors(path, framework="raw", select="t0", route=route))
        before, taken = peak(), 0
        for name, tensor in hoistway.iter_tensors(
            path, framework="raw", order=order, route=route, max_in_flight=bound or None
        ):
            taken += tensor.nbytes
            del tensor
        assert taken == 96 << 22
        print(peak() - before)
    """
    for order, route in (("arrival", "auto"), ("file", "auto"), ("file", "threads")):
        done = run(script, path, order, route, "32MiB")
        assert done.returncode == 0, done.stderr
        # The bound, the huge pages at both ends of it, and slots.
        assert int(done.stdout) <= (32 << 20) + (24 << 20), (order, route, done.stdout)


def test_loading_stops_at_the_bound_until_the_next_tensor_is_asked_for(many: Path) -> None:
    with hoistway.iter_tensors(
        many, framework="raw", order="file", max_in_flight="8MiB", chunk="64KiB"
    ) as stream:
        taken = 0
        for _, tensor in stream:
            carried = sum(carrier.tensor_bytes for carrier in stream.report.carriers)
            assert carried <= taken + (8 << 20)
            taken += tensor.nbytes
        assert taken == sum(carrier.tensor_bytes for carrier in stream.report.carriers)


def test_a_tensor_larger_than_the_bound_is_loaded_alone(tmp_path: Path) -> None:
    sizes = {"a": 100_000, "large": 9 << 20, "b": 100_000, "c": 3 << 20}
    path = write_model(tmp_path / "m.safetensors", {name: ("U8", [size]) for name, size in sizes.items()})
    with hoistway.iter_tensors(path, framework="raw", order="file", max_in_flight="1MiB") as stream:
        taken = 0
        for name, tensor in stream:
            carried = sum(carrier.tensor_bytes for carrier in stream.report.carriers)
            # What shares the reads at its ends comes along.
            assert carried - taken <= max(1 << 20, sizes[name] + (128 << 10))
            taken += tensor.nbytes


def test_parts_of_tensors_are_streamed(model: Path) -> None:
    slices = {"embed": (slice(10, 20), slice(1, 63, 2)), "layers.0.weight": 7, "ids": (slice(1, 3),)}
    whole = hoistway.load_file(model)
    given = dict(hoistway.iter_tensors(model, slices=slices, max_in_flight="64KiB", order="file"))
    assert list(given) == hoistway.open(model).keys()
    for name, tensor in whole.items():
        assert same_bytes(given[name], tensor[slices[name]] if name in slices else tensor), name
    chosen = dict(hoistway.iter_tensors(model, select="layers.*", exclude="*.bias"))
    assert chosen.keys() == {"layers.0.weight", "layers.1.weight"}


@pytest.mark.parametrize("order", ["arrival", "file"])
def test_a_file_that_is_cut_meanwhile_is_an_error_after_what_was_whole(
    many: Path, tmp_path: Path, order: str
) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(many.read_bytes())
    expected = hoistway.load_file(many)
    given = {}
    stream = hoistway.iter_tensors(path, order=order, max_in_flight="8MiB")
    given.update([next(stream)])
    os.truncate(path, path.stat().st_size - (20 << 20))
    with pytest.raises((TruncatedError, FileChangedError)) as caught:
        # One by one, so that those before the error stay.
        given.update(stream)
    assert Path(caught.value.path) == path
    assert caught.value.tensor in MANY
    assert 0 < len(given) < len(MANY)
    assert order == "arrival" or list(given) == list(MANY)[: len(given)]
    assert all(same_bytes(tensor, expected[name]) for name, tensor in given.items())
    assert list(stream) == []


def test_a_file_that_was_cut_before_gives_nothing(many: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(many.read_bytes())
    before = descriptors_and_threads()
    with hoistway.open(path) as checkpoint:
        os.truncate(path, path.stat().st_size - (20 << 20))
        with pytest.raises((TruncatedError, FileChangedError)):
            list(checkpoint.iter_tensors(order="file"))
    assert_as_before(before)


def test_a_type_that_the_framework_lacks_is_an_error_after_the_others(tmp_path: Path) -> None:
    tensors = {
        "a": ("F32", [4]),
        "b": ("F4", [2, 4]),
        "c": ("F4", [2, 3, 2]),
        "six": ("F6_E2M3", [4, 4]),
        "z": ("U8", [4]),
    }
    path = write_model(tmp_path / "m.safetensors", tensors)
    stream = hoistway.iter_tensors(path, framework="numpy", order="file")
    with pytest.raises(UnsupportedDtypeError, match="six"):
        list(stream)
    assert list(stream) == []
    stream = hoistway.iter_tensors(path, framework="numpy", order="file")
    assert [next(stream)[0] for _ in range(3)] == ["a", "b", "c"]


@pytest.mark.parametrize("max_in_flight", [None, "8MiB"])
def test_a_stream_that_is_left_leaves_nothing_behind(many: Path, max_in_flight: str | None) -> None:
    make_cold(many)
    before = descriptors_and_threads()
    with hoistway.iter_tensors(many, max_in_flight=max_in_flight) as stream:
        _, tensor = next(stream)
        copy = tensor.clone()
    assert_as_before(before)
    assert same_bytes(tensor, copy)
    assert list(stream) == []
    stream.close()
    for _ in hoistway.iter_tensors(many, max_in_flight=max_in_flight):
        break
    assert_as_before(before)
    hoistway.iter_tensors(many, max_in_flight=max_in_flight)
    assert_as_before(before)


def test_a_stream_outlives_its_checkpoint(many: Path) -> None:
    with hoistway.open(many) as checkpoint:
        stream = checkpoint.iter_tensors(order="file", max_in_flight="4MiB")
    assert [name for name, _ in stream] == list(MANY)


def test_bad_options_are_told_at_once(model: Path) -> None:
    for wrong in (
        {"order": "size"},
        {"max_in_flight": "much"},
        {"max_in_flight": -1},
        {"route": "warp"},
        {"rout": 1},
    ):
        with pytest.raises(OptionError):
            hoistway.iter_tensors(model, **wrong)
    with pytest.raises(OptionError):
        hoistway.iter_tensors(model, route="mapped", order="size")


@pytest.mark.parametrize("how", ["max_in_flight='2MiB'", "copy_into=lambda *_: bytearray(1 << 20)"])
def test_ctrl_c_ends_a_stream(tmp_path: Path, how: str) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{i}": ("U8", [1 << 20]) for i in range(256)})
    make_cold(path)
    script = f"""
        import os, signal, sys, time, hoistway
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threads = len(os.listdir("/proc/self/task"))
        slow = dict(route="threads", direct="always", chunk="4KiB", threads=1)
        stream = hoistway.iter_tensors(sys.argv[1], framework="raw", {how}, **slow)
        try:
            # It may come while the loop is here rather than in the stream.
            with stream:
                for number, _ in enumerate(stream):
                    if number == 0:
                        print("started", flush=True)
        except KeyboardInterrupt:
            assert list(stream) == []
            # A thread that was joined may be listed for a moment more.
            for _ in range(3000):
                if len(os.listdir("/proc/self/task")) <= threads:
                    break
                time.sleep(0.01)
            else:
                raise SystemExit("threads of the load are left") from None
            print("interrupted")
        """
    command = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "started\n"
        child.send_signal(signal.SIGINT)
        output, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    assert output == "interrupted\n"


def test_a_child_of_fork_is_told(many: Path) -> None:
    done = run(
        """
        import os, sys, hoistway
        stream = hoistway.iter_tensors(sys.argv[1], framework="raw", order="file", max_in_flight="4MiB")
        next(stream)
        child = os.fork()
        if child == 0:
            try:
                next(stream)
            except hoistway.errors.ForkedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert sum(1 for _ in stream) == 63
        """,
        many,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", ["arrival", "file"])
@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "tensor"}, {"layout": "packed"}, {"route": "staged", "dtype": "float32"}],
    ids=str,
)
def test_a_bound_holds_on_a_device(
    stand_in: StandIn, tmp_path: Path, order: str, options: dict[str, str]
) -> None:
    tensors = {f"t{number:02}": ("BF16", [500 + number, 500]) for number in range(24)}
    path = write_model(tmp_path / "m.safetensors", tensors)
    expected = hoistway.load_file(path, "cuda:0", framework="raw", **options)
    data = {name: tensor.tobytes() for name, tensor in expected.items()}
    del expected
    assert stand_in.left("device_bytes") == 0
    largest = max(map(len, data.values()))
    bound = 6 * largest
    peak, given = 0, []
    with hoistway.iter_tensors(
        path, "cuda:0", framework="raw", order=order, max_in_flight=bound, **options
    ) as stream:
        scratch = stream.report.as_dict()["device"]["scratch_bytes"]
        for name, tensor in stream:
            peak = max(peak, stand_in.count("device_bytes") - scratch)
            assert tensor.tobytes() == data[name]
            given.append(name)
            del tensor
    assert sorted(given) == list(tensors)
    # Arenas come and go as a whole: one at each end may hold tensors of both sides.
    assert peak <= bound + 4 * largest
    assert stand_in.left("device_bytes") == 0


def test_a_device_without_room_for_everything_takes_it_bit_by_bit(stand_in: StandIn, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{i}": ("U8", [1 << 20]) for i in range(32)})
    stand_in.set("MEMORY_MIB=16")
    taken = 0
    for _, tensor in hoistway.iter_tensors(path, "cuda:0", framework="raw", max_in_flight="4MiB"):
        taken += tensor.nbytes
        del tensor
    assert taken == 32 << 20


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_reads_its_own_experts_and_little_else(tmp_path: Path, ranks: int) -> None:
    parts = ("down_proj", "gate_proj", "up_proj")
    tensors = {
        f"layers.{layer}.experts.{expert}.{part}.weight": ("BF16", [256, 256])
        for layer in range(3)
        for expert in range(16)
        for part in parts
    }
    tensors |= {f"layers.{layer}.norm.weight": ("BF16", [256]) for layer in range(3)}
    path = write_model(tmp_path / "m.safetensors", tensors)

    def is_wanted(name: str) -> bool:
        return ".experts." not in name or int(name.split(".")[3]) % ranks == 1

    make_cold(path)
    given = set()
    with hoistway.iter_tensors(path, framework="raw", select=is_wanted) as stream:
        given.update(name for name, _ in stream)
    assert given == set(filter(is_wanted, tensors))
    report = stream.report
    assert report.tensor_bytes == 3 * (16 // ranks * 3 * 256 * 256 + 256) * 2
    assert report.tensor_bytes <= report.read_bytes <= 1.02 * report.tensor_bytes
