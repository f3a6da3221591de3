//go:build (linux || windows) && cgo

package hoistway

/*
#include <stdlib.h>
#include <hoistway.h>

// Bytes of a tensor, and where they go in the memory of a call.
typedef struct {
	uint64_t tensor;
	uint64_t begin;
	uint64_t length;
	uint64_t place;
} hoistway_go_extent;

// What a call leaves: strings of the library, and the position of the first extent that failed.
typedef struct {
	char *message;
	char *report;
	uint64_t failed;
	bool lacks_memory;
} hoistway_go_outcome;

static bool hoistway_go_is_wanted(void *cancelled, uint64_t bytes_done, uint64_t bytes_total) {
	(void)bytes_done, (void)bytes_total;
	return __atomic_load_n((const int32_t *)cancelled, __ATOMIC_ACQUIRE) == 0;
}

// Reads extents of tensors, and returns once nothing uses `memory` any more. A single call, because C may keep an address
// of Go's memory only until it returns. Cancels the reads once `cancelled`, unless it is NULL, is not 0. `memory` is no
// `void *`, for which cgo would look for pointers in all of the object that the caller's slice is part of.
static hoistway_status hoistway_go_read(const hoistway_reader *reader, const hoistway_catalog *catalog,
                                        const hoistway_go_extent *extents, uint64_t count, uint8_t *memory,
                                        int32_t *cancelled, hoistway_go_outcome *outcome) {
	hoistway_read *reads = calloc(count > 0 ? count : 1, sizeof *reads);
	if (!reads) {
		outcome->lacks_memory = true;
		return HOISTWAY_MEMORY;
	}
	hoistway_status status = HOISTWAY_OK;
	for (uint64_t index = 0; index < count && status == HOISTWAY_OK; index++) {
		hoistway_tensor tensor = {.size = sizeof tensor};
		status = hoistway_catalog_tensor(catalog, extents[index].tensor, &tensor);
		reads[index].size = sizeof reads[index];
		reads[index].catalog = catalog;
		reads[index].file = tensor.file;
		reads[index].fd = -1;
		reads[index].target = HOISTWAY_TARGET_HOST;
		reads[index].offset = tensor.offset + extents[index].begin;
		reads[index].length = extents[index].length;
		reads[index].destination = extents[index].length > 0 ? memory + extents[index].place : NULL;
		reads[index].name = tensor.name;
	}
	hoistway_batch *batch = NULL;
	if (status == HOISTWAY_OK) {
		status = hoistway_batch_submit(reader, reads, count, HOISTWAY_DEMAND, &batch);
	}
	free(reads);
	if (status != HOISTWAY_OK) {
		return status;
	}
	status = hoistway_batch_wait(batch, UINT64_MAX, cancelled ? hoistway_go_is_wanted : NULL, cancelled);
	if (status != HOISTWAY_OK) {
		while (outcome->failed < count && hoistway_batch_status(batch, outcome->failed) == HOISTWAY_OK) {
			outcome->failed++;
		}
		hoistway_batch_error(batch, outcome->failed, &outcome->message);
	}
	hoistway_batch_report(batch, &outcome->report);
	hoistway_batch_free(batch);
	return status;
}
*/
import "C"

import (
	"context"
	"math"
	"runtime"
	"sync/atomic"
	"unsafe"
)

// ReaderOptions say how to read. Zero values are defaults.
type ReaderOptions struct {
	// Route is "auto", "io_uring", "overlapped", "threads", "cached", "usrbio" or "directstorage". A named route carries the bytes, or the read fails.
	Route string
	// MemoryBudgetBytes is most bytes of staging memory.
	MemoryBudgetBytes uint64
	// InFlight is how many reads are made at once.
	InFlight uint64
	// SmallPages keeps the library from advising huge pages for destinations of 2 MiB and more.
	SmallPages bool
}

// Reader has threads and staging memory for reads, kept between calls. It may read several checkpoints at once.
type Reader struct {
	handle *handle
}

// NewReader starts a reader.
func NewReader(options ReaderOptions) (*Reader, error) {
	route, err := optional("the route", options.Route)
	if err != nil {
		return nil, err
	}
	defer C.free(unsafe.Pointer(route))
	chosen := C.hoistway_reader_options{
		size:                C.uint64_t(C.sizeof_hoistway_reader_options),
		route:               route,
		memory_budget_bytes: C.uint64_t(options.MemoryBudgetBytes),
		in_flight:           C.uint64_t(options.InFlight),
	}
	if options.SmallPages {
		chosen.flags |= C.HOISTWAY_SMALL_PAGES
	}
	var reader *C.hoistway_reader
	err = call(func() C.hoistway_status { return C.hoistway_reader_create(&chosen, &reader) })
	if err != nil {
		return nil, err
	}
	return &Reader{handle: newHandle("reader", unsafe.Pointer(reader), func(pointer unsafe.Pointer) {
		C.hoistway_reader_free((*C.hoistway_reader)(pointer))
	})}, nil
}

// Close ends the threads. Tables and streams of layers that were opened with the reader keep it as long as they need it.
func (r *Reader) Close() error {
	r.held().close()
	return nil
}

func (r *Reader) held() *handle {
	if r == nil {
		return nil
	}
	return r.handle
}

