//go:build (linux || windows) && cgo

package hoistway

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"
)

func openExperts(t *testing.T, path string, options ExpertOptions) *ExpertStore {
	t.Helper()
	checkpoint := open(t, path)
	store, err := OpenExperts(checkpoint, options)
	check(t, err)
	check(t, checkpoint.Close())
	t.Cleanup(func() { store.Close() })
	return store
}

// checkParts fails the test unless the parts are the file's bytes.
func checkParts(t *testing.T, path string, lease *Lease) {
	t.Helper()
	file, err := os.ReadFile(path)
	check(t, err)
	for position := 0; position < lease.Len(); position++ {
		for _, part := range lease.Parts(position) {
			check(t, part.View(func(found []byte) error {
				if uint64(len(found)) != part.Bytes || !bytes.Equal(found, file[part.Offset:part.Offset+part.Bytes]) {
					return fmt.Errorf("other bytes of %s", part.Tensor)
				}
				return nil
			}))
			if part.Target != TargetHost || part.Address == 0 {
				t.Fatalf("%+v", part)
			}
		}
	}
}

func TestExpertsAreLeasedUnderABudget(t *testing.T) {
	path, _ := writeGGUF(t)
	store := openExperts(t, path, ExpertOptions{Policy: "lru", BudgetBytes: 1 << 20, Events: 100, Route: "threads"})
	model, err := store.Model()
	check(t, err)
	if model.Layers != 3 || model.Experts != 24 || model.ExpertsPerToken != 2 || model.DenseTensors == 0 {
		t.Fatalf("%+v", model)
	}
	layers, err := store.Layers()
	check(t, err)
	if len(layers) != 3 || layers[2].Layer != 2 || layers[2].Experts != 8 || layers[2].DemandBytes != 2*layers[2].ExpertBytes {
		t.Fatalf("%+v", layers)
	}

	check(t, store.Observe(0, []uint32{3, 5}, []float32{0.75, 0.25}))
	check(t, store.Observe(1, []uint32{3, 5}, nil))
	check(t, store.Prefetch(1, []uint32{3}, 0))
	check(t, store.CancelBefore(2))
	lease, err := store.Ensure(0, []uint32{3, 5})
	check(t, err)
	if lease.Len() != 2 || len(lease.Parts(1)) != 3 || lease.Parts(2) != nil || lease.Parts(-1) != nil {
		t.Fatalf("%d experts", lease.Len())
	}
	part := lease.Parts(0)[0]
	if part.Role != "gate" || part.Component != "weight" || part.DType != "F16" || len(part.Shape) != 2 || part.Slot < 0 {
		t.Fatalf("%+v", part)
	}
	checkParts(t, path, lease)
	resident, err := store.IsResident(0, 3)
	check(t, err)
	evicted, err := store.Evict(0, []uint32{3, 5})
	check(t, err)
	if !resident || evicted != 0 {
		t.Fatal("what is leased was evicted")
	}
	// The view keeps the bytes, even if the lease is closed meanwhile.
	check(t, part.View(func(found []byte) error {
		check(t, lease.Close())
		evicted, err := store.Evict(0, []uint32{3})
		if err == nil && evicted != 0 {
			err = errors.New("evicted during a view")
		}
		return err
	}))
	hasCode(t, part.View(func([]byte) error { return nil }), CodeClosed)
	check(t, lease.Close())
	evicted, err = store.Evict(0, []uint32{3, 5})
	check(t, err)
	if evicted != 2 {
		t.Fatalf("%d evicted", evicted)
	}

	stats, err := store.Stats()
	check(t, err)
	if stats.Misses != 2 || stats.Policy != "lru" || stats.Packing.State != "none" || stats.Backing != "host_slots" || stats.BudgetBytes != 1<<20 || len(stats.JSON) == 0 {
		t.Fatalf("%s", stats.JSON)
	}
	events, lost, err := store.Events()
	check(t, err)
	if lost != 0 || len(events) < 4 || events[0].Change != "resident" || events[0].Layer == nil || events[0].Tensor != nil {
		t.Fatalf("%d lost of %+v", lost, events)
	}
}

