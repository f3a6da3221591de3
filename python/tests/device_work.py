"""Work of a program's own on a device of the stand-in driver: what tests of devices do beside hoistway.

Calls release the interpreter, as those of CUDA's own bindings do.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
GLOBAL_CAPTURE = 0


class Work:
    """The primary context of a device, current in the thread that made this until it is left."""

    def __init__(self, library: ctypes.CDLL, device: int = 0) -> None:
        self.library, self.device = library, device
        self._context = ctypes.c_void_p()

    def __enter__(self) -> Self:
        assert self.library.cuInit(0) == 0
        assert self.library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), self.device) == 0
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        self.library.cuDevicePrimaryCtxRelease_v2(self.device)

    def enter(self) -> None:
        """Makes the context current in this thread."""
        assert self.library.cuCtxPushCurrent_v2(self._context) == 0

    def relax(self) -> None:
        """Keeps this thread's own calls out of what others capture."""
        assert self.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(2))) == 0

    def leave(self) -> None:
        """Makes current what was before."""
        self.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def memory(self, size: int, value: int = 0) -> int:
        """Allocates memory of the device in which each byte has this value."""
        address = ctypes.c_uint64()
        assert self.library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        self.fill(address.value, size, value, 0)
        self.synchronize(0)
        return address.value

    def free(self, address: int) -> None:
        """Frees it."""
        assert self.library.cuMemFree_v2(ctypes.c_uint64(address)) == 0

    def stream(self, flags: int = 1) -> int:
        """Makes a stream: in no order with the default one, unless the flags are 0."""
        stream = ctypes.c_void_p()
        assert self.library.cuStreamCreate(ctypes.byref(stream), flags) == 0
        return stream.value or 0

    def destroy(self, stream: int) -> None:
        """Destroys a stream."""
        assert self.library.cuStreamDestroy_v2(ctypes.c_void_p(stream)) == 0

    def synchronize(self, stream: int) -> None:
        """Waits for a stream."""
        assert self.library.cuStreamSynchronize(ctypes.c_void_p(stream)) == 0

    def fill(self, address: int, size: int, value: int, stream: int) -> None:
        """Queues that bytes get a value."""
        code = self.library.cuMemsetD8Async(
            ctypes.c_uint64(address), value, ctypes.c_size_t(size), ctypes.c_void_p(stream)
        )
        assert code == 0

    def copy(self, to: int, of: int, size: int, stream: int) -> None:
        """Queues a copy on the device."""
        code = self.library.cuMemcpyDtoDAsync_v2(
            ctypes.c_uint64(to), ctypes.c_uint64(of), ctypes.c_size_t(size), ctypes.c_void_p(stream)
        )
        assert code == 0

    def read(self, address: int, size: int) -> bytes:
        """Returns bytes of the device."""
        into = ctypes.create_string_buffer(size)
        assert self.library.cuMemcpyDtoH_v2(into, ctypes.c_uint64(address), ctypes.c_size_t(size)) == 0
        return into.raw

    def gate(self, stream: int = 0) -> Gate:
        """Holds a stream up until the gate is opened by Python."""
        return Gate(self.library, stream)

    @contextmanager
    def graph(self, stream: int, queue: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """A graph of what ``queue`` queues on a stream, and what launches it."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        handle = ctypes.c_void_p(stream)
        assert self.library.cuStreamBeginCapture_v2(handle, GLOBAL_CAPTURE) == 0
        queue()
        # Others have time to break it.
        time.sleep(0.01)
        assert self.library.cuStreamEndCapture(handle, ctypes.byref(graph)) == 0, "others have invalidated it"
        instantiate = self.library.cuGraphInstantiateWithFlags
        assert instantiate(ctypes.byref(executable), graph, ctypes.c_uint64(0)) == 0

        def launch() -> None:
            assert self.library.cuGraphLaunch(executable, handle) == 0

        yield launch
        self.library.cuGraphExecDestroy(executable)
        self.library.cuGraphDestroy(graph)

    def capture(self, stream: int) -> Capture:
        """Captures a stream in the mode that forbids unsafe calls of all threads, as torch does."""
        return Capture(self.library, stream)


class Array:
    """Memory of a device as other libraries describe theirs."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class Gate:
    """A function of the host in a stream, which needs the interpreter to go on."""

    def __init__(self, library: ctypes.CDLL, stream: int) -> None:
        self._event = threading.Event()
        # Kept as long as the stream may call it.
        self._function = HostFunction(lambda _: self._wait())
        assert library.cuLaunchHostFunc(ctypes.c_void_p(stream), self._function, None) == 0

    def _wait(self) -> None:
        assert self._event.wait(60)

    def open(self) -> None:
        """Lets the stream go on."""
        self._event.set()


class Capture:
    """A capture of a stream, which fails if calls of other threads have invalidated it."""

    def __init__(self, library: ctypes.CDLL, stream: int) -> None:
        self._library, self._stream = library, ctypes.c_void_p(stream)

    def __enter__(self) -> Self:
        assert self._library.cuStreamBeginCapture_v2(self._stream, GLOBAL_CAPTURE) == 0
        return self

    def __exit__(self, *_: object) -> None:
        graph = ctypes.c_void_p()
        code = self._library.cuStreamEndCapture(self._stream, ctypes.byref(graph))
        assert code == 0, f"the capture ended with {code}"
        assert self._library.cuGraphDestroy(graph) == 0


class Captured:
    """Another thread that captures, until this is left."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._begun, self._end = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._work.enter()
            stream = self._work.stream()
            with self._work.capture(stream):
                self._begun.set()
                assert self._end.wait(60)
            self._work.destroy(stream)
            self._work.leave()
        except BaseException as error:
            self._failure = error
            self._begun.set()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._begun.wait(60)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._end.set()
        self._thread.join()
        if self._failure is not None and kind is None:
            raise self._failure
