//go:build linux && cgo

package hoistway

import (
	"bytes"
	"fmt"
	"os"
	"testing"

	"hoistway/internal/devicetest"
)

// needDriver starts the driver that tests of devices use, here and in the library.
func needDriver(t *testing.T) {
	t.Helper()
	path := os.Getenv("HOISTWAY_CUDA_DRIVER")
	if path == "" {
		t.Skip("HOISTWAY_CUDA_DRIVER names no driver; `just test-go` sets it to the stand-in")
	}
	check(t, devicetest.Start(path))
}

func TestLayersStreamToADevice(t *testing.T) {
	needDriver(t)
	path, tensors := writeGGUF(t)
	expected := map[string][]byte{}
	for _, tensor := range tensors {
		expected[tensor.name] = tensor.bytes
	}
	checkpoint, reader := open(t, path), newReader(t, ReaderOptions{})
	inHost, err := OpenLayers(reader, checkpoint, LayerOptions{})
	check(t, err)
	defer inHost.Close()
	layer, err := inHost.Next()
	check(t, err)
	hasCode(t, layer.UsedBehind(nil), CodeInvalidArgument)
	largest := uint64(0)
	for _, tensor := range layer.Tensors() {
		largest += (tensor.Bytes + 255) / 256 * 256
	}
	check(t, layer.Close())

	stream, err := devicetest.NewStream()
	check(t, err)
	// Memory for two layers of three: one that computes, and one that is read.
	options := LayerOptions{BudgetBytes: 2 * largest, Target: TargetCUDA}
	layers, err := OpenLayers(reader, checkpoint, options)
	check(t, err)
	for turn := 0; turn < 9; turn++ {
		layer, err := layers.Next()
		check(t, err)
		if layer.Name() != fmt.Sprintf("blk.%d", turn%3) || len(layer.Tensors()) != 4 {
			t.Fatalf("%s has %d tensors", layer.Name(), len(layer.Tensors()))
		}
		for _, tensor := range layer.Tensors() {
			if tensor.Target != TargetCUDA || tensor.Device != 0 || tensor.Address%256 != 0 {
				t.Fatalf("%+v", tensor)
			}
			found := make([]byte, tensor.Bytes)
			check(t, devicetest.ToHost(found, tensor.Address))
			if !bytes.Equal(found, expected[tensor.Name]) {
				t.Fatalf("other bytes of %s", tensor.Name)
			}
			hasCode(t, tensor.View(func([]byte) error { return nil }), CodeInvalidArgument)
		}
		// By its stream, by the default one, and by none.
		switch turn % 3 {
		case 0:
			check(t, layer.UsedBehind(stream))
		case 1:
			check(t, layer.UsedBehind(nil))
		}
		check(t, layer.Close())
		hasCode(t, layer.UsedBehind(stream), CodeClosed)
	}
	stats, err := layers.Stats()
	check(t, err)
	if stats.Served != 9 || stats.PeakDeviceBytes == 0 || stats.PeakDeviceBytes > 2*largest {
		t.Fatalf("%s", stats.JSON)
	}
	check(t, layers.Close())

	options.Device = 99
	_, err = OpenLayers(reader, checkpoint, options)
	hasCode(t, err, CodeDevice)
	options.Device, options.Target = 0, 99
	_, err = OpenLayers(reader, checkpoint, options)
	hasCode(t, err, CodeInvalidArgument)
	_, err = OpenLayers(reader, checkpoint, LayerOptions{Device: 1})
	hasCode(t, err, CodeInvalidArgument)
}

func TestExpertsAreLeasedInMemoryOfADevice(t *testing.T) {
	needDriver(t)
	path, _ := writeGGUF(t)
	file, err := os.ReadFile(path)
	check(t, err)
	options := ExpertOptions{Backing: "device_slots", Target: TargetCUDA, BudgetBytes: 60_000, HostLevelBytes: 1 << 20}
	store := openExperts(t, path, options)
	for turn := uint32(0); turn < 48; turn++ {
		lease, err := store.Ensure(turn%3, []uint32{turn % 8, (turn + 3) % 8})
		check(t, err)
		for position := 0; position < lease.Len(); position++ {
			for _, part := range lease.Parts(position) {
				found := make([]byte, part.Bytes)
				check(t, devicetest.ToHost(found, part.Address))
				if part.Target != TargetCUDA || !bytes.Equal(found, file[part.Offset:part.Offset+part.Bytes]) {
					t.Fatalf("%+v", part)
				}
			}
		}
		check(t, lease.Close())
	}
	stats, err := store.Stats()
	check(t, err)
	if stats.HostLevel == nil || stats.HostLevel.Hits == 0 || stats.HostLevel.HeldBytes > 1<<20 {
		t.Fatalf("%s", stats.JSON)
	}
	_, err = OpenExperts(open(t, path), ExpertOptions{HostLevelBytes: 1 << 20})
	hasCode(t, err, CodeInvalidArgument)
}
