//go:build (linux || windows) && cgo

package hoistway

// #include <stdlib.h>
// #include <hoistway.h>
import "C"

import (
	"encoding/json"
	"time"
	"unsafe"
)

// LayerSpec is a layer, as the caller names it.
type LayerSpec struct {
	// Name is what messages call it.
	Name string
	// Tensors are the names of its tensors.
	Tensors []string
}

// LayerOptions say how to stream layers. Zero values are defaults.
type LayerOptions struct {
	// BudgetBytes is most bytes of all layers in memory: those that stay, those that the caller holds, those that are read. 0 is
	// 4 GiB.
	BudgetBytes uint64
	// Ahead is how many layers are read ahead of the one that computes; 0 is 1.
	Ahead uint64
	// Timeout is how long a layer waits for room that the caller holds; 0 is a minute, [NoTimeout] as long as it takes.
	Timeout time.Duration
	// Layers are the layers in the order of use; nil is those that names of tensors count (blk.N., layers.N., h.N., blocks.N.).
	Layers []LayerSpec
	// Target is the memory that layers go to. With TargetCUDA or TargetROCm, BudgetBytes bounds memory of the device.
	Target Target
	// Device is the number of the device; 0 for memory of the host.
	Device int32
}

// LayerStream goes through the layers of a model, again and again. As many as the budget holds stay in memory.
type LayerStream struct {
	handle *handle
}

// OpenLayers opens a stream of layers, and reads nothing yet. The checkpoint and the reader may be closed.
func OpenLayers(reader *Reader, checkpoint *Checkpoint, options LayerOptions) (*LayerStream, error) {
	timeout, err := milliseconds("the timeout", options.Timeout)
	if err != nil {
		return nil, err
	}
	if options.Layers != nil && len(options.Layers) == 0 {
		return nil, invalid("there are no layers; nil is those that names of tensors count")
	}
	specs, free, err := newSpecs(options.Layers)
	defer free()
	if err != nil {
		return nil, err
	}
	chosen := C.hoistway_layers_options{
		size:         C.uint64_t(C.sizeof_hoistway_layers_options),
		budget_bytes: C.uint64_t(options.BudgetBytes),
		ahead:        C.uint64_t(options.Ahead),
		timeout_ms:   timeout,
		layers:       specs,
		layer_count:  C.uint64_t(len(options.Layers)),
		target:       C.int32_t(options.Target),
		device:       C.int32_t(options.Device),
	}
	var layers *C.hoistway_layers
	err = withBoth(reader, checkpoint, func(reader *C.hoistway_reader, catalog *C.hoistway_catalog) C.hoistway_status {
		return C.hoistway_layers_open(reader, catalog, &chosen, &layers)
	})
	if err != nil {
		return nil, err
	}
	return &LayerStream{handle: newHandle("stream of layers", unsafe.Pointer(layers), func(pointer unsafe.Pointer) {
		C.hoistway_layers_free((*C.hoistway_layers)(pointer))
	})}, nil
}

// newSpecs copies layers to C memory, because a structure that C gets may not point to Go memory. The function frees the copies,
// also after an error.
func newSpecs(layers []LayerSpec) (*C.hoistway_layer_spec, func(), error) {
	var strings cStrings
	var lists []unsafe.Pointer
	free := func() {
		strings.free()
		for _, list := range lists {
			C.free(list)
		}
	}
	if len(layers) == 0 {
		return nil, free, nil
	}
	allocate := func(count int, size C.size_t) (unsafe.Pointer, error) {
		list := C.calloc(C.size_t(count)+1, size)
		if list == nil {
			return nil, newError(CodeMemory, "there is no memory for the names of layers")
		}
		lists = append(lists, list)
		return list, nil
	}
	place, err := allocate(len(layers), C.sizeof_hoistway_layer_spec)
	if err != nil {
		return nil, free, err
	}
	specs := unsafe.Slice((*C.hoistway_layer_spec)(place), len(layers))
	for index, layer := range layers {
		copies, err := newStrings("the name", append([]string{layer.Name}, layer.Tensors...)...)
		if err != nil {
			return nil, free, err
		}
		strings = append(strings, copies...)
		names, err := allocate(len(layer.Tensors), C.size_t(unsafe.Sizeof(place)))
		if err != nil {
			return nil, free, err
		}
		copy(unsafe.Slice((**C.char)(names), len(layer.Tensors)), copies[1:])
		specs[index] = C.hoistway_layer_spec{
			name:         copies[0],
			tensors:      (**C.char)(names),
			tensor_count: C.uint64_t(len(layer.Tensors)),
		}
	}
	return (*C.hoistway_layer_spec)(place), free, nil
}

