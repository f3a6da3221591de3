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

// Target is whose memory experts lie in.
type Target int32

const (
	// TargetHost is memory of the host.
	TargetHost Target = C.HOISTWAY_TARGET_HOST
	// TargetCUDA is memory of a CUDA device.
	TargetCUDA Target = C.HOISTWAY_TARGET_CUDA
	// TargetROCm is memory of a ROCm device.
	TargetROCm Target = C.HOISTWAY_TARGET_ROCM
)

// ExpertOptions say how to open a store of experts. Zero values are defaults.
type ExpertOptions struct {
	// Backing is "host_slots", "host_sparse", "device_slots" or "device_sparse"; "" is "host_slots". With "device_sparse", slices of
	// experts must be whole granules of the CUDA device, of 2 MiB today.
	Backing string
	// Policy is "ewma2", "lru", "slru", "lfu" or "arc"; "" is "ewma2".
	Policy string
	// Route is "auto", "io_uring", "overlapped", "threads", "cached", "usrbio" or "directstorage"; "" is "auto".
	Route string
	// BudgetBytes is most bytes that resident and arriving experts and tensors take. One request may exceed it by its own
	// demand. 0 is 4 GiB.
	BudgetBytes uint64
	// BatchBytes is, with "device_slots", bytes beside the budget for the demand of one request.
	BatchBytes uint64
	// DenseBytes is, with "device_slots", bytes of the budget for dense tensors.
	DenseBytes uint64
	// Timeout is how long a request waits for room and for reads; 0 is a minute, [NoTimeout] as long as it takes.
	Timeout time.Duration
	// Events is how many changes of residency are kept for [ExpertStore.Events].
	Events uint64
	// MemoryBudgetBytes is most bytes of staging memory.
	MemoryBudgetBytes uint64
	// InFlight is how many reads are made at once.
	InFlight uint64
	// ExpertsPerToken is how many experts a token uses in each layer; 0 is what the headers or config.json say.
	ExpertsPerToken uint32
	// Target is, with "device_slots", TargetCUDA or TargetROCm; with "device_sparse", TargetCUDA.
	Target Target
	// Device is the number of the device.
	Device int32
	// HostLevelBytes is, with "device_slots", bytes of pinned host memory beside the budget, which evicted experts stay in, and are
	// copied from rather than read; 0 is none.
	HostLevelBytes uint64
}

// ExpertStore reads experts and dense tensors as they are used, and evicts them when a budget says so.
type ExpertStore struct {
	handle *handle
}

// OpenExperts opens a store of what a checkpoint describes, and reads nothing yet, but three experts if there are packed ones. The
// checkpoint may be closed. A model without experts has dense tensors alone.
func OpenExperts(checkpoint *Checkpoint, options ExpertOptions) (*ExpertStore, error) {
	timeout, err := milliseconds("the timeout", options.Timeout)
	if err != nil {
		return nil, err
	}
	chosen := C.hoistway_experts_options{
		size:                C.uint64_t(C.sizeof_hoistway_experts_options),
		budget_bytes:        C.uint64_t(options.BudgetBytes),
		batch_bytes:         C.uint64_t(options.BatchBytes),
		dense_bytes:         C.uint64_t(options.DenseBytes),
		timeout_ms:          timeout,
		events:              C.uint64_t(options.Events),
		memory_budget_bytes: C.uint64_t(options.MemoryBudgetBytes),
		in_flight:           C.uint64_t(options.InFlight),
		experts_per_token:   C.uint32_t(options.ExpertsPerToken),
		target:              C.int32_t(options.Target),
		device:              C.int32_t(options.Device),
		host_level_bytes:    C.uint64_t(options.HostLevelBytes),
	}
	for _, one := range []struct {
		place      **C.char
		what, text string
	}{
		{&chosen.backing, "the backing", options.Backing},
		{&chosen.policy, "the policy", options.Policy},
		{&chosen.route, "the route", options.Route},
	} {
		copied, err := optional(one.what, one.text)
		if err != nil {
			return nil, err
		}
		defer C.free(unsafe.Pointer(copied))
		*one.place = copied
	}
	catalog, err := checkpoint.held().acquire()
	if err != nil {
		return nil, err
	}
	defer checkpoint.handle.release()
	var store *C.hoistway_experts
	err = call(func() C.hoistway_status {
		return C.hoistway_experts_open((*C.hoistway_catalog)(catalog), &chosen, &store)
	})
	if err != nil {
		return nil, err
	}
	return &ExpertStore{handle: newHandle("store of experts", unsafe.Pointer(store), func(pointer unsafe.Pointer) {
		C.hoistway_experts_free((*C.hoistway_experts)(pointer))
	})}, nil
}

