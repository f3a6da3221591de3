//go:build (linux || windows) && cgo

package hoistway

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// stored is a tensor of a file that a test writes. The shape has the slowest dimension first.
type stored struct {
	name  string
	dtype string
	shape []uint64
	bytes []byte
}

// pattern returns bytes that differ from place to place and from seed to seed.
func pattern(seed string, length int) []byte {
	state := uint64(7)
	for _, one := range []byte(seed) {
		state = state*31 + uint64(one)
	}
	made := make([]byte, length)
	for place := range made {
		made[place] = byte((state + uint64(place)) * 0x9E3779B97F4A7C15 >> 40)
	}
	return made
}

func newStored(name, dtype string, elementBytes int, shape ...uint64) stored {
	length := elementBytes
	for _, count := range shape {
		length *= int(count)
	}
	return stored{name, dtype, shape, pattern(name, length)}
}

// writeSafetensors writes a file with tensors of no bytes, no dimension, few bytes and several chunks, at odd offsets.
func writeSafetensors(t *testing.T) (string, []stored) {
	t.Helper()
	tensors := []stored{
		newStored("large", "U8", 1, 5_000_001),
		newStored("empty", "U8", 1, 0),
		newStored("scalar", "F32", 4),
		newStored("few", "U8", 1, 7),
		newStored("table", "F32", 4, 50, 16),
		newStored("odd", "U8", 1, 123_457),
	}
	var order []string
	var data []byte
	for _, tensor := range tensors {
		shape, err := json.Marshal(append([]uint64{}, tensor.shape...))
		if err != nil {
			t.Fatal(err)
		}
		end := len(data) + len(tensor.bytes)
		order = append(order, fmt.Sprintf(`"%s":{"dtype":"%s","shape":%s,"data_offsets":[%d,%d]}`,
			tensor.name, tensor.dtype, shape, len(data), end))
		data = append(data, tensor.bytes...)
	}
	var header bytes.Buffer
	for index, entry := range order {
		header.WriteString(map[bool]string{true: "{", false: ","}[index == 0] + entry)
	}
	header.WriteString("}")
	file := binary.LittleEndian.AppendUint64(nil, uint64(header.Len()))
	return writeFile(t, "model.safetensors", append(append(file, header.Bytes()...), data...)), tensors
}

// writeGGUF writes a model of 3 layers with 8 experts, of which a token uses 2.
func writeGGUF(t *testing.T) (string, []stored) {
	t.Helper()
	tensors := []stored{newStored("token_embd.weight", "F32", 4, 50, 16), newStored("scale", "F32", 4)}
	for layer := 0; layer < 3; layer++ {
		for _, role := range []string{"gate", "up", "down"} {
			tensors = append(tensors, newStored(fmt.Sprintf("blk.%d.ffn_%s_exps.weight", layer, role), "F16", 2, 8, 37, 96))
		}
		tensors = append(tensors, newStored(fmt.Sprintf("blk.%d.attn_q.weight", layer), "F32", 4, 33, 41))
	}
	order := binary.LittleEndian
	file := []byte("GGUF")
	text := func(text string) { file = append(order.AppendUint64(file, uint64(len(text))), text...) }
	file = order.AppendUint32(file, 3)
	file = order.AppendUint64(file, uint64(len(tensors)))
	file = order.AppendUint64(file, 2)
	text("general.architecture")
	file = order.AppendUint32(file, 8)
	text("test")
	text("test.expert_used_count")
	file = order.AppendUint32(file, 4)
	file = order.AppendUint32(file, 2)
	const alignment = 32
	pad := func(bytes []byte) []byte {
		return append(bytes, make([]byte, (alignment-len(bytes)%alignment)%alignment)...)
	}
	var data []byte
	for _, tensor := range tensors {
		text(tensor.name)
		file = order.AppendUint32(file, uint32(len(tensor.shape)))
		for index := len(tensor.shape); index > 0; index-- {
			file = order.AppendUint64(file, tensor.shape[index-1])
		}
		file = order.AppendUint32(file, map[string]uint32{"F32": 0, "F16": 1}[tensor.dtype])
		file = order.AppendUint64(file, uint64(len(data)))
		data = pad(append(data, tensor.bytes...))
	}
	return writeFile(t, "model.gguf", append(pad(file), data...)), tensors
}

func writeFile(t *testing.T, name string, bytes []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, bytes, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
