//go:build (linux || windows) && cgo

package hoistway

// #include <hoistway.h>
import "C"

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// Code says what kind of failure an [Error] is. The numbers are those of hoistway_status in the C ABI.
type Code int32

const (
	// CodeInvalidArgument is an argument or an option that makes no sense.
	CodeInvalidArgument Code = C.HOISTWAY_INVALID_ARGUMENT
	// CodeNotFound is a file, tensor, expert, layer or row that is not there.
	CodeNotFound Code = C.HOISTWAY_NOT_FOUND
	// CodeInvalidFile is a file that is not what its format allows.
	CodeInvalidFile Code = C.HOISTWAY_INVALID_FILE
	// CodeTruncated is a file that ends too early.
	CodeTruncated Code = C.HOISTWAY_TRUNCATED
	// CodeChanged is a file that has changed since it was opened.
	CodeChanged Code = C.HOISTWAY_CHANGED
	// CodeIO is an operation that the system refused or failed.
	CodeIO Code = C.HOISTWAY_IO
	// CodeRouteUnavailable is a named route that cannot carry the data.
	CodeRouteUnavailable Code = C.HOISTWAY_ROUTE_UNAVAILABLE
	// CodeDevice is a device that is not there, or has failed.
	CodeDevice Code = C.HOISTWAY_DEVICE
	// CodeMemory is a lack of memory, or a budget that is too small.
	CodeMemory Code = C.HOISTWAY_MEMORY
	// CodeCancelled is a call that its context cancelled, or Close.
	CodeCancelled Code = C.HOISTWAY_CANCELLED
	// CodeInternal is a defect of hoistway. Please report it.
	CodeInternal Code = C.HOISTWAY_INTERNAL
	// CodeRefused is a store without room: leases, or layers that the caller holds, take it.
	CodeRefused Code = C.HOISTWAY_REFUSED
	// CodeTimedOut is a request that did not end within its time.
	CodeTimedOut Code = C.HOISTWAY_TIMED_OUT
	// CodeClosed is a call on something that was closed.
	CodeClosed Code = C.HOISTWAY_CLOSED
)

var codeNames = map[Code]string{
	CodeInvalidArgument:  "invalid argument",
	CodeNotFound:         "not found",
	CodeInvalidFile:      "invalid file",
	CodeTruncated:        "truncated",
	CodeChanged:          "changed",
	CodeIO:               "input/output",
	CodeRouteUnavailable: "route unavailable",
	CodeDevice:           "device",
	CodeMemory:           "memory",
	CodeCancelled:        "cancelled",
	CodeInternal:         "internal",
	CodeRefused:          "refused",
	CodeTimedOut:         "timed out",
	CodeClosed:           "closed",
}

// String returns the code in words.
func (c Code) String() string {
	if name, known := codeNames[c]; known {
		return name
	}
	return fmt.Sprintf("code %d", int32(c))
}

// Error is why a call failed.
//
// [errors.Is] compares it with the errors of the standard library: [fs.ErrNotExist] for CodeNotFound, [io.ErrUnexpectedEOF] for
// CodeTruncated, [os.ErrDeadlineExceeded] for CodeTimedOut, [os.ErrClosed] for CodeClosed, and the error of the context for
// CodeCancelled.
type Error struct {
	// Code is the kind of failure.
	Code Code
	// Message is a sentence that names file, tensor and offset as far as they are known.
	Message string
	// Path is the file of the tensor, or the only path that was to be opened; empty if neither is known.
	Path string
	// Tensor is the name of the tensor, if one is known.
	Tensor string
	// Offset is where the bytes that could not be read begin in the file, or -1.
	Offset int64

	cause error
}

// Error returns the message.
func (e *Error) Error() string {
	return "hoistway: " + e.Message
}

// Unwrap returns the error of the context that cancelled the call, or nil.
func (e *Error) Unwrap() error {
	return e.cause
}

// Is reports whether target is the error of the standard library for this code.
func (e *Error) Is(target error) bool {
	switch target {
	case fs.ErrNotExist:
		return e.Code == CodeNotFound
	case io.ErrUnexpectedEOF:
		return e.Code == CodeTruncated
	case os.ErrDeadlineExceeded:
		return e.Code == CodeTimedOut
	case os.ErrClosed:
		return e.Code == CodeClosed
	}
	return false
}

func newError(code Code, format string, arguments ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, arguments...), Offset: -1}
}

func invalid(format string, arguments ...any) *Error {
	return newError(CodeInvalidArgument, format, arguments...)
}

// cancelled returns the error of a call whose context has ended, or nil.
func cancelled(ctx context.Context) error {
	cause := ctx.Err()
	if cause == nil {
		return nil
	}
	failure := newError(CodeCancelled, "the call was cancelled: %v", cause)
	failure.cause = cause
	return failure
}