// Close closes the store. Its leases stay, and keep what they hold.
func (s *ExpertStore) Close() error {
	s.held().close()
	return nil
}

func (s *ExpertStore) held() *handle {
	if s == nil {
		return nil
	}
	return s.handle
}

// with does a call on the store.
func (s *ExpertStore) with(work func(store *C.hoistway_experts) C.hoistway_status) error {
	pointer, err := s.held().acquire()
	if err != nil {
		return err
	}
	defer s.handle.release()
	return call(func() C.hoistway_status { return work((*C.hoistway_experts)(pointer)) })
}

// ExpertModel is a model as a store streams it.
type ExpertModel struct {
	// Layers is how many layers have experts.
	Layers uint64
	// Experts is how many experts all layers have.
	Experts uint64
	// ExpertBytes is how many bytes these have.
	ExpertBytes uint64
	// DenseTensors is how many tensors hold no expert.
	DenseTensors uint64
	// DenseBytes is how many bytes these have.
	DenseBytes uint64
	// TokenCycleBytes is how many bytes the experts of one token have in all layers; 0 if that is not known. With a smaller
	// budget, a policy that evicts what was used least recently finds nothing resident.
	TokenCycleBytes uint64
	// ExpertsPerToken is how many experts a token uses in each layer; 0 if that is not known.
	ExpertsPerToken uint32
}

// Model describes the model.
func (s *ExpertStore) Model() (ExpertModel, error) {
	model := &C.hoistway_experts_model{size: C.uint64_t(C.sizeof_hoistway_experts_model)}
	err := s.with(func(store *C.hoistway_experts) C.hoistway_status {
		return C.hoistway_experts_describe(store, model)
	})
	if err != nil {
		return ExpertModel{}, err
	}
	return ExpertModel{
		Layers:          uint64(model.layers),
		Experts:         uint64(model.experts),
		ExpertBytes:     uint64(model.expert_bytes),
		DenseTensors:    uint64(model.dense_tensors),
		DenseBytes:      uint64(model.dense_bytes),
		TokenCycleBytes: uint64(model.token_cycle_bytes),
		ExpertsPerToken: uint32(model.experts_per_token),
	}, nil
}

// ExpertLayer is a layer that has experts.
type ExpertLayer struct {
	// Layer is its number, counted from 0 as the checkpoint does.
	Layer uint32
	// Experts is how many experts it has.
	Experts uint32
	// ExpertBytes is how many bytes its largest expert has.
	ExpertBytes uint64
	// DemandBytes is how many bytes the experts of one token have; 0 if that is not known.
	DemandBytes uint64
}

// Layers describes the layers that have experts.
func (s *ExpertStore) Layers() ([]ExpertLayer, error) {
	var layers []ExpertLayer
	model, err := s.Model()
	for index := uint64(0); err == nil && index < model.Layers; index++ {
		layer := &C.hoistway_experts_layer_info{size: C.uint64_t(C.sizeof_hoistway_experts_layer_info)}
		err = s.with(func(store *C.hoistway_experts) C.hoistway_status {
			return C.hoistway_experts_layer(store, C.uint64_t(index), layer)
		})
		layers = append(layers, ExpertLayer{
			Layer:       uint32(layer.layer),
			Experts:     uint32(layer.experts),
			ExpertBytes: uint64(layer.expert_bytes),
			DemandBytes: uint64(layer.demand_bytes),
		})
	}
	if err != nil {
		return nil, err
	}
	return layers, nil
}

// Observe tells the policy what the router of a layer chose, with the weights, or nil for equal ones. Call it at each visit of
// the layer, before Ensure. Experts of several tokens follow one another, the last token's last.
func (s *ExpertStore) Observe(layer uint32, experts []uint32, weights []float32) error {
	if weights != nil && len(weights) != len(experts) {
		return invalid("there are %d weights of %d experts", len(weights), len(experts))
	}
	return s.with(func(store *C.hoistway_experts) C.hoistway_status {
		var first *C.float
		if len(weights) > 0 {
			first = (*C.float)(unsafe.Pointer(&weights[0]))
		}
		return C.hoistway_experts_observe(store, C.uint32_t(layer), firstNumber(experts), first, C.uint64_t(len(experts)))
	})
}

// Prefetch starts to read experts that will probably be requested. A hint: its reads begin only while no request waits for one.
// What has not begun after the deadline is dropped; 0 is no deadline.
func (s *ExpertStore) Prefetch(layer uint32, experts []uint32, deadline time.Duration) error {
	if deadline == 0 {
		deadline = NoTimeout
	}
	within, err := milliseconds("the deadline", deadline)
	if err != nil {
		return err
	}
	return s.with(func(store *C.hoistway_experts) C.hoistway_status {
		return C.hoistway_experts_prefetch(store, C.uint32_t(layer), firstNumber(experts), C.uint64_t(len(experts)), within)
	})
}

