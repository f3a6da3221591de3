//go:build (linux || windows) && cgo

package hoistway

// #include <stdlib.h>
// #include <hoistway.h>
import "C"

import (
	"strings"
	"unsafe"
)

// Tensor describes a tensor of a checkpoint. It stays valid after the checkpoint is closed.
type Tensor struct {
	// Name is unique in the checkpoint.
	Name string
	// DType is the type of its elements, such as "BF16" or "Q4_K".
	DType string
	// GGMLType is the number of the type in GGUF, or -1 if the file is no GGUF.
	GGMLType int32
	// Shape is the number of elements along each dimension, slowest first: the other way round than in GGUF.
	Shape []uint64
	// Path is the file that holds it.
	Path string
	// File is the number of that file.
	File uint64
	// Offset is where its bytes begin in the file.
	Offset uint64
	// Bytes is how many these are.
	Bytes uint64
}

// Checkpoint is what a checkpoint holds: its files and tensors. Its files stay open until Close.
type Checkpoint struct {
	handle  *handle
	tensors []Tensor
	// Positions in tensors.
	byName map[string]int
}

// Option says how to open a checkpoint.
type Option func(*openOptions)

type openOptions struct {
	lenient bool
	offset  uint64
	store   []string
}

// Lenient takes files that break the specification of their format where no harm comes of it.
func Lenient() Option {
	return func(options *openOptions) { options.lenient = true }
}

// AtOffset says where a GGUF begins that is embedded in another file.
func AtOffset(offset uint64) Option {
	return func(options *openOptions) { options.offset = offset }
}

// StoreOption sets an option of object stores, such as "endpoint", "region", "access_key_id" or "anonymous" with "true";
// docs/objects.md lists them. What no option says comes from the environment. Errors do not show the value.
func StoreOption(name, value string) Option {
	return func(options *openOptions) { options.store = append(options.store, name, value) }
}

// Open reads the headers behind paths: safetensors and GGUF files, *.safetensors.index.json, directories, glob patterns, and
// URLs of object stores and web servers, whose endpoint and credentials come from [StoreOption] or the environment. A split
// GGUF is opened by any of its files. It reads no tensor.
func Open(paths []string, options ...Option) (*Checkpoint, error) {
	var asked openOptions
	for _, option := range options {
		option(&asked)
	}
	chosen := C.hoistway_catalog_options{
		size:   C.uint64_t(C.sizeof_hoistway_catalog_options),
		offset: C.uint64_t(asked.offset),
	}
	if asked.lenient {
		chosen.lenient = 1
	}
	names, err := newStrings("the path", paths...)
	if err != nil {
		return nil, err
	}
	defer names.free()
	store, err := newStoreOptions(asked.store)
	if err != nil {
		return nil, err
	}
	defer store.free()
	chosen.store, chosen.store_count = store.first, C.uint64_t(store.count)
	var catalog *C.hoistway_catalog
	err = call(func() C.hoistway_status {
		return C.hoistway_catalog_open(names.first(), C.uint64_t(len(names)), &chosen, &catalog)
	})
	if err != nil {
		if failure, ok := err.(*Error); ok && len(paths) == 1 {
			failure.Path = paths[0]
		}
		return nil, err
	}
	checkpoint := &Checkpoint{handle: newHandle("checkpoint", unsafe.Pointer(catalog), func(pointer unsafe.Pointer) {
		C.hoistway_catalog_free((*C.hoistway_catalog)(pointer))
	})}
	if err := checkpoint.list(); err != nil {
		checkpoint.handle.close()
		return nil, err
	}
	return checkpoint, nil
}

// storeOptions are options of object stores in C memory: Go memory may not be passed within a structure.
type storeOptions struct {
	first *C.hoistway_store_option
	count int
	texts cStrings
}

