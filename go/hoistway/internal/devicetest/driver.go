//go:build linux && cgo

// Package devicetest calls a driver of CUDA for tests. Test files cannot call C themselves.
package devicetest

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

static void *library;
static void *context;

static int failed_to_load = -1;

static int start(const char *path) {
    library = dlopen(path, RTLD_NOW);
    if (!library) {
        return failed_to_load;
    }
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(library, "cuDevicePrimaryCtxRetain");
    if (!init || !retain) {
        return failed_to_load;
    }
    int code = init(0);
    return code ? code : retain(&context, 0);
}

// A context is current on a thread of the system, so each call sets it.
static int enter(void) {
    int (*set_current)(void *) = (int (*)(void *))dlsym(library, "cuCtxSetCurrent");
    return set_current ? set_current(context) : failed_to_load;
}

static int to_host(void *host, uint64_t device, size_t bytes) {
    int (*copy)(void *, uint64_t, size_t) = (int (*)(void *, uint64_t, size_t))dlsym(library, "cuMemcpyDtoH_v2");
    int code = enter();
    return code ? code : copy ? copy(host, device, bytes) : failed_to_load;
}

static int make_stream(void **stream) {
    int (*make)(void **, unsigned) = (int (*)(void **, unsigned))dlsym(library, "cuStreamCreate");
    int code = enter();
    // In no order with the default stream.
    return code ? code : make ? make(stream, 1) : failed_to_load;
}
*/
import "C"

import (
	"fmt"
	"runtime"
	"unsafe"
)

// Start loads the driver at this path, and starts its first device. The process keeps both.
func Start(path string) error {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	return call("starting the driver", func() C.int { return C.start(name) })
}

// ToHost copies bytes of the first device to memory of Go, after the work of its default stream.
func ToHost(bytes []byte, address uintptr) error {
	if len(bytes) == 0 {
		return nil
	}
	return call("copying to the host", func() C.int {
		return C.to_host(unsafe.Pointer(&bytes[0]), C.uint64_t(address), C.size_t(len(bytes)))
	})
}

// NewStream makes a stream of the first device, which the process keeps.
func NewStream() (unsafe.Pointer, error) {
	var stream unsafe.Pointer
	err := call("making a stream", func() C.int { return C.make_stream(&stream) })
	return stream, err
}

// call makes a call of the driver on one thread of the system.
func call(what string, made func() C.int) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if code := made(); code != 0 {
		return fmt.Errorf("%s: code %d of the driver", what, int(code))
	}
	return nil
}