func TestDenseTensorsAreLeasedByName(t *testing.T) {
	path, _ := writeGGUF(t)
	store := openExperts(t, path, ExpertOptions{})
	lease, err := store.EnsureTensors("token_embd.weight", "blk.1.attn_q.weight", "scale")
	check(t, err)
	checkParts(t, path, lease)
	if parts := lease.Parts(2); lease.Len() != 3 || len(parts) != 1 || parts[0].Role != "dense" || len(parts[0].Shape) != 0 {
		t.Fatalf("%+v", parts)
	}
	resident, err := store.IsTensorResident("scale")
	check(t, err)
	check(t, lease.Close())
	evicted, err := store.EvictTensors("scale")
	check(t, err)
	if !resident || evicted != 1 {
		t.Fatalf("%d evicted", evicted)
	}
}

func TestSparseExpertsHaveAnAddress(t *testing.T) {
	path, _ := writeGGUF(t)
	store := openExperts(t, path, ExpertOptions{Backing: "host_sparse"})
	lease, err := store.Ensure(1, []uint32{4})
	check(t, err)
	defer lease.Close()
	part := lease.Parts(0)[0]
	address, err := store.TensorAddress(part.Tensor)
	check(t, err)
	if part.Address != address+4*uintptr(part.Bytes) || part.Slot != -1 {
		t.Fatalf("%#x is not expert 4 of %#x", part.Address, address)
	}
	_, err = store.TensorAddress("nothing")
	hasCode(t, err, CodeNotFound)
}

func TestWhatAStoreRefusesIsATypedError(t *testing.T) {
	path, _ := writeGGUF(t)
	checkpoint := open(t, path)
	for _, options := range []ExpertOptions{
		{Backing: "paper"}, {Policy: "none\x00"}, {Route: "mapped"}, {Timeout: -1}, {Backing: "device_slots"}, {Backing: "device_sparse"},
	} {
		_, err := OpenExperts(checkpoint, options)
		hasCode(t, err, CodeInvalidArgument)
	}
	_, err := OpenExperts(checkpoint, ExpertOptions{BudgetBytes: 1})
	hasCode(t, err, CodeMemory)

	store := openExperts(t, path, ExpertOptions{BudgetBytes: 60_000, Timeout: time.Microsecond})
	_, err = store.Ensure(0, []uint32{8})
	hasCode(t, err, CodeNotFound)
	_, err = store.Ensure(9, []uint32{0})
	hasCode(t, err, CodeNotFound)
	_, err = store.EnsureTensors("nothing")
	hasCode(t, err, CodeNotFound)
	_, err = store.EnsureTensors("a\x00b")
	hasCode(t, err, CodeInvalidArgument)
	hasCode(t, store.Observe(0, []uint32{1}, []float32{}), CodeInvalidArgument)
	hasCode(t, store.Prefetch(0, []uint32{1}, -1), CodeInvalidArgument)
	hasCode(t, store.SetBudget(1), CodeMemory)
	check(t, store.Close())
	_, err = store.Ensure(0, []uint32{1})
	hasCode(t, err, CodeClosed)
	_, err = store.Stats()
	hasCode(t, err, CodeClosed)
}

func TestRowsAreGathered(t *testing.T) {
	path, tensors := writeGGUF(t)
	checkpoint, reader := open(t, path), newReader(t, ReaderOptions{InFlight: 64})
	rows, err := OpenRows(reader, checkpoint, "token_embd.weight")
	check(t, err)
	check(t, reader.Close())
	check(t, checkpoint.Close())
	if rows.Count() != 50 || rows.RowBytes() != 64 {
		t.Fatalf("%d rows of %d bytes", rows.Count(), rows.RowBytes())
	}
	numbers := []uint64{49, 0, 7, 8, 49}
	memory := make([]byte, 5*64)
	check(t, rows.Gather(numbers, memory))
	for place, number := range numbers {
		if !bytes.Equal(memory[place*64:(place+1)*64], tensors[0].bytes[number*64:(number+1)*64]) {
			t.Fatalf("other bytes of row %d", number)
		}
	}
	check(t, rows.Gather(nil, nil))
	hasCode(t, rows.Gather(numbers, memory[1:]), CodeInvalidArgument)
	hasCode(t, rows.Gather([]uint64{50}, memory[:64]), CodeNotFound)
	check(t, rows.Close())
	hasCode(t, rows.Gather(numbers, memory), CodeClosed)
	hasCode(t, (*Rows)(nil).Gather(nil, nil), CodeInvalidArgument)
}