// Close ends the stream. Layers that the caller holds stay. A call of Next that waits for their room fails with CodeCancelled. One
// that waits for a read goes on, and the stream ends as it returns.
func (s *LayerStream) Close() error {
	if pointer, err := s.held().acquire(); err == nil {
		C.hoistway_layers_stop((*C.hoistway_layers)(pointer))
		s.handle.release()
	}
	s.held().close()
	return nil
}

func (s *LayerStream) held() *handle {
	if s == nil {
		return nil
	}
	return s.handle
}

// Next waits for the next layer, behind the last of which the first comes again, and starts to read those after it. Close a layer
// before its room is needed, or the call fails with CodeRefused after the option Timeout. After a failure the layer is next again.
// Several goroutines get different layers; they wait for each other. The call has no context.
func (s *LayerStream) Next() (*Layer, error) {
	pointer, err := s.held().acquire()
	if err != nil {
		return nil, err
	}
	defer s.handle.release()
	var layer *C.hoistway_layer
	err = call(func() C.hoistway_status { return C.hoistway_layers_next((*C.hoistway_layers)(pointer), &layer) })
	if err != nil {
		return nil, err
	}
	made := &Layer{handle: newHandle("layer", unsafe.Pointer(layer), func(pointer unsafe.Pointer) {
		C.hoistway_layer_free((*C.hoistway_layer)(pointer))
	})}
	if err := made.list(); err != nil {
		made.handle.close()
		return nil, err
	}
	return made, nil
}

// LayerStats is what a stream of layers has done.
type LayerStats struct {
	// Layers is how many layers a pass has.
	Layers uint64 `json:"layers"`
	// Kept is how many stay resident.
	Kept uint64 `json:"kept"`
	// Ahead is how many are read ahead.
	Ahead uint64 `json:"ahead"`
	// Served is how many were handed out.
	Served uint64 `json:"served"`
	// BytesRead is how many bytes of layers were read.
	BytesRead uint64 `json:"bytes_read"`
	// StallSeconds is how long callers waited for layers.
	StallSeconds float64 `json:"stall"`
	// PeakBytes is how many bytes were in memory at most.
	PeakBytes uint64 `json:"peak_bytes"`
	// PeakDeviceBytes is how many bytes were allocated on the device at most.
	PeakDeviceBytes uint64 `json:"peak_device_bytes"`
	// Allocations is how often memory was allocated. Other layers were read to memory of layers that were closed.
	Allocations uint64 `json:"allocations"`

	// JSON is what the library said, with members that this version of the package does not know.
	JSON json.RawMessage `json:"-"`
}

// Stats tells what the stream has done. It does not wait for a call of Next under way.
func (s *LayerStream) Stats() (*LayerStats, error) {
	pointer, err := s.held().acquire()
	if err != nil {
		return nil, err
	}
	defer s.handle.release()
	said, err := text(func(place **C.char) C.hoistway_status {
		return C.hoistway_layers_stats((*C.hoistway_layers)(pointer), place)
	})
	if err != nil {
		return nil, err
	}
	stats := &LayerStats{JSON: json.RawMessage(said)}
	return stats, parse("statistics", said, stats)
}

// Layer is a layer whose bytes are in memory until Close.
type Layer struct {
	handle  *handle
	name    string
	tensors []LayerTensor
}

