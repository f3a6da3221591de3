/* The C ABI of windlass, made by cbindgen from crates/windlass-capi. Link with -lwindlass, or load the library at run
 * time and ask windlass_abi_version() first.
 *
 * All functions may be called from any thread; a handle may be used by several at once, except while it is freed. Sizes
 * and offsets have 64 bits. Structures begin with their size, which the caller sets. No panic or exception gets out. */

#ifndef WINDLASS_H
#define WINDLASS_H

#include <stdbool.h>
#include <stdint.h>

// Version of this interface. It is raised when something is taken away or changes its meaning.
#define WINDLASS_ABI_VERSION 1

// `windlass_read.target`: memory of the host.
#define WINDLASS_TARGET_HOST 0

// `windlass_read.target`: a CUDA pointer, in the primary context of its device.
#define WINDLASS_TARGET_CUDA 1

// `windlass_read.target`: the function `sink`.
#define WINDLASS_TARGET_CALLBACK 2

// `windlass_reader_options.flags`: do not advise huge pages for destinations of 2 MiB and more.
#define WINDLASS_SMALL_PAGES 1

// Priority of reads that a caller waits for.
#define WINDLASS_DEMAND 0

// Priority of reads that a caller will probably want. They take half of the lanes at most, but one at least.
#define WINDLASS_PREFETCH 1

// Priority of reads that no caller waits for. They take room that neither demand nor prefetches want.
#define WINDLASS_BACKGROUND 2

// How a call, or a read, has ended.
enum windlass_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // All went well.
  WINDLASS_OK = 0,
  // It has not ended yet.
  WINDLASS_PENDING = 1,
  // An argument or an option makes no sense.
  WINDLASS_INVALID_ARGUMENT = 2,
  // There is no such file, or no such tensor.
  WINDLASS_NOT_FOUND = 3,
  // A file is not what its format allows.
  WINDLASS_INVALID_FILE = 4,
  // A file ends too early.
  WINDLASS_TRUNCATED = 5,
  // A file has changed since it was opened.
  WINDLASS_CHANGED = 6,
  // The system refused or failed an operation.
  WINDLASS_IO = 7,
  // The route that was named cannot carry the data.
  WINDLASS_ROUTE_UNAVAILABLE = 8,
  // A device is not there, or has failed.
  WINDLASS_DEVICE = 9,
  // There is not enough memory.
  WINDLASS_MEMORY = 10,
  // The caller has cancelled it.
  WINDLASS_CANCELLED = 11,
  // A defect of windlass. Please report it.
  WINDLASS_INTERNAL = 12,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum windlass_status windlass_status;
#else
typedef int32_t windlass_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Reads on their way.
typedef struct windlass_batch windlass_batch;

// What a checkpoint holds: its files and tensors. Its files stay open.
typedef struct windlass_catalog windlass_catalog;

// Threads and staging memory for reads, kept between batches.
typedef struct windlass_reader windlass_reader;

// How to open a checkpoint.
typedef struct {
  // `sizeof(windlass_catalog_options)`.
  uint64_t size;
  // Where a GGUF that is embedded in another file begins.
  uint64_t offset;
  // Not 0 to take files that break the specification of their format where no harm comes of it.
  int32_t lenient;
  // 0.
  int32_t reserved;
} windlass_catalog_options;

// One tensor. What it points to lives as long as the catalog.
typedef struct {
  // `sizeof(windlass_tensor)`, set by the caller; then, as far as members were filled in.
  uint64_t size;
  // Unique in the catalog.
  const char *name;
  // Type of its elements, such as "BF16" or "Q4_K".
  const char *dtype;
  // The type's number in GGUF; -1 if the file is no GGUF.
  int32_t ggml_type;
  // Length of `shape`.
  uint32_t dimensions;
  // Elements along each dimension, slowest first: the other way round than in GGUF.
  const uint64_t *shape;
  // The file that holds it.
  const char *path;
  // That file's number.
  uint64_t file;
  // Where its bytes begin in the file.
  uint64_t offset;
  // How many these are.
  uint64_t bytes;
} windlass_tensor;