// Read reads all bytes of a tensor into destination, which must be as long as the tensor. It refuses tensors of big-endian
// files, unless of single bytes, and of unknown types. After an error destination holds anything. The report is nil if no read began.
func (r *Reader) Read(ctx context.Context, checkpoint *Checkpoint, tensor string, destination []byte) (*Report, error) {
	index, err := r.find(checkpoint, tensor)
	if err != nil {
		return nil, err
	}
	if bytes := checkpoint.tensors[index].Bytes; bytes != uint64(len(destination)) {
		return nil, invalid("tensor %q has %d bytes; the destination has %d", tensor, bytes, len(destination))
	}
	return r.read(ctx, checkpoint, []extent{{tensor: index, length: uint64(len(destination))}}, destination)
}

// ReadRange fills destination with bytes of a tensor, from the byte at begin on. Else as Read.
func (r *Reader) ReadRange(
	ctx context.Context, checkpoint *Checkpoint, tensor string, begin uint64, destination []byte,
) (*Report, error) {
	index, err := r.find(checkpoint, tensor)
	if err != nil {
		return nil, err
	}
	bytes, length := checkpoint.tensors[index].Bytes, uint64(len(destination))
	if begin > bytes || length > bytes-begin {
		return nil, invalid("tensor %q has %d bytes, so there are no %d from byte %d on", tensor, bytes, length, begin)
	}
	return r.read(ctx, checkpoint, []extent{{tensor: index, begin: begin, length: length}}, destination)
}

func (r *Reader) find(checkpoint *Checkpoint, tensor string) (int, error) {
	if _, err := checkpoint.held().acquire(); err != nil {
		return 0, err
	}
	defer checkpoint.handle.release()
	return checkpoint.find(tensor)
}

// extent is bytes of a tensor, and where they go in the memory of a call.
type extent struct {
	// Position in the checkpoint.
	tensor               int
	begin, length, place uint64
}

// read reads extents into memory, which has room for them.
func (r *Reader) read(ctx context.Context, checkpoint *Checkpoint, extents []extent, memory []byte) (*Report, error) {
	if err := cancelled(ctx); err != nil {
		return nil, err
	}
	reader, err := r.held().acquire()
	if err != nil {
		return nil, err
	}
	defer r.handle.release()
	catalog, err := checkpoint.held().acquire()
	if err != nil {
		return nil, err
	}
	defer checkpoint.handle.release()

	asked := make([]C.hoistway_go_extent, len(extents))
	for index, one := range extents {
		asked[index] = C.hoistway_go_extent{
			tensor: C.uint64_t(one.tensor),
			begin:  C.uint64_t(one.begin),
			length: C.uint64_t(one.length),
			place:  C.uint64_t(one.place),
		}
	}
	flag, stop := watch(ctx)
	outcome := &C.hoistway_go_outcome{}
	err = call(func() C.hoistway_status {
		return C.hoistway_go_read((*C.hoistway_reader)(reader), (*C.hoistway_catalog)(catalog), first(asked),
			C.uint64_t(len(asked)), firstByte(memory), (*C.int32_t)(flag), outcome)
	})
	stop()
	defer func() {
		C.hoistway_string_free(outcome.message)
		C.hoistway_string_free(outcome.report)
	}()
	if err != nil {
		err = describe(ctx, err, checkpoint, extents, outcome)
	}
	report, failure := parseReport(C.GoString(outcome.report))
	if err == nil {
		err = failure
	}
	return report, err
}

// describe adds what is known to the error of a read.
func describe(ctx context.Context, err error, checkpoint *Checkpoint, extents []extent, outcome *C.hoistway_go_outcome) error {
	failure, ok := err.(*Error)
	if !ok {
		return err
	}
	if outcome.message != nil {
		failure.Message = C.GoString(outcome.message)
	}
	if outcome.lacks_memory {
		failure.Message = "there is no memory for the list of reads"
	}
	if failure.Code == CodeCancelled {
		failure.cause = ctx.Err()
	}
	if outcome.report != nil && outcome.failed < C.uint64_t(len(extents)) {
		one := extents[outcome.failed]
		tensor := checkpoint.tensors[one.tensor]
		failure.Path, failure.Tensor = tensor.Path, tensor.Name
		if offset := tensor.Offset + one.begin; offset <= math.MaxInt64 {
			failure.Offset = int64(offset)
		}
	}
	return failure
}

// watch returns a flag that is set once a context ends, or nil if it never does. The function ends the watch.
func watch(ctx context.Context) (*int32, func()) {
	if ctx.Done() == nil {
		return nil, func() {}
	}
	flag, ended := new(int32), make(chan struct{})
	go func() {
		select {
		case <-ctx.Done():
			atomic.StoreInt32(flag, 1)
		case <-ended:
		}
	}()
	return flag, func() {
		close(ended)
		runtime.KeepAlive(flag)
	}
}

func first(extents []C.hoistway_go_extent) *C.hoistway_go_extent {
	if len(extents) == 0 {
		return nil
	}
	return &extents[0]
}

func firstByte(memory []byte) *C.uint8_t {
	if len(memory) == 0 {
		return nil
	}
	return (*C.uint8_t)(unsafe.Pointer(&memory[0]))
}
