//go:build (linux || windows) && cgo

package hoistway

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
)

var background = context.Background()

func open(t *testing.T, path string) *Checkpoint {
	t.Helper()
	checkpoint, err := Open([]string{path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { checkpoint.Close() })
	return checkpoint
}

func newReader(t *testing.T, options ReaderOptions) *Reader {
	t.Helper()
	reader, err := NewReader(options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { reader.Close() })
	return reader
}

// hasCode fails the test unless the error is one of the library with this code and a sentence.
func hasCode(t *testing.T, err error, codes ...Code) *Error {
	t.Helper()
	var failure *Error
	if !errors.As(err, &failure) {
		t.Fatalf("%v is no error with one of the codes %v", err, codes)
	}
	for _, code := range codes {
		if failure.Code == code && len(failure.Message) > 10 {
			return failure
		}
	}
	t.Fatalf("%v has the code %v, not one of %v", err, failure.Code, codes)
	return nil
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestVersionIsThatOfTheLibrary(t *testing.T) {
	if version := Version(); strings.Count(version, ".") != 2 {
		t.Fatalf("version %q", version)
	}
}

func TestTensorsAreThoseOfTheFile(t *testing.T) {
	for _, write := range []func(*testing.T) (string, []stored){writeSafetensors, writeGGUF} {
		path, tensors := write(t)
		checkpoint := open(t, path)
		file, err := os.ReadFile(path)
		check(t, err)
		listed := checkpoint.Tensors()
		if len(listed) != len(tensors) {
			t.Fatalf("%d tensors of %d", len(listed), len(tensors))
		}
		for _, expected := range tensors {
			tensor, err := checkpoint.Tensor(expected.name)
			check(t, err)
			if tensor.DType != expected.dtype || tensor.Path != path || tensor.Bytes != uint64(len(expected.bytes)) {
				t.Fatalf("%+v", tensor)
			}
			if !reflect.DeepEqual(tensor.Shape, append([]uint64{}, expected.shape...)) {
				t.Fatalf("shape %v of %s is not %v", tensor.Shape, tensor.Name, expected.shape)
			}
			if !bytes.Equal(file[tensor.Offset:tensor.Offset+tensor.Bytes], expected.bytes) {
				t.Fatalf("%s is not at %d", tensor.Name, tensor.Offset)
			}
			if isGGUF := strings.HasSuffix(path, ".gguf"); (tensor.GGMLType >= 0) != isGGUF {
				t.Fatalf("type %d of %s in ggml", tensor.GGMLType, tensor.Name)
			}
		}
		listed[0].Shape[0] = 99
		if again := checkpoint.Tensors(); again[0].Shape[0] == 99 {
			t.Fatal("a caller changed the checkpoint")
		}
		_, err = checkpoint.Tensor("nothing")
		if failure := hasCode(t, err, CodeNotFound); failure.Tensor != "nothing" || failure.Offset != -1 {
			t.Fatalf("%+v", failure)
		}
	}
}

func TestWhatCannotBeOpenedIsATypedError(t *testing.T) {
	_, err := Open([]string{"/does/not/exist.gguf"})
	if failure := hasCode(t, err, CodeNotFound); failure.Path != "/does/not/exist.gguf" || !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("%+v", failure)
	}
	_, err = Open(nil)
	hasCode(t, err, CodeInvalidArgument)
	_, err = Open([]string{"a\x00b"})
	hasCode(t, err, CodeInvalidArgument)
	_, err = Open([]string{writeFile(t, "model.safetensors", []byte("no checkpoint at all"))})
	hasCode(t, err, CodeInvalidFile)

	path, _ := writeGGUF(t)
	check(t, os.Truncate(path, 50_000))
	_, err = Open([]string{path})
	hasCode(t, err, CodeInvalidFile, CodeTruncated)
}

func TestOptionsOfOpenReachTheLibrary(t *testing.T) {
	path, tensors := writeGGUF(t)
	file, err := os.ReadFile(path)
	check(t, err)
	embedded := writeFile(t, "embedded.bin", append(make([]byte, 4096), file...))
	_, err = Open([]string{embedded})
	hasCode(t, err, CodeInvalidFile)
	checkpoint, err := Open([]string{embedded}, AtOffset(4096), Lenient())
	check(t, err)
	defer checkpoint.Close()
	if len(checkpoint.Tensors()) != len(tensors) {
		t.Fatal("other tensors")
	}
}

func TestReadFillsTheMemoryOfTheCaller(t *testing.T) {
	for _, route := range []string{"", "auto", "threads"} {
		for _, write := range []func(*testing.T) (string, []stored){writeSafetensors, writeGGUF} {
			path, tensors := write(t)
			checkpoint, reader := open(t, path), newReader(t, ReaderOptions{Route: route, InFlight: 4, SmallPages: true})
			for _, expected := range tensors {
				memory := make([]byte, len(expected.bytes))
				report, err := reader.Read(background, checkpoint, expected.name, memory)
				check(t, err)
				if !bytes.Equal(memory, expected.bytes) {
					t.Fatalf("other bytes of %s", expected.name)
				}
				checkReport(t, report, uint64(len(memory)))
			}
		}
	}
}

// checkReport fails the test unless the report accounts for these bytes.
func checkReport(t *testing.T, report *Report, bytes uint64) {
	t.Helper()
	carried := uint64(0)
	for _, carrier := range report.Carriers {
		carried += carrier.TensorBytes
		if carrier.Route == "" || carrier.Access == "" {
			t.Fatalf("%+v", carrier)
		}
	}
	if report.DeliveredBytes != bytes || carried != bytes || report.Failed != 0 || report.Version != Version() {
		t.Fatalf("%d bytes: %+v", bytes, report)
	}
	if report.Priority != "demand" || len(report.JSON) == 0 || !strings.Contains(report.String(), "delivered") {
		t.Fatalf("%s", report.JSON)
	}
}

// A slice may be part of an object with pointers.
func TestReadFillsAPartOfAnObject(t *testing.T) {
	path, tensors := writeGGUF(t)
	checkpoint, reader := open(t, path), newReader(t, ReaderOptions{})
	object := &struct {
		name   *string
		memory [3200]byte
	}{name: new(string)}
	_, err := reader.Read(background, checkpoint, "token_embd.weight", object.memory[:])
	check(t, err)
	if !bytes.Equal(object.memory[:], tensors[0].bytes) {
		t.Fatal("other bytes")
	}
	object.memory = [3200]byte{}
	rows, err := OpenRows(reader, checkpoint, "token_embd.weight")
	check(t, err)
	defer rows.Close()
	check(t, rows.Gather([]uint64{1}, object.memory[:64]))
	if *object.name != "" || !bytes.Equal(object.memory[:64], tensors[0].bytes[64:128]) {
		t.Fatal("other bytes")
	}
}

func TestReadRangeReadsThatRange(t *testing.T) {
	path, tensors := writeSafetensors(t)
	checkpoint, reader := open(t, path), newReader(t, ReaderOptions{})
	memory := make([]byte, 1000)
	_, err := reader.ReadRange(background, checkpoint, "large", 4_000_003, memory)
	check(t, err)
	if !bytes.Equal(memory, tensors[0].bytes[4_000_003:4_001_003]) {
		t.Fatal("other bytes")
	}
	_, err = reader.ReadRange(background, checkpoint, "large", 5_000_001, nil)
	check(t, err)
	for _, begin := range []uint64{5_000_002, 4_999_500, ^uint64(0)} {
		_, err = reader.ReadRange(background, checkpoint, "large", begin, memory)
		hasCode(t, err, CodeInvalidArgument)
	}
	_, err = reader.Read(background, checkpoint, "few", make([]byte, 6))
	hasCode(t, err, CodeInvalidArgument)
	_, err = reader.Read(background, checkpoint, "nothing", nil)
	hasCode(t, err, CodeNotFound)
}

func TestLoadReadsAllOrSome(t *testing.T) {
	for _, write := range []func(*testing.T) (string, []stored){writeSafetensors, writeGGUF} {
		path, tensors := write(t)
		checkpoint, reader := open(t, path), newReader(t, ReaderOptions{})
		loaded, err := reader.Load(background, checkpoint, LoadOptions{})
		check(t, err)
		total := uint64(0)
		for index, expected := range tensors {
			found := loaded.Bytes(expected.name)
			if loaded.Tensors()[index].Name != expected.name || !bytes.Equal(found, expected.bytes) || cap(found) != len(found) {
				t.Fatalf("other bytes of %s", expected.name)
			}
			total += uint64(len(found))
		}
		checkReport(t, loaded.Report, total)

		names := []string{tensors[3].name, tensors[1].name, tensors[3].name}
		some, err := reader.Load(background, checkpoint, LoadOptions{Names: names})
		check(t, err)
		if len(some.Tensors()) != 2 || some.Bytes(tensors[0].name) != nil || !bytes.Equal(some.Bytes(names[0]), tensors[3].bytes) {
			t.Fatalf("%v", some.Tensors())
		}
		none, err := reader.Load(background, checkpoint, LoadOptions{Names: []string{}})
		check(t, err)
		if len(none.Tensors()) != 0 || none.Report.Reads != 0 {
			t.Fatalf("%v", none.Tensors())
		}
		_, err = reader.Load(background, checkpoint, LoadOptions{Names: []string{"nothing"}})
		hasCode(t, err, CodeNotFound)
		_, err = reader.Load(background, checkpoint, LoadOptions{MaxBytes: total - 1})
		hasCode(t, err, CodeMemory)
	}
}

func TestStreamVisitsTensorsInOrderWithinItsBudget(t *testing.T) {
	for _, write := range []func(*testing.T) (string, []stored){writeSafetensors, writeGGUF} {
		path, tensors := write(t)
		checkpoint, reader := open(t, path), newReader(t, ReaderOptions{})
		total, largest := uint64(0), uint64(0)
		for _, tensor := range tensors {
			bytes := uint64(len(tensor.bytes))
			total += bytes
			if bytes > largest {
				largest = bytes
			}
		}
		// All at once; halves that hold the largest tensor; and a budget that it takes alone.
		for _, budget := range []uint64{0, 2 * (largest + 2*block), largest + block} {
			visited := 0
			report, err := reader.Stream(background, checkpoint, StreamOptions{BudgetBytes: budget}, func(tensor Tensor, found []byte) error {
				if expected := tensors[visited]; tensor.Name != expected.name || !bytes.Equal(found, expected.bytes) {
					t.Errorf("other bytes of %s", tensor.Name)
				}
				visited++
				return nil
			})
			check(t, err)
			if visited != len(tensors) {
				t.Fatalf("%d tensors of %d", visited, len(tensors))
			}
			checkReport(t, report, total)
		}
		_, err := reader.Stream(background, checkpoint, StreamOptions{BudgetBytes: largest - 1}, func(Tensor, []byte) error {
			t.Error("a visit")
			return nil
		})
		if failure := hasCode(t, err, CodeMemory); failure.Tensor == "" {
			t.Fatalf("%+v", failure)
		}
		stopped := errors.New("stopped")
		_, err = reader.Stream(background, checkpoint, StreamOptions{}, func(Tensor, []byte) error { return stopped })
		if err != stopped {
			t.Fatal(err)
		}
	}
}

func TestAFileThatWasCutShortNamesTheTensor(t *testing.T) {
	path, _ := writeSafetensors(t)
	// Windows lets no writer in once the checkpoint is open.
	writer, err := os.OpenFile(path, os.O_WRONLY, 0)
	check(t, err)
	defer writer.Close()
	checkpoint, reader := open(t, path), newReader(t, ReaderOptions{})
	tensor, err := checkpoint.Tensor("odd")
	check(t, err)
	check(t, writer.Truncate(int64(tensor.Offset)+10))
	report, err := reader.Read(background, checkpoint, "odd", make([]byte, tensor.Bytes))
	failure := hasCode(t, err, CodeTruncated, CodeChanged)
	if failure.Path != path || failure.Tensor != "odd" || failure.Offset != int64(tensor.Offset) {
		t.Fatalf("%+v", failure)
	}
	if failure.Code == CodeTruncated && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatal("a truncated file is no unexpected end")
	}
	if report == nil || report.Failed != 1 || !strings.Contains(err.Error(), path) {
		t.Fatalf("%v: %+v", err, report)
	}
	_, err = reader.Load(background, checkpoint, LoadOptions{})
	hasCode(t, err, CodeTruncated, CodeChanged)
}