// How to read.
typedef struct {
  // `sizeof(windlass_reader_options)`.
  uint64_t size;
  // "auto", "io_uring", "threads", "cached", "usrbio", "staged", "gds" or "gds-compat"; NULL is "auto".
  const char *route;
  // Most bytes of staging memory, for the host and for each device; 0 for the default.
  uint64_t memory_budget_bytes;
  // Reads at once; 0 for the default.
  uint64_t in_flight;
  // `WINDLASS_SMALL_PAGES` or 0.
  uint64_t flags;
} windlass_reader_options;

// Gets the bytes of a read in pieces, in any order, on threads of the reader's, for several reads at once. `position`
// counts from the read's first byte. Anything but 0 fails the read. It must return: no exception, no `longjmp`. It must
// not wait for reads of the same reader, nor free a batch.
typedef int32_t (*windlass_sink)(void *context, uint64_t position, const void *bytes, uint64_t length);

// Bytes of a file, and where they go. Members that a target does not need are not looked at.
typedef struct {
  // `sizeof(windlass_read)`, the same for all reads of a batch.
  uint64_t size;
  // A catalog, if the file is one of its files: the very file whose header was read, or an error. Else NULL.
  const windlass_catalog *catalog;
  // The number of that file.
  uint64_t file;
  // Without a catalog, the file; NULL if `fd` names it.
  const char *path;
  // Without a path, an open file. It stays the caller's, and may be closed once the reads were submitted.
  int32_t fd;
  // A `WINDLASS_TARGET_…`.
  int32_t target;
  // Number of the CUDA device.
  int32_t device;
  // 0.
  uint32_t reserved;
  // Where the bytes begin in the file.
  uint64_t offset;
  // How many are read: all of them, or the read fails.
  uint64_t length;
  // Memory of the host, or a CUDA pointer. Nobody else may use it until the read has ended.
  void *destination;
  // For `WINDLASS_TARGET_CALLBACK`.
  windlass_sink sink;
  // What `sink` is given.
  void *sink_context;
  // What messages call the read, such as the tensor's name; may be NULL.
  const char *name;
  // Set when the read ends, with release order, to 1 plus its status; may be NULL. `windlass_batch_status` may say
  // `WINDLASS_PENDING` for a moment longer.
  int32_t *done;
} windlass_read;

// Is told how far a batch has got, on the thread that waits for it; `false` cancels the batch. It must return: no
// exception, no `longjmp`. It must not free the batch.
typedef bool (*windlass_progress)(void *context, uint64_t bytes_done, uint64_t bytes_total);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The `WINDLASS_ABI_VERSION` that the library was built with.
uint32_t windlass_abi_version(void);

// Reads the headers behind `count` paths: safetensors and GGUF files, `*.safetensors.index.json`, directories, glob
// patterns. A split GGUF is opened by any of its files. `options` may be NULL.
//
// What the caller promises:
// `paths` must be `count` strings, `options` NULL or as its size says, `catalog` writable.
windlass_status windlass_catalog_open(const char *const *paths,
                                      uint64_t count,
                                      const windlass_catalog_options *options,
                                      windlass_catalog **catalog);

// Frees a catalog. NULL is fine.
//
// What the caller promises:
// `catalog` must come from `windlass_catalog_open`, and not be in use nor have been freed.
void windlass_catalog_free(windlass_catalog *catalog);

// How many tensors there are; 0 if `catalog` is NULL.
//
// What the caller promises:
// `catalog` must be NULL or a live catalog.
uint64_t windlass_catalog_tensor_count(const windlass_catalog *catalog);

// The tensor at a position, in the order of the files and of the bytes within each.
//
// What the caller promises:
// `catalog` must be a live catalog, `tensor` writable as far as its `size` says.
windlass_status windlass_catalog_tensor(const windlass_catalog *catalog,
                                        uint64_t index,
                                        windlass_tensor *tensor);

// The tensor of a name.
//
// What the caller promises:
// `catalog` must be a live catalog, `name` a string, `tensor` writable as far as its `size` says.
windlass_status windlass_catalog_find(const windlass_catalog *catalog,
                                      const char *name,
                                      windlass_tensor *tensor);

// Starts a reader. `options` may be NULL.
//
// What the caller promises:
// `options` must be NULL or as its size says, `reader` writable.
windlass_status windlass_reader_create(const windlass_reader_options *options, windlass_reader **reader);

// Ends a reader: what waits is cancelled, what is under way is waited for. Its batches stay, and tell how they ended.
// NULL is fine.
//
// What the caller promises:
// `reader` must come from `windlass_reader_create`, and not be in use nor have been freed.
void windlass_reader_free(windlass_reader *reader);