// CancelBefore drops prefetches of layers before a layer that have not begun.
func (s *ExpertStore) CancelBefore(layer uint32) error {
	return s.with(func(store *C.hoistway_experts) C.hoistway_status {
		return C.hoistway_experts_cancel_before(store, C.uint32_t(layer))
	})
}

// SetBudget sets the budget, and evicts what exceeds it and is not leased.
func (s *ExpertStore) SetBudget(bytes uint64) error {
	return s.with(func(store *C.hoistway_experts) C.hoistway_status {
		return C.hoistway_experts_set_budget(store, C.uint64_t(bytes))
	})
}

// IsResident tells whether an expert is resident.
func (s *ExpertStore) IsResident(layer, expert uint32) (bool, error) {
	resident := new(C.bool)
	err := s.with(func(store *C.hoistway_experts) C.hoistway_status {
		return C.hoistway_experts_is_resident(store, C.uint32_t(layer), C.uint32_t(expert), resident)
	})
	return bool(*resident), err
}

// IsTensorResident tells whether a dense tensor is resident.
func (s *ExpertStore) IsTensorResident(name string) (bool, error) {
	names, err := newStrings("the name", name)
	if err != nil {
		return false, err
	}
	defer names.free()
	resident := new(C.bool)
	err = s.with(func(store *C.hoistway_experts) C.hoistway_status {
		return C.hoistway_experts_is_tensor_resident(store, names[0], resident)
	})
	return bool(*resident), err
}

// Evict evicts experts of a layer that are resident and not leased, and returns how many.
func (s *ExpertStore) Evict(layer uint32, experts []uint32) (uint64, error) {
	evicted := new(C.uint64_t)
	err := s.with(func(store *C.hoistway_experts) C.hoistway_status {
		return C.hoistway_experts_evict(store, C.uint32_t(layer), firstNumber(experts), C.uint64_t(len(experts)), evicted)
	})
	return uint64(*evicted), err
}

// EvictTensors evicts dense tensors that are resident and not leased, and returns how many.
func (s *ExpertStore) EvictTensors(names ...string) (uint64, error) {
	copies, err := newStrings("the name", names...)
	if err != nil {
		return 0, err
	}
	defer copies.free()
	evicted := new(C.uint64_t)
	err = s.with(func(store *C.hoistway_experts) C.hoistway_status {
		return C.hoistway_experts_evict_tensors(store, copies.first(), C.uint64_t(len(copies)), evicted)
	})
	return uint64(*evicted), err
}

// TensorAddress returns where a tensor lies in address space, with the backings "host_sparse" (all tensors) and "device_sparse"
// (stacked tensors): expert e of a stacked tensor lies e slices further. Only what is leased may be read there. The space lives as long as the store and its leases.
func (s *ExpertStore) TensorAddress(name string) (uintptr, error) {
	names, err := newStrings("the name", name)
	if err != nil {
		return 0, err
	}
	defer names.free()
	address := new(unsafe.Pointer)
	err = s.with(func(store *C.hoistway_experts) C.hoistway_status {
		return C.hoistway_experts_tensor_address(store, names[0], address)
	})
	return addressOf(address), err
}

// Packing says whether experts are read from a file that "hoistway moe pack" wrote beside the model.
type Packing struct {
	// State is "none", "used" or "refused".
	State string `json:"state"`
	// Path is the file, if there is one.
	Path string `json:"path"`
	// Reason is why it is refused.
	Reason string `json:"reason"`
}

// HostLevelStats is what the second level of a device's slots holds, and what it has done.
type HostLevelStats struct {
	// HeldBytes is how many bytes of pinned host memory it holds.
	HeldBytes uint64 `json:"held_bytes"`
	// Experts is how many experts are in it.
	Experts uint64 `json:"experts"`
	// Hits is how many experts were copied from it to the device, rather than read.
	Hits uint64 `json:"hits"`
	// BytesCopied is how many bytes these have.
	BytesCopied uint64 `json:"bytes_copied"`
	// Saved is how many evicted experts were copied to it.
	Saved uint64 `json:"saved"`
	// Failed is how many evicted experts could not be copied to it, and have to be read again.
	Failed uint64 `json:"failed"`
}