// LayerTensor is a tensor of a layer.
type LayerTensor struct {
	// Name is its name in the checkpoint.
	Name string
	// DType is the type of its elements, such as "BF16" or "Q4_K".
	DType string
	// Shape is the number of elements along each dimension, slowest first.
	Shape []uint64
	// GGMLType is the number of the type in ggml, or -1.
	GGMLType int32
	// Address is where its bytes are, for C code, or for the driver of a device. It is valid until the layer is closed: a program that uses it keeps the layer,
	// and closes it afterwards.
	Address uintptr
	// Bytes is how many these are.
	Bytes uint64
	// Target is the memory that they are in.
	Target Target
	// Device is the number of the device, for memory of a device.
	Device int32

	layer *handle
	index uint64
}

// list copies the descriptions of the tensors.
func (l *Layer) list() error {
	pointer, err := l.handle.acquire()
	if err != nil {
		return err
	}
	defer l.handle.release()
	layer := (*C.hoistway_layer)(pointer)
	l.name = C.GoString(C.hoistway_layer_name(layer))
	for index := C.uint64_t(0); index < C.hoistway_layer_tensor_count(layer); index++ {
		described, err := layerTensorOf(layer, index)
		if err != nil {
			return err
		}
		l.tensors = append(l.tensors, LayerTensor{
			Name:     C.GoString(described.name),
			DType:    C.GoString(described.dtype),
			Shape:    shapeOf(&described.shape, described.dimensions),
			GGMLType: int32(described.ggml_type),
			Address:  addressOf(&described.address),
			Bytes:    uint64(described.bytes),
			Target:   Target(described.target),
			Device:   int32(described.device),
			layer:    l.handle,
			index:    uint64(index),
		})
	}
	return nil
}

func layerTensorOf(layer *C.hoistway_layer, index C.uint64_t) (*C.hoistway_layer_part, error) {
	described := &C.hoistway_layer_part{size: C.uint64_t(C.sizeof_hoistway_layer_part)}
	err := call(func() C.hoistway_status { return C.hoistway_layer_tensor(layer, index, described) })
	return described, err
}

// Name returns the name of the layer.
func (l *Layer) Name() string {
	return l.name
}

// Tensors returns the tensors of the layer.
func (l *Layer) Tensors() []LayerTensor {
	return l.tensors
}

// UsedBehind says that work that is queued by now on stream uses the layer, which lies in memory of a device. It is the driver's
// handle of a stream of the device, or nil for its legacy default stream. Later layers are then read to the memory after that work;
// without it, after all work of the device. Call it before Close, once for each stream that uses the layer: no other work may.
// CodeInvalidArgument for a layer in memory of the host.
func (l *Layer) UsedBehind(stream unsafe.Pointer) error {
	pointer, err := l.handle.acquire()
	if err != nil {
		return err
	}
	defer l.handle.release()
	return call(func() C.hoistway_status { return C.hoistway_layer_used_behind((*C.hoistway_layer)(pointer), stream) })
}

// Close gives the memory of the layer back. Later layers are read to it. Work that is queued on a device may use a layer in memory of that
// device still then. Work that reads a layer in memory of the host must have ended, also where a device reads it.
func (l *Layer) Close() error {
	if l != nil {
		l.handle.close()
	}
	return nil
}

// View calls use with the bytes of the tensor, which must be in memory of the host, and which are valid until use returns. Nothing may write to them. The layer holds them
// for as long, even if it is closed meanwhile.
func (t LayerTensor) View(use func(bytes []byte) error) error {
	if t.Target != TargetHost {
		return invalid("tensor %q lies in memory of a device; the host cannot view it", t.Name)
	}
	pointer, err := t.layer.acquire()
	if err != nil {
		return err
	}
	defer t.layer.release()
	described, err := layerTensorOf((*C.hoistway_layer)(pointer), C.uint64_t(t.index))
	if err != nil {
		return err
	}
	return viewOf(&described.address, uint64(described.bytes), use)
}