// Starts to read. Each read succeeds or fails for itself. This call fails, and starts nothing, if a read makes no sense
// or its file cannot be opened. `priority` is `WINDLASS_DEMAND`,
// `WINDLASS_PREFETCH` or `WINDLASS_BACKGROUND`.
//
// What the caller promises:
// `reader` must be live; `reads` must be `count` structures as their size says, whose strings live until this returns,
// and whose destinations, sinks with their contexts, and places for `done` live until the read has ended and are used by
// nobody else meanwhile; `batch` must be writable.
windlass_status windlass_batch_submit(const windlass_reader *reader,
                                      const windlass_read *reads,
                                      uint64_t count,
                                      int32_t priority,
                                      windlass_batch **batch);

// Waits for all reads, `timeout_ms` milliseconds at most, which makes them demand; `UINT64_MAX` is for ever. `progress`
// may be NULL.
//
// `WINDLASS_OK` if every read delivered, `WINDLASS_PENDING` if the time ran out; else how the first that failed did, in
// the order of the reads. Then all have ended, and `windlass_batch_status` tells which delivered.
//
// What the caller promises:
// `batch` must be live.
windlass_status windlass_batch_wait(const windlass_batch *batch,
                                    uint64_t timeout_ms,
                                    windlass_progress progress,
                                    void *progress_context);

// Waits for one read, `timeout_ms` milliseconds at most, which makes it demand; `UINT64_MAX` is for ever. Returns how
// it ended, or `WINDLASS_PENDING`.
//
// What the caller promises:
// `batch` must be live.
windlass_status windlass_batch_wait_read(const windlass_batch *batch,
                                         uint64_t index,
                                         uint64_t timeout_ms);

// The next read to end, each once, in the order in which they end. Waits `timeout_ms` milliseconds at most;
// `WINDLASS_PENDING` if none ended, `WINDLASS_NOT_FOUND` once all were told.
//
// What the caller promises:
// `batch` must be live, `index` writable.
windlass_status windlass_batch_next_ended(const windlass_batch *batch, uint64_t timeout_ms, uint64_t *index);

// How far a read has got: `WINDLASS_PENDING`, `WINDLASS_OK`, or how it failed. Never waits, and leaves the thread's last
// error as it is.
//
// What the caller promises:
// `batch` must be live.
windlass_status windlass_batch_status(const windlass_batch *batch,
                                      uint64_t index);

// Gives the sentence that says why a read failed; an empty one if it did not. Free it with `windlass_string_free`.
//
// What the caller promises:
// `batch` must be live, `message` writable.
windlass_status windlass_batch_error(const windlass_batch *batch,
                                     uint64_t index,
                                     char **message);

// Makes the priority of reads that have not begun demand.
//
// What the caller promises:
// `batch` must be live.
windlass_status windlass_batch_promote(const windlass_batch *batch);

// Reads that have not begun will not; those under way end as they may. Does not wait.
//
// What the caller promises:
// `batch` must be live.
windlass_status windlass_batch_cancel(const windlass_batch *batch);

// Gives what the batch has done so far, as JSON: the route of every byte, and why it was not a better one. Free it with
// `windlass_string_free`.
//
// What the caller promises:
// `batch` must be live, `json` writable.
windlass_status windlass_batch_report(const windlass_batch *batch,
                                      char **json);

// Frees a batch: what has not begun is cancelled, what is under way is waited for. After that nobody uses the
// destinations any more, unless a read into a device has failed with `WINDLASS_DEVICE`: then a copy may be under way
// until the device was waited for. NULL is fine.
//
// What the caller promises:
// `batch` must come from `windlass_batch_submit`, and not be in use nor have been freed.
void windlass_batch_free(windlass_batch *batch);

// Why this thread's last call that returned a status failed: a sentence in UTF-8; empty if it did not. Valid until the
// next such call. `windlass_batch_status` leaves it as it is.
const char *windlass_last_error(void);

// Version of the library, such as "0.1.0".
const char *windlass_version(void);

// Frees a string that a function of this library gave. NULL is fine.
//
// What the caller promises:
// `string` must come from this library, and not have been freed.
void windlass_string_free(char *string);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* WINDLASS_H */