// ExpertStats is what a store has done since it was opened, and what it holds.
type ExpertStats struct {
	// Backing is the backing.
	Backing string `json:"backing"`
	// Policy is the policy.
	Policy string `json:"policy"`
	// Packing says whether experts are read from a file of packed experts.
	Packing Packing `json:"packing"`
	// Hits is how many experts and tensors of requests were resident, or being read already.
	Hits uint64 `json:"hits"`
	// Misses is how many had to be read, or copied from the second level.
	Misses uint64 `json:"misses"`
	// HitRate is the share of hits, between 0 and 1.
	HitRate float64 `json:"hit_rate"`
	// Evictions is how many experts and tensors were evicted.
	Evictions uint64 `json:"evictions"`
	// BytesRead is how many bytes were read.
	BytesRead uint64 `json:"bytes_read"`
	// Tokens is how many passes went through the layers.
	Tokens uint64 `json:"tokens"`
	// FaultsPerToken is how many experts and tensors had to be read for each token.
	FaultsPerToken float64 `json:"faults_per_token"`
	// BytesPerToken is how many bytes were read for each token.
	BytesPerToken float64 `json:"bytes_per_token"`
	// StallSeconds is how long requests waited, all together.
	StallSeconds float64 `json:"stall"`
	// LargestBatchBytes is how many bytes the largest request had.
	LargestBatchBytes uint64 `json:"largest_batch_bytes"`
	// PeakBytes is how many bytes were resident or being read at most.
	PeakBytes uint64 `json:"peak_bytes"`
	// UsedBytes is how many bytes are resident or being read.
	UsedBytes uint64 `json:"used_bytes"`
	// HeldBytes is how many bytes of memory the backing holds, also of free slots.
	HeldBytes uint64 `json:"held_bytes"`
	// HostLevel is the second level of "device_slots" in host memory, beside that; nil if there is none.
	HostLevel *HostLevelStats `json:"host_level"`
	// Resident is how many experts and tensors are resident.
	Resident uint64 `json:"resident"`
	// BudgetBytes is the budget.
	BudgetBytes uint64 `json:"budget_bytes"`
	// TokenCycleBytes is the memory that the experts of one token occupy; nil if that is not known.
	TokenCycleBytes *uint64 `json:"token_cycle_bytes"`
	// IsBelowTokenCycle tells whether the budget is smaller than that.
	IsBelowTokenCycle bool `json:"is_below_token_cycle"`
	// Prefetches is how many prefetches were begun.
	Prefetches uint64 `json:"prefetches"`
	// RefusedPrefetches is for how many there was no room.
	RefusedPrefetches uint64 `json:"refused_prefetches"`
	// FailedPrefetches is how many could not be read, or got no memory.
	FailedPrefetches uint64 `json:"failed_prefetches"`
	// DroppedPrefetches is how many ended before they were read, by demand, a deadline or the caller.
	DroppedPrefetches uint64 `json:"dropped_prefetches"`
	// UsefulPrefetches is how many a request used.
	UsefulPrefetches uint64 `json:"useful_prefetches"`
	// WastedPrefetches is how many were evicted before a request used them.
	WastedPrefetches uint64 `json:"wasted_prefetches"`

	// JSON is what the library said, with members that this version of the package does not know.
	JSON json.RawMessage `json:"-"`
}

// Stats tells what the store has done.
func (s *ExpertStore) Stats() (*ExpertStats, error) {
	said, err := s.say(func(store *C.hoistway_experts, place **C.char) C.hoistway_status {
		return C.hoistway_experts_stats(store, place)
	})
	if err != nil {
		return nil, err
	}
	stats := &ExpertStats{JSON: json.RawMessage(said)}
	return stats, parse("statistics", said, stats)
}

// ResidencyEvent is a change of residency.
type ResidencyEvent struct {
	// Change is "resident" or "evicted".
	Change string `json:"change"`
	// Layer and Expert name the expert; nil if it was a dense tensor.
	Layer  *uint32 `json:"layer"`
	Expert *uint32 `json:"expert"`
	// Tensor is the name of the dense tensor; nil if it was an expert.
	Tensor *string `json:"tensor"`
}

// Events takes the changes of residency since the last call, the oldest first, and the number of older ones that were lost
// because there were more than the option Events.
func (s *ExpertStore) Events() ([]ResidencyEvent, uint64, error) {
	said, err := s.say(func(store *C.hoistway_experts, place **C.char) C.hoistway_status {
		return C.hoistway_experts_events(store, place)
	})
	if err != nil {
		return nil, 0, err
	}
	var told struct {
		Events []ResidencyEvent `json:"events"`
		Lost   uint64           `json:"lost"`
	}
	err = parse("events", said, &told)
	return told.Events, told.Lost, err
}

func (s *ExpertStore) say(give func(store *C.hoistway_experts, place **C.char) C.hoistway_status) (string, error) {
	pointer, err := s.held().acquire()
	if err != nil {
		return "", err
	}
	defer s.handle.release()
	return text(func(place **C.char) C.hoistway_status { return give((*C.hoistway_experts)(pointer), place) })
}
