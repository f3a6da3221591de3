//go:build (linux || windows) && cgo

package hoistway

import (
	"runtime"
	"sync"
	"unsafe"
)

// handle is something of the library that is freed once: when it was closed and no call uses it.
type handle struct {
	what string
	free func(unsafe.Pointer)

	mutex    sync.Mutex
	pointer  unsafe.Pointer
	users    int
	isClosed bool
}

// newHandle takes a pointer of the library. If it is dropped without close, the garbage collector has it freed. A call keeps its
// handle reachable until release, so that cannot happen during a call.
func newHandle(what string, pointer unsafe.Pointer, free func(unsafe.Pointer)) *handle {
	made := &handle{what: what, free: free, pointer: pointer}
	// On a goroutine of its own: to free may wait for reads under way, and other finalizers shall not.
	runtime.SetFinalizer(made, func(dropped *handle) { go dropped.close() })
	return made
}

// acquire returns the pointer, which is valid until release.
func (h *handle) acquire() (unsafe.Pointer, error) {
	if h == nil {
		return nil, invalid("a checkpoint, a reader or something opened from them is nil")
	}
	h.mutex.Lock()
	defer h.mutex.Unlock()
	if h.isClosed {
		return nil, newError(CodeClosed, "the %s is closed", h.what)
	}
	h.users++
	return h.pointer, nil
}

func (h *handle) release() {
	h.mutex.Lock()
	h.users--
	unused := h.takeIfUnused()
	h.mutex.Unlock()
	h.freeUnused(unused)
}

// close lets no further call begin, and frees the pointer now or at the end of the last call.
func (h *handle) close() {
	if h == nil {
		return
	}
	h.mutex.Lock()
	h.isClosed = true
	unused := h.takeIfUnused()
	h.mutex.Unlock()
	h.freeUnused(unused)
}

// takeIfUnused returns the pointer if it is to be freed. The caller holds the mutex.
func (h *handle) takeIfUnused() unsafe.Pointer {
	if !h.isClosed || h.users > 0 {
		return nil
	}
	unused := h.pointer
	h.pointer = nil
	return unused
}

func (h *handle) freeUnused(unused unsafe.Pointer) {
	if unused != nil {
		runtime.SetFinalizer(h, nil)
		h.free(unused)
	}
}
