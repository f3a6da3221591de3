//go:build (linux || windows) && cgo

package hoistway

import (
	"context"
	"math"
)

// block is the length of what storage reads at once. Bytes whose place in memory and in the file agree modulo it are read in
// place; others are copied once.
const block = 4096

// LoadOptions say what to load. Zero values are defaults.
type LoadOptions struct {
	// Names are those of the tensors; nil is all of the checkpoint.
	Names []string
	// MaxBytes is most bytes of memory that the load may take; 0 is no limit. A load that needs more is an error with
	// CodeMemory, and reads nothing. Without a limit, a load that the system has no memory for ends the process, as any
	// allocation of Go does.
	MaxBytes uint64
}

// Loaded has the bytes of tensors in memory of the garbage collector. All share one allocation, which lives as long as one
// of its slices.
type Loaded struct {
	// Report says how the bytes were read.
	Report *Report

	tensors []Tensor
	bytes   map[string][]byte
}

// Tensors returns what was loaded, in the order of the files.
func (l *Loaded) Tensors() []Tensor {
	return l.tensors
}

// Bytes returns the bytes of a tensor, or nil if it was not loaded. The caller may write to them.
func (l *Loaded) Bytes(tensor string) []byte {
	return l.bytes[tensor]
}

// Load reads tensors into memory of Go, all of them or none.
func (r *Reader) Load(ctx context.Context, checkpoint *Checkpoint, options LoadOptions) (*Loaded, error) {
	if _, err := checkpoint.held().acquire(); err != nil {
		return nil, err
	}
	defer checkpoint.handle.release()
	chosen, err := checkpoint.choose(options.Names)
	if err != nil {
		return nil, err
	}
	extents, bytes, err := checkpoint.layOut(chosen)
	if err != nil {
		return nil, err
	}
	if options.MaxBytes > 0 && bytes > options.MaxBytes {
		return nil, newError(CodeMemory, "the load takes %d bytes of memory; MaxBytes is %d", bytes, options.MaxBytes)
	}
	length, err := lengthOf("the load", bytes)
	if err != nil {
		return nil, err
	}
	memory := make([]byte, length)
	report, err := r.read(ctx, checkpoint, extents, memory)
	if err != nil {
		return nil, err
	}
	loaded := &Loaded{Report: report, bytes: make(map[string][]byte, len(extents))}
	for _, one := range extents {
		tensor := checkpoint.tensors[one.tensor].copy()
		loaded.tensors = append(loaded.tensors, tensor)
		end := one.place + one.length
		loaded.bytes[tensor.Name] = memory[one.place:end:end]
	}
	return loaded, nil
}

// layOut gives each tensor its place in memory that begins at a block, and returns the bytes that all of them take.
func (c *Checkpoint) layOut(chosen []int) ([]extent, uint64, error) {
	extents, end := make([]extent, 0, len(chosen)), uint64(0)
	for _, index := range chosen {
		next, err := c.placeAfter(end, index)
		if err != nil {
			return nil, 0, err
		}
		extents = append(extents, next)
		end = next.place + next.length
	}
	return extents, end, nil
}

// placeAfter gives a tensor a place behind those that end at end.
func (c *Checkpoint) placeAfter(end uint64, index int) (extent, error) {
	// No sum of it and a block overflows.
	const most = math.MaxInt64 - block
	tensor := c.tensors[index]
	place := end + (tensor.Offset%block+block-end%block)%block
	if place > most || tensor.Bytes > most-place {
		return extent{}, newError(CodeMemory, "the tensors take more bytes than this system can address")
	}
	return extent{tensor: index, length: tensor.Bytes, place: place}, nil
}
