// Package hoistway moves the tensors of checkpoints (safetensors, GGUF) between storage and memory, with a report of the route
// of every byte. It calls the C library of hoistway through cgo, on Linux and Windows.
//
//	checkpoint, err := hoistway.Open([]string{"model.gguf"})
//	if err != nil {
//		return err
//	}
//	defer checkpoint.Close()
//	reader, err := hoistway.NewReader(hoistway.ReaderOptions{})
//	if err != nil {
//		return err
//	}
//	defer reader.Close()
//	loaded, err := reader.Load(ctx, checkpoint, hoistway.LoadOptions{})
//	if err != nil {
//		return err
//	}
//	fmt.Print(loaded.Report)
//
// # Models larger than memory
//
// An [ExpertStore] reads the experts that a router chooses, under a budget, and leases them. [Rows] reads rows of a table.
// A [LayerStream] goes through the layers of a dense model again and again.
//
// # Ownership
//
// The library writes to Go memory only during a call, so the garbage collector owns what Read, Load and Gather fill. The
// slices that [Part.View], [LayerTensor.View] and the function of [Reader.Stream] get are valid until that function returns.
//
// A Checkpoint, a Reader and everything opened from them is closed on its own, in any order: what needs the files or the
// threads of another keeps them. Close is safe to call twice. A call after Close returns an [Error] with [CodeClosed]. A call
// under way when Close is called goes on, and the last such call frees the resource. What is dropped without Close is freed
// after the garbage collector finds it, which may be late: Close leases and layers, as they take room of a budget.
//
// # Goroutines
//
// All methods may be called from several goroutines at once. A call that reads holds a thread of the system until it returns.
//
// # Errors
//
// Every error of the library is an [*Error], with a code, and the file, the tensor and the offset where they are known.
package hoistway
