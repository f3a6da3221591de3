//go:build (linux || windows) && cgo

package hoistway

// #cgo linux pkg-config: hoistway
// #cgo windows LDFLAGS: -lhoistway
// #include <stdlib.h>
// #include <hoistway.h>
import "C"

import (
	"math"
	"runtime"
	"strings"
	"time"
	"unsafe"
)

// Version returns the version of the C library, such as "0.1.0".
func Version() string {
	return C.GoString(C.hoistway_version())
}

// call does a call that returns a status, and returns its error. The library keeps the message for the thread, so the
// goroutine stays on its thread until the message is copied.
func call(work func() C.hoistway_status) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	status := work()
	if status == C.HOISTWAY_OK {
		return nil
	}
	message := C.GoString(C.hoistway_last_error())
	if message == "" {
		message = "the call failed: " + Code(status).String()
	}
	return newError(Code(status), "%s", message)
}

// text returns a string that the library gives, and frees it.
func text(give func(place **C.char) C.hoistway_status) (string, error) {
	var given *C.char
	if err := call(func() C.hoistway_status { return give(&given) }); err != nil {
		return "", err
	}
	defer C.hoistway_string_free(given)
	return C.GoString(given), nil
}

// cStrings is a list of strings in C memory.
type cStrings []*C.char

// newStrings copies strings to C memory. A string that C would cut short is an error.
func newStrings(what string, strings ...string) (cStrings, error) {
	copies := make(cStrings, 0, len(strings))
	for _, one := range strings {
		if err := checkString(what, one); err != nil {
			copies.free()
			return nil, err
		}
		copies = append(copies, C.CString(one))
	}
	return copies, nil
}

func (s cStrings) free() {
	for _, one := range s {
		C.free(unsafe.Pointer(one))
	}
}

// first returns the place of the list, or nil if it is empty.
func (s cStrings) first() **C.char {
	if len(s) == 0 {
		return nil
	}
	return &s[0]
}

func checkString(what, one string) error {
	if strings.IndexByte(one, 0) >= 0 {
		return invalid("%s %q has a zero byte", what, one)
	}
	return nil
}

// optional returns a copy of a string in C memory, or nil if it is empty.
func optional(what, one string) (*C.char, error) {
	if one == "" {
		return nil, nil
	}
	if err := checkString(what, one); err != nil {
		return nil, err
	}
	return C.CString(one), nil
}

// milliseconds returns a duration as the library has it: 0 for its default, rounded up so that no other becomes 0.
func milliseconds(what string, duration time.Duration) (C.uint64_t, error) {
	switch {
	case duration < 0:
		return 0, invalid("%s is negative: %v", what, duration)
	case duration == NoTimeout:
		return math.MaxUint64, nil
	}
	whole := duration / time.Millisecond
	if duration%time.Millisecond > 0 {
		whole++
	}
	return C.uint64_t(whole), nil
}

// NoTimeout is a timeout that never ends.
const NoTimeout time.Duration = math.MaxInt64

// shapeOf copies a shape. The pointer of an empty one is not looked at: it points nowhere.
func shapeOf(first **C.uint64_t, dimensions C.uint32_t) []uint64 {
	shape := make([]uint64, dimensions)
	if dimensions > 0 {
		copy(shape, unsafe.Slice((*uint64)(unsafe.Pointer(*first)), int(dimensions)))
	}
	return shape
}

// addressOf returns an address as a number, because that of no bytes is no pointer that Go may hold.
func addressOf(place *unsafe.Pointer) uintptr {
	return *(*uintptr)(unsafe.Pointer(place))
}

func firstNumber(numbers []uint32) *C.uint32_t {
	if len(numbers) == 0 {
		return nil
	}
	return (*C.uint32_t)(unsafe.Pointer(&numbers[0]))
}

// lengthOf returns a length as Go has it.
func lengthOf(what string, bytes uint64) (int, error) {
	if bytes > math.MaxInt {
		return 0, newError(CodeMemory, "%s takes %d bytes, which are more than this system can address", what, bytes)
	}
	return int(bytes), nil
}