func TestACancelledContextEndsCalls(t *testing.T) {
	path, tensors := writeSafetensors(t)
	checkpoint, reader := open(t, path), newReader(t, ReaderOptions{})
	ctx, cancel := context.WithCancel(background)
	cancel()
	_, err := reader.Read(ctx, checkpoint, "few", make([]byte, 7))
	hasCode(t, err, CodeCancelled)
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}

	ctx, cancel = context.WithCancel(background)
	defer cancel()
	visits := 0
	_, err = reader.Stream(ctx, checkpoint, StreamOptions{}, func(Tensor, []byte) error {
		visits++
		cancel()
		return nil
	})
	if visits != 1 || !errors.Is(err, context.Canceled) {
		t.Fatalf("%d visits: %v", visits, err)
	}

	// Whenever the context ends, a call delivers everything or says that it was cancelled.
	for delay := time.Duration(0); delay < 4*time.Millisecond; delay += 100 * time.Microsecond {
		ctx, cancel := context.WithTimeout(background, delay)
		loaded, err := reader.Load(ctx, checkpoint, LoadOptions{})
		cancel()
		if err != nil {
			hasCode(t, err, CodeCancelled)
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
		} else if !bytes.Equal(loaded.Bytes("large"), tensors[0].bytes) {
			t.Fatal("other bytes")
		}
	}
}