// newStoreOptions copies names and values, in turn.
func newStoreOptions(named []string) (storeOptions, error) {
	for index, text := range named {
		// The value may be a secret.
		if strings.IndexByte(text, 0) >= 0 {
			return storeOptions{}, invalid("the store option %q, or its value, has a zero byte", named[index-index%2])
		}
	}
	texts, err := newStrings("a store option", named...)
	if err != nil || len(named) == 0 {
		return storeOptions{}, err
	}
	count := len(named) / 2
	memory := C.calloc(C.size_t(count), C.sizeof_hoistway_store_option)
	if memory == nil {
		texts.free()
		return storeOptions{}, newError(CodeMemory, "there is no memory for the store options")
	}
	options := storeOptions{(*C.hoistway_store_option)(memory), count, texts}
	for index, list := 0, unsafe.Slice(options.first, count); index < count; index++ {
		list[index].name, list[index].value = texts[2*index], texts[2*index+1]
	}
	return options, nil
}

func (o storeOptions) free() {
	o.texts.free()
	C.free(unsafe.Pointer(o.first))
}

// list copies the descriptions of the tensors.
func (c *Checkpoint) list() error {
	pointer, err := c.handle.acquire()
	if err != nil {
		return err
	}
	defer c.handle.release()
	catalog := (*C.hoistway_catalog)(pointer)
	count := uint64(C.hoistway_catalog_tensor_count(catalog))
	c.tensors = make([]Tensor, 0, count)
	c.byName = make(map[string]int, count)
	described := new(C.hoistway_tensor)
	for index := uint64(0); index < count; index++ {
		described.size = C.uint64_t(C.sizeof_hoistway_tensor)
		err := call(func() C.hoistway_status {
			return C.hoistway_catalog_tensor(catalog, C.uint64_t(index), described)
		})
		if err != nil {
			return err
		}
		tensor := Tensor{
			Name:     C.GoString(described.name),
			DType:    C.GoString(described.dtype),
			GGMLType: int32(described.ggml_type),
			Shape:    shapeOf(&described.shape, described.dimensions),
			Path:     C.GoString(described.path),
			File:     uint64(described.file),
			Offset:   uint64(described.offset),
			Bytes:    uint64(described.bytes),
		}
		if _, taken := c.byName[tensor.Name]; taken {
			return newError(CodeInvalidFile, "two tensors have the name %q once zero bytes are replaced", tensor.Name)
		}
		c.byName[tensor.Name] = len(c.tensors)
		c.tensors = append(c.tensors, tensor)
	}
	return nil
}

// Tensors returns the tensors in the order of the files and of the bytes within each.
func (c *Checkpoint) Tensors() []Tensor {
	tensors := make([]Tensor, len(c.tensors))
	for index, tensor := range c.tensors {
		tensors[index] = tensor.copy()
	}
	return tensors
}

// Tensor returns the tensor of a name, or an [Error] with CodeNotFound.
func (c *Checkpoint) Tensor(name string) (Tensor, error) {
	index, err := c.find(name)
	if err != nil {
		return Tensor{}, err
	}
	return c.tensors[index].copy(), nil
}

// Close closes the files. What was opened from the checkpoint keeps those that it needs.
func (c *Checkpoint) Close() error {
	c.held().close()
	return nil
}

func (c *Checkpoint) held() *handle {
	if c == nil {
		return nil
	}
	return c.handle
}

// find returns the position of a tensor.
func (c *Checkpoint) find(name string) (int, error) {
	index, known := c.byName[name]
	if !known {
		failure := newError(CodeNotFound, "there is no tensor %q in the checkpoint", name)
		failure.Tensor = name
		return 0, failure
	}
	return index, nil
}

// choose returns the positions of the tensors of these names, or of all if names is nil, in the order of the files.
func (c *Checkpoint) choose(names []string) ([]int, error) {
	isChosen := make([]bool, len(c.tensors))
	for _, name := range names {
		index, err := c.find(name)
		if err != nil {
			return nil, err
		}
		isChosen[index] = true
	}
	var chosen []int
	for index := range c.tensors {
		if names == nil || isChosen[index] {
			chosen = append(chosen, index)
		}
	}
	return chosen, nil
}

func (t Tensor) copy() Tensor {
	t.Shape = append([]uint64{}, t.Shape...)
	return t
}
