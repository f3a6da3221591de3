//go:build (linux || windows) && cgo

package hoistway

/*
#include <hoistway.h>

// Gathers to memory that is no `void *`: see hoistway_go_read.
static hoistway_status hoistway_go_gather(const hoistway_rows *rows, const uint64_t *numbers, uint64_t count,
                                          uint8_t *destination, uint64_t bytes) {
	return hoistway_rows_gather(rows, numbers, count, destination, bytes);
}
*/
import "C"

import (
	"unsafe"
)

// Rows is a table in a file, of rows of equal length, such as an embedding.
type Rows struct {
	handle          *handle
	count, rowBytes uint64
}

// OpenRows opens a tensor as a table: its rows are what lies under each index of its slowest dimension. Rows are small, so give it
// a reader with many reads at once, such as 64. The checkpoint and the reader may be closed.
func OpenRows(reader *Reader, checkpoint *Checkpoint, tensor string) (*Rows, error) {
	names, err := newStrings("the name", tensor)
	if err != nil {
		return nil, err
	}
	defer names.free()
	var rows *C.hoistway_rows
	err = withBoth(reader, checkpoint, func(reader *C.hoistway_reader, catalog *C.hoistway_catalog) C.hoistway_status {
		return C.hoistway_rows_open(reader, catalog, names[0], &rows)
	})
	if err != nil {
		return nil, err
	}
	count, rowBytes := uint64(C.hoistway_rows_count(rows)), uint64(C.hoistway_rows_row_bytes(rows))
	return &Rows{count: count, rowBytes: rowBytes, handle: newHandle("table", unsafe.Pointer(rows), func(pointer unsafe.Pointer) {
		C.hoistway_rows_free((*C.hoistway_rows)(pointer))
	})}, nil
}

// withBoth does a call on a reader and a checkpoint.
func withBoth(reader *Reader, checkpoint *Checkpoint, work func(*C.hoistway_reader, *C.hoistway_catalog) C.hoistway_status) error {
	threads, err := reader.held().acquire()
	if err != nil {
		return err
	}
	defer reader.handle.release()
	catalog, err := checkpoint.held().acquire()
	if err != nil {
		return err
	}
	defer checkpoint.handle.release()
	return call(func() C.hoistway_status {
		return work((*C.hoistway_reader)(threads), (*C.hoistway_catalog)(catalog))
	})
}

// Count returns the number of rows.
func (r *Rows) Count() uint64 {
	return r.count
}

// RowBytes returns the bytes of a row.
func (r *Rows) RowBytes() uint64 {
	return r.rowBytes
}

// Gather reads rows into destination, in the order in which they are named, one after the other. Each is read once however often
// it is named. The destination must be as long as the rows. If the call fails, it is as it was. The call has no context.
func (r *Rows) Gather(rows []uint64, destination []byte) error {
	if r == nil {
		return invalid("the table is nil")
	}
	pointer, err := r.handle.acquire()
	if err != nil {
		return err
	}
	defer r.handle.release()
	return call(func() C.hoistway_status {
		var first *C.uint64_t
		if len(rows) > 0 {
			first = (*C.uint64_t)(unsafe.Pointer(&rows[0]))
		}
		return C.hoistway_go_gather((*C.hoistway_rows)(pointer), first, C.uint64_t(len(rows)), firstByte(destination),
			C.uint64_t(len(destination)))
	})
}

// Close closes the table.
func (r *Rows) Close() error {
	if r != nil {
		r.handle.close()
	}
	return nil
}