// The library looks at the flag while it waits.
func TestTheFlagOfAContextIsSetOnceItEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(background)
	flag, stop := watch(ctx)
	defer stop()
	if atomic.LoadInt32(flag) != 0 {
		t.Fatal("cancelled before the context ended")
	}
	cancel()
	for atomic.LoadInt32(flag) == 0 {
		runtime.Gosched()
	}
	if flag, stop := watch(background); flag != nil {
		stop()
		t.Fatal("a context that never ends has a flag")
	}
}

func TestACallUnderWayIsCancelled(t *testing.T) {
	const length = 128 << 20
	header := fmt.Sprintf(`{"sparse":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, length, length)
	file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	path := writeFile(t, "sparse.safetensors", file)
	check(t, os.Truncate(path, int64(len(file))+length))
	checkpoint, reader := open(t, path), newReader(t, ReaderOptions{Route: "threads", InFlight: 1})
	ctx, cancel := context.WithTimeout(background, 20*time.Millisecond)
	defer cancel()
	report, err := reader.Read(ctx, checkpoint, "sparse", make([]byte, length))
	if err == nil {
		// The machine is fast.
		checkReport(t, report, length)
		return
	}
	if failure := hasCode(t, err, CodeCancelled); failure.Tensor != "" && failure.Tensor != "sparse" {
		t.Fatalf("%+v", failure)
	}
	if !errors.Is(err, context.DeadlineExceeded) || (report != nil && report.Failed != 1) {
		t.Fatalf("%v: %+v", err, report)
	}
}

func TestUseAfterCloseIsAnError(t *testing.T) {
	path, _ := writeGGUF(t)
	checkpoint, reader := open(t, path), newReader(t, ReaderOptions{})
	tensors := checkpoint.Tensors()
	check(t, checkpoint.Close())
	check(t, checkpoint.Close())
	if len(checkpoint.Tensors()) != len(tensors) {
		t.Fatal("descriptions are gone")
	}
	uses := map[string]func() error{
		"Read": func() error {
			_, err := reader.Read(background, checkpoint, "scale", make([]byte, 4))
			return err
		},
		"Load": func() error { _, err := reader.Load(background, checkpoint, LoadOptions{}); return err },
		"Stream": func() error {
			_, err := reader.Stream(background, checkpoint, StreamOptions{}, func(Tensor, []byte) error { return nil })
			return err
		},
		"OpenExperts": func() error { _, err := OpenExperts(checkpoint, ExpertOptions{}); return err },
		"OpenRows":    func() error { _, err := OpenRows(reader, checkpoint, "token_embd.weight"); return err },
		"OpenLayers":  func() error { _, err := OpenLayers(reader, checkpoint, LayerOptions{}); return err },
	}
	for name, use := range uses {
		if err := use(); !errors.Is(hasCode(t, err, CodeClosed), os.ErrClosed) {
			t.Fatal(name)
		}
	}
	other := open(t, path)
	check(t, reader.Close())
	check(t, reader.Close())
	_, err := reader.Read(background, other, "scale", make([]byte, 4))
	hasCode(t, err, CodeClosed)

	// Neither is nil, nor what was never opened.
	_, err = reader.Read(background, nil, "scale", nil)
	hasCode(t, err, CodeInvalidArgument)
	_, err = (*Reader)(nil).Load(background, other, LoadOptions{})
	hasCode(t, err, CodeInvalidArgument)
	_, err = (&Reader{}).Load(background, other, LoadOptions{})
	hasCode(t, err, CodeInvalidArgument)
	hasCode(t, (&ExpertStore{}).SetBudget(1), CodeInvalidArgument)
	hasCode(t, Part{}.View(nil), CodeInvalidArgument)
	check(t, (*Checkpoint)(nil).Close())
	check(t, (&Reader{}).Close())
}

func TestGoroutinesShareAReaderUntilItIsClosed(t *testing.T) {
	path, tensors := writeSafetensors(t)
	checkpoint, reader := open(t, path), newReader(t, ReaderOptions{InFlight: 4})
	var started, all sync.WaitGroup
	for number := 0; number < 8; number++ {
		started.Add(1)
		all.Add(1)
		go func() {
			defer all.Done()
			for round := 0; ; round++ {
				memory := make([]byte, len(tensors[5].bytes))
				_, err := reader.Read(background, checkpoint, "odd", memory)
				if round == 0 {
					started.Done()
				}
				if errors.Is(err, os.ErrClosed) {
					return
				}
				if err != nil || !bytes.Equal(memory, tensors[5].bytes) {
					t.Errorf("round %d: %v", round, err)
					return
				}
			}
		}()
	}
	started.Wait()
	check(t, reader.Close())
	check(t, checkpoint.Close())
	all.Wait()
}

func TestWhatIsDroppedIsFreedAndWhatIsUsedIsNot(t *testing.T) {
	path, tensors := writeSafetensors(t)
	for round := 0; round < 20; round++ {
		checkpoint, err := Open([]string{path})
		check(t, err)
		reader, err := NewReader(ReaderOptions{InFlight: 2})
		check(t, err)
		collected := make(chan struct{})
		go func() {
			runtime.GC()
			close(collected)
		}()
		// Neither is used again after this call, and neither is closed.
		loaded, err := reader.Load(background, checkpoint, LoadOptions{})
		check(t, err)
		<-collected
		runtime.GC()
		if !bytes.Equal(loaded.Bytes("large"), tensors[0].bytes) {
			t.Fatal("other bytes")
		}
	}
	freed := make(chan struct{})
	pointer := unsafe.Pointer(new(int64))
	func() { newHandle("test", pointer, func(unsafe.Pointer) { close(freed) }) }()
	for {
		runtime.GC()
		select {
		case <-freed:
			return
		case <-time.After(time.Millisecond):
		}
	}
}

// needGo skips a test that runs the program go where there is none, as under Wine.
func needGo(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip(err)
	}
}

func TestTheProgramOfTheDocumentationRuns(t *testing.T) {
	needGo(t)
	text, err := os.ReadFile("../../docs/go.md")
	check(t, err)
	program := strings.Split(strings.Split(string(text), "```go\n")[1], "```")[0]
	directory := filepath.Dir(writeFile(t, "main.go", []byte(program)))
	here, err := os.Getwd()
	check(t, err)
	module := fmt.Sprintf("module program\n\ngo 1.19\n\nrequire hoistway v0.0.0\n\nreplace hoistway => %s\n", here)
	check(t, os.WriteFile(filepath.Join(directory, "go.mod"), []byte(module), 0o600))
	path, tensors := writeGGUF(t)
	run := exec.Command("go", "run", ".", path)
	run.Dir = directory
	said, err := run.CombinedOutput()
	if err != nil || strings.Count(string(said), "1 of 1 reads delivered") != len(tensors) {
		t.Fatalf("%v: %s", err, said)
	}
}

func TestOtherSystemsAreRefusedByTheBuild(t *testing.T) {
	needGo(t)
	for environment, reason := range map[string]string{
		"GOOS=darwin":  "supports_Linux_and_Windows_only_so_far",
		"GOOS=windows": "needs_cgo",
		"GOOS=linux":   "needs_cgo",
	} {
		build := exec.Command("go", "build", "-o", os.DevNull, ".")
		build.Env = append(os.Environ(), environment, "GOARCH=amd64", "CGO_ENABLED=0")
		said, err := build.CombinedOutput()
		if err == nil || !strings.Contains(string(said), reason) {
			t.Fatalf("%s: %v: %s", environment, err, said)
		}
	}
}

func TestCodesHaveNames(t *testing.T) {
	for code := CodeInvalidArgument; code <= CodeInternal; code++ {
		if strings.HasPrefix(code.String(), "code ") {
			t.Fatal(code)
		}
	}
	if Code(99).String() != "code 99" {
		t.Fatal(Code(99))
	}
}