func TestLayersStreamAgainAndAgain(t *testing.T) {
	path, tensors := writeGGUF(t)
	expected := map[string][]byte{}
	for _, tensor := range tensors {
		expected[tensor.name] = tensor.bytes
	}
	checkpoint, reader := open(t, path), newReader(t, ReaderOptions{})
	layers, err := OpenLayers(reader, checkpoint, LayerOptions{})
	check(t, err)
	for turn := 0; turn < 6; turn++ {
		layer, err := layers.Next()
		check(t, err)
		if layer.Name() != fmt.Sprintf("blk.%d", turn%3) || len(layer.Tensors()) != 4 {
			t.Fatalf("%s has %d tensors", layer.Name(), len(layer.Tensors()))
		}
		for _, tensor := range layer.Tensors() {
			check(t, tensor.View(func(found []byte) error {
				if !bytes.Equal(found, expected[tensor.Name]) {
					return fmt.Errorf("other bytes of %s", tensor.Name)
				}
				return nil
			}))
		}
		check(t, layer.Close())
		hasCode(t, layer.Tensors()[0].View(nil), CodeClosed)
	}
	stats, err := layers.Stats()
	check(t, err)
	if stats.Served != 6 || stats.Layers != 3 || stats.BytesRead == 0 {
		t.Fatalf("%s", stats.JSON)
	}
	check(t, layers.Close())
	_, err = layers.Next()
	hasCode(t, err, CodeClosed)
}

func TestLayersMayBeNamed(t *testing.T) {
	path, _ := writeGGUF(t)
	checkpoint, reader := open(t, path), newReader(t, ReaderOptions{})
	options := LayerOptions{
		BudgetBytes: 3 * 4096,
		Timeout:     50 * time.Millisecond,
		Layers:      []LayerSpec{{"first", []string{"blk.0.attn_q.weight"}}, {"second", []string{"blk.2.attn_q.weight"}}},
	}
	layers, err := OpenLayers(reader, checkpoint, options)
	check(t, err)
	defer layers.Close()
	layer, err := layers.Next()
	check(t, err)
	// The budget has room for one layer, which this test holds.
	_, err = layers.Next()
	hasCode(t, err, CodeRefused)
	check(t, layer.Close())
	layer, err = layers.Next()
	check(t, err)
	if layer.Name() != "second" {
		t.Fatal(layer.Name())
	}
	check(t, layer.Close())

	for _, wrong := range [][]LayerSpec{{}, {{"first", []string{"a\x00b"}}}, {{"first", nil}}} {
		options.Layers = wrong
		_, err = OpenLayers(reader, checkpoint, options)
		hasCode(t, err, CodeInvalidArgument)
	}
	options.Layers = []LayerSpec{{"first", []string{"nothing"}}}
	_, err = OpenLayers(reader, checkpoint, options)
	hasCode(t, err, CodeNotFound)
	_, err = OpenLayers(reader, checkpoint, LayerOptions{BudgetBytes: 1000})
	hasCode(t, err, CodeMemory)
}

func TestClosingEndsAWaitForRoom(t *testing.T) {
	path, _ := writeGGUF(t)
	checkpoint, reader := open(t, path), newReader(t, ReaderOptions{})
	layers, err := OpenLayers(reader, checkpoint, LayerOptions{
		BudgetBytes: 3 * 4096,
		Timeout:     NoTimeout,
		Layers:      []LayerSpec{{"first", []string{"blk.0.attn_q.weight"}}, {"second", []string{"blk.2.attn_q.weight"}}},
	})
	check(t, err)
	layer, err := layers.Next()
	check(t, err)
	ended := make(chan error)
	go func() {
		_, err := layers.Next()
		ended <- err
	}()
	// Nothing tells that the goroutine waits for room.
	time.Sleep(50 * time.Millisecond)
	check(t, layers.Close())
	// It is closed already where the goroutine is late.
	hasCode(t, <-ended, CodeCancelled, CodeClosed)
	check(t, layer.Close())
}

func TestDurationsBecomeMilliseconds(t *testing.T) {
	for duration, expected := range map[time.Duration]uint64{
		0: 0, time.Nanosecond: 1, time.Millisecond: 1, 1500 * time.Microsecond: 2, NoTimeout: ^uint64(0),
	} {
		if found, err := milliseconds("the timeout", duration); err != nil || uint64(found) != expected {
			t.Fatalf("%v is %d ms: %v", duration, found, err)
		}
	}
}
