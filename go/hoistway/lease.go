//go:build (linux || windows) && cgo

package hoistway

// #include <hoistway.h>
import "C"

import (
	"unsafe"
)

// Lease holds experts or dense tensors that are resident: they stay where they are until Close. Close a lease as soon as it was
// used, because it takes room of the budget.
type Lease struct {
	handle *handle
	parts  [][]Part
}

// Part is a part of an expert, or a dense tensor.
type Part struct {
	// Tensor is the tensor that holds it.
	Tensor string
	// Role is "gate", "up", "gate_up", "down", or "dense".
	Role string
	// Component is what it holds of its role: "weight", "blocks", "scales", or whatever else the tensor's name ends with.
	Component string
	// DType is the type of its elements, such as "BF16" or "Q4_K".
	DType string
	// Shape is the number of elements along each dimension, slowest first, without the dimension that counts experts.
	Shape []uint64
	// GGMLType is the number of the type in ggml, or -1.
	GGMLType int32
	// File is the number of the file that holds it.
	File uint64
	// Offset is where its bytes begin in the file.
	Offset uint64
	// Bytes is how many these are.
	Bytes uint64
	// Address is where its bytes are, for C code and devices. It is valid until the lease is closed: a program that uses it keeps
	// the lease, and closes it afterwards.
	Address uintptr
	// Target is whose memory that is.
	Target Target
	// Device is the number of the device.
	Device int32
	// Slot is the slot of its expert, or -1 if the backing has none.
	Slot int64

	lease           *handle
	position, index uint64
}

// Ensure makes experts of a layer resident, waits for them, and leases them. On failure nothing is leased. The call has no
// context: it ends within the option Timeout.
func (s *ExpertStore) Ensure(layer uint32, experts []uint32) (*Lease, error) {
	return s.lease(func(store *C.hoistway_experts, lease **C.hoistway_lease) C.hoistway_status {
		return C.hoistway_experts_ensure(store, C.uint32_t(layer), firstNumber(experts), C.uint64_t(len(experts)), lease)
	})
}

// EnsureTensors makes dense tensors resident, waits for them, and leases them, as Ensure does.
func (s *ExpertStore) EnsureTensors(names ...string) (*Lease, error) {
	copies, err := newStrings("the name", names...)
	if err != nil {
		return nil, err
	}
	defer copies.free()
	return s.lease(func(store *C.hoistway_experts, lease **C.hoistway_lease) C.hoistway_status {
		return C.hoistway_experts_ensure_tensors(store, copies.first(), C.uint64_t(len(copies)), lease)
	})
}

func (s *ExpertStore) lease(ensure func(*C.hoistway_experts, **C.hoistway_lease) C.hoistway_status) (*Lease, error) {
	var lease *C.hoistway_lease
	err := s.with(func(store *C.hoistway_experts) C.hoistway_status { return ensure(store, &lease) })
	if err != nil {
		return nil, err
	}
	made := &Lease{handle: newHandle("lease", unsafe.Pointer(lease), func(pointer unsafe.Pointer) {
		C.hoistway_lease_free((*C.hoistway_lease)(pointer))
	})}
	if err := made.list(); err != nil {
		made.handle.close()
		return nil, err
	}
	return made, nil
}

// list copies the descriptions of the parts.
func (l *Lease) list() error {
	pointer, err := l.handle.acquire()
	if err != nil {
		return err
	}
	defer l.handle.release()
	lease := (*C.hoistway_lease)(pointer)
	for position := C.uint64_t(0); position < C.hoistway_lease_count(lease); position++ {
		var parts []Part
		for index := C.uint64_t(0); index < C.hoistway_lease_part_count(lease, position); index++ {
			described, err := partOf(lease, position, index)
			if err != nil {
				return err
			}
			parts = append(parts, Part{
				Tensor:    C.GoString(described.tensor),
				Role:      C.GoString(described.role),
				Component: C.GoString(described.component),
				DType:     C.GoString(described.dtype),
				Shape:     shapeOf(&described.shape, described.dimensions),
				GGMLType:  int32(described.ggml_type),
				File:      uint64(described.file),
				Offset:    uint64(described.offset),
				Bytes:     uint64(described.bytes),
				Address:   addressOf(&described.address),
				Target:    Target(described.target),
				Device:    int32(described.device),
				Slot:      int64(described.slot),
				lease:     l.handle,
				position:  uint64(position),
				index:     uint64(index),
			})
		}
		l.parts = append(l.parts, parts)
	}
	return nil
}

func partOf(lease *C.hoistway_lease, position, index C.uint64_t) (*C.hoistway_part, error) {
	described := &C.hoistway_part{size: C.uint64_t(C.sizeof_hoistway_part)}
	err := call(func() C.hoistway_status { return C.hoistway_lease_part(lease, position, index, described) })
	return described, err
}

// Len returns how many experts or dense tensors the lease holds.
func (l *Lease) Len() int {
	return len(l.parts)
}

// Parts returns the parts of the expert at a position of the request, or nil if there is none. A dense tensor is one part.
func (l *Lease) Parts(position int) []Part {
	if position < 0 || position >= len(l.parts) {
		return nil
	}
	return l.parts[position]
}

// Close releases what the lease holds: it may be evicted from then on.
func (l *Lease) Close() error {
	if l != nil {
		l.handle.close()
	}
	return nil
}

// View calls use with the bytes of a part in memory of the host, which are valid until use returns. Nothing may write to them. The
// lease holds them for as long, even if it is closed meanwhile.
func (p Part) View(use func(bytes []byte) error) error {
	pointer, err := p.lease.acquire()
	if err != nil {
		return err
	}
	defer p.lease.release()
	if p.Target != TargetHost {
		return invalid("tensor %q lies in memory of a device; the host cannot view it", p.Tensor)
	}
	described, err := partOf((*C.hoistway_lease)(pointer), C.uint64_t(p.position), C.uint64_t(p.index))
	if err != nil {
		return err
	}
	return viewOf(&described.address, uint64(described.bytes), use)
}

// viewOf calls use with memory of the library. An address of no bytes is not looked at: it points nowhere.
func viewOf(address *unsafe.Pointer, bytes uint64, use func([]byte) error) error {
	length, err := lengthOf("the view", bytes)
	if err != nil {
		return err
	}
	if length == 0 {
		return use([]byte{})
	}
	view := unsafe.Slice((*byte)(*address), length)
	return use(view[:length:length])
}
