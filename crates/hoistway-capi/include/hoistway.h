/* The C ABI of hoistway, made by cbindgen from crates/hoistway-capi. Link with -lhoistway, or load the library at run
 * time and ask hoistway_abi_version() first.
 *
 * All functions may be called from any thread; a handle may be used by several at once, except while it is freed. Sizes
 * and offsets have 64 bits. Structures begin with their size, which the caller sets, but for small ones that say that they
 * never grow. No panic or exception gets out. */

#ifndef HOISTWAY_H
#define HOISTWAY_H

#include <stdbool.h>
#include <stdint.h>

// Version of this interface. It is raised when something is taken away or changes its meaning.
#define HOISTWAY_ABI_VERSION 1

// `hoistway_kv_options.flags`: do not compare the checksums of blocks that a sync covers.
#define HOISTWAY_KV_NO_VERIFY 1

// `hoistway_kv_far_options.flags`: do not store blocks in the near tier that are loaded from the far one.
#define HOISTWAY_KV_NO_PROMOTE 1

// `hoistway_kv_request.flags`: tell of the end by `hoistway_kv_event_fd` and `hoistway_kv_drain`, too.
#define HOISTWAY_KV_NOTIFY 1

// `hoistway_read.target`: memory of the host.
#define HOISTWAY_TARGET_HOST 0

// `hoistway_read.target`: a CUDA pointer, in the primary context of its device.
#define HOISTWAY_TARGET_CUDA 1

// `hoistway_read.target`: the function `sink`.
#define HOISTWAY_TARGET_CALLBACK 2

// `hoistway_read.target`: a pointer of HIP, to memory of a ROCm device.
#define HOISTWAY_TARGET_ROCM 3

// `hoistway_reader_options.flags`: do not advise huge pages for destinations of 2 MiB and more.
#define HOISTWAY_SMALL_PAGES 1

// Priority of reads that a caller waits for.
#define HOISTWAY_DEMAND 0

// Priority of reads that a caller will probably want. They take half of the lanes at most, but one at least.
#define HOISTWAY_PREFETCH 1

// Priority of reads that no caller waits for. They take room that neither demand nor prefetches want.
#define HOISTWAY_BACKGROUND 2

// How a call, or a read, has ended.
enum hoistway_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // All went well.
  HOISTWAY_OK = 0,
  // It has not ended yet.
  HOISTWAY_PENDING = 1,
  // An argument or an option makes no sense.
  HOISTWAY_INVALID_ARGUMENT = 2,
  // There is no such file, tensor, expert, layer or row.
  HOISTWAY_NOT_FOUND = 3,
  // A file is not what its format allows.
  HOISTWAY_INVALID_FILE = 4,
  // A file ends too early.
  HOISTWAY_TRUNCATED = 5,
  // A file has changed since it was opened.
  HOISTWAY_CHANGED = 6,
  // The system refused or failed an operation.
  HOISTWAY_IO = 7,
  // The route that was named cannot carry the data.
  HOISTWAY_ROUTE_UNAVAILABLE = 8,
  // A device is not there, or has failed.
  HOISTWAY_DEVICE = 9,
  // There is not enough memory.
  HOISTWAY_MEMORY = 10,
  // The caller has cancelled it.
  HOISTWAY_CANCELLED = 11,
  // A defect of hoistway. Please report it.
  HOISTWAY_INTERNAL = 12,
  // A block of a KV store is not what was stored. It is a miss from now on.
  HOISTWAY_CORRUPT = 13,
  // A store has no room for it, or too much is under way.
  HOISTWAY_REFUSED = 14,
  // It did not end within the time that it was given.
  HOISTWAY_TIMED_OUT = 15,
  // A store was closed, or opened by the parent of this process.
  HOISTWAY_CLOSED = 16,
  // A KV store was opened for reading only.
  HOISTWAY_READ_ONLY = 17,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum hoistway_status hoistway_status;
#else
typedef int32_t hoistway_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What became of an item.
enum hoistway_kv_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Loaded and verified, or stored.
  HOISTWAY_KV_OK = 0,
  // A store of a block that is there already, or that is being stored by another request. Nothing was written.
  HOISTWAY_KV_EXISTS = 1,
  // A load of a block that is not there.
  HOISTWAY_KV_MISS = 2,
  // A load of a block whose time was over.
  HOISTWAY_KV_EXPIRED = 3,
  // A load of a block that is not what was stored. It is a miss from now on; the memory holds anything.
  HOISTWAY_KV_CORRUPT = 4,
  // The memory has another length than the shard, or the block other shards. The block stays; the memory holds anything.
  HOISTWAY_KV_MISMATCH = 5,
  // A store that was refused: everything that could be evicted is in use, or the file system is full.
  HOISTWAY_KV_NO_ROOM = 6,
  // A store that was refused: the namespace has used up its quota.
  HOISTWAY_KV_QUOTA = 7,
  // A store that was refused: too many bytes are under way.
  HOISTWAY_KV_BUSY = 8,
  // A store that was refused: it was not asked for before.
  HOISTWAY_KV_NOT_ADMITTED = 9,
  // A store that was refused: it is larger than a segment.
  HOISTWAY_KV_TOO_LARGE = 10,
  // It took too long. The memory is the store's until the ticket is released.
  HOISTWAY_KV_TIMED_OUT = 11,
  // It was cancelled. The memory is the store's until the ticket is released.
  HOISTWAY_KV_CANCELLED = 12,
  // The system's error, by `error`, which says nothing of the block: it stays.
  HOISTWAY_KV_IO = 13,
  // Something that this version of the interface has no name for: the ticket's report has.
  HOISTWAY_KV_OTHER = 14,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum hoistway_kv_status hoistway_kv_status;
#else
typedef int32_t hoistway_kv_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Reads on their way.
typedef struct hoistway_batch hoistway_batch;

// What a checkpoint holds: its files and tensors. Its files stay open.
typedef struct hoistway_catalog hoistway_catalog;

// A store of a model's experts and dense tensors, which are read as they are used and evicted when a budget says so.
typedef struct hoistway_experts hoistway_experts;

// An open KV store. Linux only, as is all that has to do with it.
typedef struct hoistway_kv hoistway_kv;

// A namespace of a KV store, which it keeps open.
typedef struct hoistway_kv_namespace hoistway_kv_namespace;

// Memory that a KV store was told of ahead.
typedef struct hoistway_kv_region hoistway_kv_region;

// A request under way.
typedef struct hoistway_kv_ticket hoistway_kv_ticket;

// A layer whose bytes are in memory until it is freed.
typedef struct hoistway_layer hoistway_layer;

// Layers of a model, one after the other, again and again.
typedef struct hoistway_layers hoistway_layers;

// Experts or dense tensors that are resident, and stay where they are until it is freed.
typedef struct hoistway_lease hoistway_lease;

// Threads and staging memory for reads, kept between batches.
typedef struct hoistway_reader hoistway_reader;

// A table in a file, of rows of equal length, such as an embedding.
typedef struct hoistway_rows hoistway_rows;

// How to open a checkpoint.
typedef struct {
  // `sizeof(hoistway_catalog_options)`.
  uint64_t size;
  // Where a GGUF that is embedded in another file begins.
  uint64_t offset;
  // Not 0 to take files that break the specification of their format where no harm comes of it.
  int32_t lenient;
  // 0.
  int32_t reserved;
} hoistway_catalog_options;

// One tensor. What it points to lives as long as the catalog.
typedef struct {
  // `sizeof(hoistway_tensor)`, set by the caller; then, as far as members were filled in.
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
} hoistway_tensor;

// How to open a store of experts. Strings that are NULL, and numbers that are 0, are defaults.
typedef struct {
  // `sizeof(hoistway_experts_options)`.
  uint64_t size;
  // "host_slots", "host_sparse" or "device_slots"; NULL is "host_slots".
  const char *backing;
  // "ewma2", "lru", "slru", "lfu" or "arc"; NULL is "ewma2".
  const char *policy;
  // "auto", "io_uring", "overlapped", "threads", "cached", "usrbio" or "directstorage"; NULL is "auto".
  const char *route;
  // Most bytes that resident and arriving experts and tensors take. One request may exceed it by its own demand.
  // 0 for 4 GiB.
  uint64_t budget_bytes;
  // With "device_slots", bytes beside the budget for the demand of one request; 0 for that of one token in one layer.
  uint64_t batch_bytes;
  // With "device_slots", bytes of the budget for dense tensors; 0 for an eighth at most.
  uint64_t dense_bytes;
  // Milliseconds that a request waits for room and for reads; 0 for 60,000, `UINT64_MAX` for as long as it takes.
  uint64_t timeout_ms;
  // Changes of residency that are kept for `hoistway_experts_events`.
  uint64_t events;
  // Most bytes of staging memory of its reader; 0 for the default.
  uint64_t memory_budget_bytes;
  // Reads at once; 0 for the default.
  uint64_t in_flight;
  // Experts that a token uses in each layer; 0 for what the headers or `config.json` say.
  uint32_t experts_per_token;
  // With "device_slots", `HOISTWAY_TARGET_CUDA` or `HOISTWAY_TARGET_ROCM`; else 0.
  int32_t target;
  // Number of the device.
  int32_t device;
  // 0.
  uint32_t reserved;
} hoistway_experts_options;

// A model as a store streams it.
typedef struct {
  // `sizeof(hoistway_experts_model)`, set by the caller; then, as far as members were filled in.
  uint64_t size;
  // Layers that have experts.
  uint64_t layers;
  // Experts of all layers.
  uint64_t experts;
  // Bytes of all experts.
  uint64_t expert_bytes;
  // Tensors that hold no expert.
  uint64_t dense_tensors;
  // Bytes of these.
  uint64_t dense_bytes;
  // Bytes of the experts that one token uses in all layers; 0 if it is not known how many these are. With a smaller
  // budget, a policy that evicts what was used least recently finds nothing resident.
  uint64_t token_cycle_bytes;
  // Experts that a token uses in each layer; 0 if that is not known.
  uint32_t experts_per_token;
  // 0.
  uint32_t reserved;
} hoistway_experts_model;

// A layer that has experts.
typedef struct {
  // `sizeof(hoistway_experts_layer_info)`, set by the caller; then, as far as members were filled in.
  uint64_t size;
  // Its number, counted from 0 as the checkpoint does.
  uint32_t layer;
  // Number of its experts.
  uint32_t experts;
  // Bytes of its largest expert.
  uint64_t expert_bytes;
  // Bytes of the experts that one token uses; 0 if it is not known how many these are.
  uint64_t demand_bytes;
} hoistway_experts_layer_info;

// A part of an expert, or a dense tensor. What it points to lives as long as the store and its leases.
typedef struct {
  // `sizeof(hoistway_part)`, set by the caller; then, as far as members were filled in.
  uint64_t size;
  // The tensor that holds it.
  const char *tensor;
  // "gate", "up", "gate_up", "down", or "dense".
  const char *role;
  // What it holds of its role: "weight", "blocks", "scales", or whatever else the tensor's name ends with.
  const char *component;
  // Type of its elements, such as "BF16" or "Q4_K".
  const char *dtype;
  // Elements along each dimension, slowest first, without the dimension that counts experts.
  const uint64_t *shape;
  // Length of `shape`.
  uint32_t dimensions;
  // The type's number in ggml; -1 if ggml has none.
  int32_t ggml_type;
  // Number of the file that holds it, in the catalog.
  uint64_t file;
  // Where its bytes begin in the file.
  uint64_t offset;
  // How many these are.
  uint64_t bytes;
  // Where its bytes are, if it is leased; else NULL.
  void *address;
  // Whose memory that is, a `HOISTWAY_TARGET_…`.
  int32_t target;
  // Number of the device.
  int32_t device;
  // The slot of its expert, if it is leased and the backing has slots; else -1.
  int64_t slot;
} hoistway_part;

// A layer, as the caller names it. This structure never grows.
typedef struct {
  // What reports and messages call it.
  const char *name;
  // Names of its tensors.
  const char *const *tensors;
  // How many these are.
  uint64_t tensor_count;
} hoistway_layer_spec;

// How to stream layers. Numbers that are 0 are defaults.
typedef struct {
  // `sizeof(hoistway_layers_options)`.
  uint64_t size;
  // Most bytes of all layers in memory: those that stay, those that the caller holds, those that are read. 0 for 4 GiB.
  uint64_t budget_bytes;
  // Layers that are read ahead of the one that computes; 0 for 1. Fewer if the budget does not hold as many.
  uint64_t ahead;
  // Milliseconds that a layer waits for room that the caller holds; 0 for 60,000, `UINT64_MAX` for as long as it takes.
  uint64_t timeout_ms;
  // The layers in the order of use. NULL for those that names of tensors count (`blk.N.`, `layers.N.`, `h.N.`,
  // `blocks.N.`).
  const hoistway_layer_spec *layers;
  // How many these are.
  uint64_t layer_count;
} hoistway_layers_options;

// A tensor of a layer. What it points to lives as long as the layer.
typedef struct {
  // `sizeof(hoistway_layer_part)`, set by the caller; then, as far as members were filled in.
  uint64_t size;
  // Its name in the checkpoint.
  const char *name;
  // Type of its elements, such as "BF16" or "Q4_K".
  const char *dtype;
  // Elements along each dimension, slowest first.
  const uint64_t *shape;
  // Length of `shape`.
  uint32_t dimensions;
  // The type's number in ggml; -1 if ggml has none.
  int32_t ggml_type;
  // Its bytes.
  const void *address;
  // How many these are.
  uint64_t bytes;
} hoistway_layer_part;

// A second store behind the near one, such as one on a shared file system. Lookups answer for both, and a load reads from it
// what the near one lacks. Its directory must be there, or nothing moves to it until it is. Strings that are NULL, and numbers
// that are 0, are defaults; docs/kv/tiers.md says what each means.
typedef struct {
  // `sizeof(hoistway_kv_far_options)`.
  uint64_t size;
  // Its directory.
  const char *root;
  // "segments" or "files"; NULL is what is there, else "segments".
  const char *layout;
  // "none", "batched" or "sync"; NULL is "batched".
  const char *durability;
  // "write_through" or "write_back"; NULL is "write_through".
  const char *policy;
  // Most bytes that all files below `root` take, of all processes. Needed for writing.
  uint64_t capacity_bytes;
  // Bytes that are left free on the file system; 0 for 1 GiB, 1 for none.
  uint64_t min_free_bytes;
  // Milliseconds that one operation may take; 0 for five seconds.
  uint64_t timeout_ms;
  // Milliseconds that a lookup waits for a far tier with layout "files"; 0 for 50.
  uint64_t lookup_timeout_ms;
  // Most bytes of blocks that wait to be written; 0 for 1 GiB.
  uint64_t backlog_bytes;
  // Bytes of host memory for blocks that move between the tiers; 0 for 256 MiB.
  uint64_t staging_bytes;
  // `HOISTWAY_KV_NO_PROMOTE` or 0.
  uint64_t flags;
} hoistway_kv_far_options;

// How to open a KV store. Strings that are NULL, and numbers that are 0, are defaults; docs/kv says what each means.
typedef struct {
  // `sizeof(hoistway_kv_options)`.
  uint64_t size;
  // Its directory. Made if it is not there.
  const char *root;
  // "read_write" or "read".
  const char *access;
  // "segments" or "files"; NULL is what is there, else "segments".
  const char *layout;
  // "none", "batched" or "sync"; NULL is "batched".
  const char *durability;
  // "s3fifo" or "lru"; NULL is "s3fifo".
  const char *eviction;
  // "always" or "second_touch"; NULL is "always".
  const char *admission;
  // "auto", "io_uring" or "threads"; NULL is "auto".
  const char *route;
  // "prefer", "require" or "off"; NULL is "prefer".
  const char *direct;
  // Most bytes that all files below `root` take, of all processes. Needed for writing.
  uint64_t capacity_bytes;
  // Bytes that are left free on the file system; 0 for 1 GiB, 1 for none.
  uint64_t min_free_bytes;
  // Bytes of a segment.
  uint64_t segment_bytes;
  // Threads that move bytes.
  uint64_t io_threads;
  // Most bytes of transfers under way; 0 for 256 MiB.
  uint64_t max_in_flight_bytes;
  // Milliseconds that a request may take unless it says otherwise; 0 for as long as it takes.
  uint64_t timeout_ms;
  // Milliseconds after which a block is given up that lacks shards and has got no further one; 0 for a minute.
  uint64_t partial_timeout_ms;
  // Bytes a second that are read in the background to find damaged blocks.
  uint64_t scrub_bytes_per_second;
  // `HOISTWAY_KV_NO_VERIFY` or 0.
  uint64_t flags;
  // A second store behind this one, or NULL.
  const hoistway_kv_far_options *far_tier;
} hoistway_kv_options;

// A piece of the caller's memory. It never gets more members.
typedef struct {
  // Memory of the host, or a pointer to that of a device.
  void *address;
  // Its length in bytes.
  uint64_t length;
  // `HOISTWAY_TARGET_HOST`, `HOISTWAY_TARGET_CUDA` or `HOISTWAY_TARGET_ROCM`.
  int32_t target;
  // Number of the device.
  int32_t device;
} hoistway_kv_piece;

// What must be equal for one process's blocks to be another's. Strings that are NULL are empty.
typedef struct {
  // `sizeof(hoistway_kv_description)`.
  uint64_t size;
  // The model, by a name that changes when its weights do.
  const char *model;
  // Element type of the cache, such as "bfloat16".
  const char *dtype;
  // How a block's bytes are arranged.
  const char *layout;
  // How the engine makes keys of tokens.
  const char *key_algorithm;
  // A tenant's secret: hashed, never written down.
  const char *salt;
  // Whatever else tells blocks apart: a name, its value, the next name, and so on.
  const char *const *other;
  // Half as many strings as `other` has.
  uint64_t other_count;
  // Layers that a block has parts of.
  uint32_t layers;
  // Heads of keys and values, of this rank.
  uint32_t kv_heads;
  // Elements of a head.
  uint32_t head_dim;
  // Tokens in a block.
  uint32_t block_tokens;
  // Which of the ranks that share each layer this is.
  uint32_t tensor_rank;
  // How many these are; 0 where blocks are those of all ranks.
  uint32_t tensor_ranks;
  // Which of the ranks that share the layers this is.
  uint32_t pipeline_rank;
  // How many these are; 0 where blocks are those of all ranks.
  uint32_t pipeline_ranks;
  // Which of the ranks that share the context this is.
  uint32_t context_rank;
  // How many these are; 0 where blocks are those of all ranks.
  uint32_t context_ranks;
  // Milliseconds that a block is kept after it was stored, at most; 0 for no limit. No part of the identity.
  uint64_t ttl_ms;
  // Most bytes of storage that the blocks of the namespace take, of all processes together; 0 for no limit. No part of
  // the identity.
  uint64_t quota_bytes;
} hoistway_kv_description;

// The name of a block in its namespace: 1 to 1024 bytes of any values. It never gets more members.
typedef struct {
  // The bytes.
  const void *bytes;
  // How many these are.
  uint64_t length;
} hoistway_kv_key;

// A shard of a block, and the memory that it is loaded to or stored from.
typedef struct {
  // `sizeof(hoistway_kv_item)`, the same for all items of a request.
  uint64_t size;
  // The block.
  hoistway_kv_key key;
  // The memory, in the order of the shard's bytes. Their lengths add up to the shard's.
  const hoistway_kv_piece *pieces;
  // How many pieces there are.
  uint64_t piece_count;
  // Which of the block's shards, from 0.
  uint32_t shard;
  // 0.
  uint32_t reserved;
} hoistway_kv_item;

// How to load or store.
typedef struct {
  // `sizeof(hoistway_kv_request)`.
  uint64_t size;
  // Milliseconds that it may take; 0 for what the store says.
  uint64_t timeout_ms;
  // An event of the device, such as a `CUevent` or `hipEvent_t`, or 0. Work on the device must have reached it before the
  // memory is read or written. It must live, and not be recorded anew, until the ticket is released. If items have memory
  // of several vendors, or of none while drivers of several are loaded, the request fails.
  uint64_t wait_event;
  // `HOISTWAY_KV_NOTIFY` or 0.
  uint64_t flags;
  // Stores: how many shards each block has; 0 for 1.
  uint32_t shards;
  // 0.
  uint32_t reserved;
  // Stores: length of the longest shard, if this request does not have it; else 0.
  uint64_t shard_bytes;
  // Stores: milliseconds that the blocks are kept, at most; 0 for what the namespace says.
  uint64_t ttl_ms;
} hoistway_kv_request;

// How one item of a request ended. It never gets more members.
typedef struct {
  // What became of it.
  hoistway_kv_status status;
  // The `errno` of `HOISTWAY_KV_IO`; else 0.
  int32_t error;
} hoistway_kv_outcome;

// How to read.
typedef struct {
  // `sizeof(hoistway_reader_options)`.
  uint64_t size;
  // "auto", "io_uring", "overlapped", "threads", "cached", "usrbio", "directstorage", "staged", "gds" or "gds-compat"; NULL is "auto".
  const char *route;
  // Most bytes of staging memory, for the host and for each device; 0 for the default.
  uint64_t memory_budget_bytes;
  // Reads at once; 0 for the default.
  uint64_t in_flight;
  // `HOISTWAY_SMALL_PAGES` or 0.
  uint64_t flags;
} hoistway_reader_options;

// Gets the bytes of a read in pieces, in any order, on threads of the reader's, for several reads at once. `position`
// counts from the read's first byte. Anything but 0 fails the read. It must return: no exception, no `longjmp`. It must
// not wait for reads of the same reader, nor free a batch.
typedef int32_t (*hoistway_sink)(void *context, uint64_t position, const void *bytes, uint64_t length);

// Bytes of a file, and where they go. Members that a target does not need are not looked at.
typedef struct {
  // `sizeof(hoistway_read)`, the same for all reads of a batch.
  uint64_t size;
  // A catalog, if the file is one of its files: the very file whose header was read, or an error. Else NULL.
  const hoistway_catalog *catalog;
  // The number of that file.
  uint64_t file;
  // Without a catalog, the file; NULL if `fd` names it.
  const char *path;
  // Without a path, an open file. It stays the caller's, and may be closed once the reads were submitted.
  int32_t fd;
  // A `HOISTWAY_TARGET_…`.
  int32_t target;
  // Number of the device.
  int32_t device;
  // 0.
  uint32_t reserved;
  // Where the bytes begin in the file.
  uint64_t offset;
  // How many are read: all of them, or the read fails.
  uint64_t length;
  // Memory of the host, or a pointer to that of a device. Nothing else may use it until the read has ended.
  void *destination;
  // For `HOISTWAY_TARGET_CALLBACK`.
  hoistway_sink sink;
  // What `sink` is given.
  void *sink_context;
  // What messages call the read, such as the tensor's name; may be NULL.
  const char *name;
  // Set when the read ends, with release order, to 1 plus its status; may be NULL. `hoistway_batch_status` may say
  // `HOISTWAY_PENDING` for a moment longer.
  int32_t *done;
  // For memory of a device: a stream of it, whose work that is queued by now comes before the read. NULL is the legacy default
  // stream, unless there is an event. A stream that is being captured is an error.
  void *stream;
  // For memory of a device: an event that comes before the read, and lives until that has ended; or NULL. One that was
  // recorded in a capture fails the read.
  void *event;
} hoistway_read;

// Is told how far a batch has got, on the thread that waits for it; `false` cancels the batch. It must return: no
// exception, no `longjmp`. It must not free the batch.
typedef bool (*hoistway_progress)(void *context, uint64_t bytes_done, uint64_t bytes_total);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The `HOISTWAY_ABI_VERSION` that the library was built with.
uint32_t hoistway_abi_version(void);

// Lets the devices go that nothing uses, with their contexts, which take memory of each. The process keeps a device that it
// has used, as to open it takes long. It is opened again when it is needed.
void hoistway_release_devices(void);

// Reads the headers behind `count` paths: safetensors and GGUF files, `*.safetensors.index.json`, directories, glob
// patterns. A split GGUF is opened by any of its files. `options` may be NULL.
//
// What the caller promises:
// `paths` must be `count` strings, `options` NULL or as its size says, `catalog` writable.
hoistway_status hoistway_catalog_open(const char *const *paths,
                                      uint64_t count,
                                      const hoistway_catalog_options *options,
                                      hoistway_catalog **catalog);

// Frees a catalog. NULL is fine.
//
// What the caller promises:
// `catalog` must come from `hoistway_catalog_open`, and not be in use nor have been freed.
void hoistway_catalog_free(hoistway_catalog *catalog);

// How many tensors there are; 0 if `catalog` is NULL.
//
// What the caller promises:
// `catalog` must be NULL or a live catalog.
uint64_t hoistway_catalog_tensor_count(const hoistway_catalog *catalog);

// The tensor at a position, in the order of the files and of the bytes within each.
//
// What the caller promises:
// `catalog` must be a live catalog, `tensor` writable as far as its `size` says.
hoistway_status hoistway_catalog_tensor(const hoistway_catalog *catalog,
                                        uint64_t index,
                                        hoistway_tensor *tensor);

// The tensor of a name.
//
// What the caller promises:
// `catalog` must be a live catalog, `name` a string, `tensor` writable as far as its `size` says.
hoistway_status hoistway_catalog_find(const hoistway_catalog *catalog,
                                      const char *name,
                                      hoistway_tensor *tensor);

// Opens a store of what a catalog describes, and reads nothing yet. A model without experts has dense tensors alone. The
// catalog may be freed. `options` may be NULL.
//
// `HOISTWAY_MEMORY` if the budget does not hold the largest expert; `HOISTWAY_INVALID_FILE` if a tensor is named like an
// expert's and is none. In a child of `fork`, requests fail: open a store there.
//
// What the caller promises:
// `catalog` must be live, `options` NULL or as its size says, `store` writable.
hoistway_status hoistway_experts_open(const hoistway_catalog *catalog,
                                      const hoistway_experts_options *options,
                                      hoistway_experts **store);

// Frees a store, and the memory that no lease holds. Its leases stay valid; each frees its memory when it is freed. NULL is
// fine.
//
// What the caller promises:
// `store` must come from `hoistway_experts_open`, and not be in use nor have been freed.
void hoistway_experts_free(hoistway_experts *store);

// Tells the policy what the router of a layer chose: `count` experts, with their weights. `weights` may be NULL, for equal
// ones. Call it at each visit of the layer, before `hoistway_experts_ensure`. Experts of several tokens follow one another, the
// last token's last; an expert then comes as often as it was chosen.
//
// From the first call on, requests for this layer tell the policy nothing. For a layer that was never observed, each
// request is a visit.
//
// What the caller promises:
// `store` must be live, `experts` and `weights` be `count` numbers, or `weights` NULL.
hoistway_status hoistway_experts_observe(const hoistway_experts *store,
                                         uint32_t layer,
                                         const uint32_t *experts,
                                         const float *weights,
                                         uint64_t count);

// Starts to read experts that will probably be requested. A hint: its reads begin only while no request waits for one, and
// take a quarter of the budget at most. What has not begun is dropped if a request has to read, or `deadline_ms` milliseconds
// have passed as its turn comes; `UINT64_MAX` is no deadline.
//
// What the caller promises:
// `store` must be live, `experts` be `count` numbers.
hoistway_status hoistway_experts_prefetch(const hoistway_experts *store,
                                          uint32_t layer,
                                          const uint32_t *experts,
                                          uint64_t count,
                                          uint64_t deadline_ms);

// Drops prefetches of layers before `layer` that have not begun. These include prefetches of the next token's first layers:
// make those after the call.
//
// What the caller promises:
// `store` must be live.
hoistway_status hoistway_experts_cancel_before(const hoistway_experts *store,
                                               uint32_t layer);

// Sets the budget, and evicts what exceeds it and is not leased. `HOISTWAY_MEMORY` if it does not hold the largest expert.
//
// What the caller promises:
// `store` must be live.
hoistway_status hoistway_experts_set_budget(const hoistway_experts *store,
                                            uint64_t budget_bytes);

// Tells whether an expert is resident.
//
// What the caller promises:
// `store` must be live, `resident` writable.
hoistway_status hoistway_experts_is_resident(const hoistway_experts *store,
                                             uint32_t layer,
                                             uint32_t expert,
                                             bool *resident);

// Tells whether a dense tensor is resident.
//
// What the caller promises:
// `store` must be live, `name` a string, `resident` writable.
hoistway_status hoistway_experts_is_tensor_resident(const hoistway_experts *store,
                                                    const char *name,
                                                    bool *resident);

// Evicts experts of a layer that are resident and not leased. Sets `evicted` to how many, unless it is NULL.
//
// What the caller promises:
// `store` must be live, `experts` be `count` numbers, `evicted` NULL or writable.
hoistway_status hoistway_experts_evict(const hoistway_experts *store,
                                       uint32_t layer,
                                       const uint32_t *experts,
                                       uint64_t count,
                                       uint64_t *evicted);

// Evicts dense tensors that are resident and not leased. Sets `evicted` to how many, unless it is NULL.
//
// What the caller promises:
// `store` must be live, `names` be `count` strings, `evicted` NULL or writable.
hoistway_status hoistway_experts_evict_tensors(const hoistway_experts *store,
                                               const char *const *names,
                                               uint64_t count,
                                               uint64_t *evicted);

// Tells where a tensor lies in address space, with the backing "host_sparse": expert `e` of a stacked tensor lies `e` slices
// further. Only what is leased may be read there. The space is the store's, and lives as long as it and its leases.
// `HOISTWAY_NOT_FOUND` for other backings, for a tensor without bytes, and if there is no such tensor.
//
// What the caller promises:
// `store` must be live, `name` a string, `address` writable.
hoistway_status hoistway_experts_tensor_address(const hoistway_experts *store,
                                                const char *name,
                                                void **address);

// Gives what a store has done and what it holds, as JSON. Free it with `hoistway_string_free`.
//
// What the caller promises:
// `store` must be live, `json` writable.
hoistway_status hoistway_experts_stats(const hoistway_experts *store, char **json);

// Gives the changes of residency since the last call, as JSON: `events`, the oldest first, and the number of older ones that
// were `lost` because there were more than the option `events`. Free it with `hoistway_string_free`.
//
// What the caller promises:
// `store` must be live, `json` writable.
hoistway_status hoistway_experts_events(const hoistway_experts *store,
                                        char **json);

// Describes the model of a store.
//
// What the caller promises:
// `store` must be live, `model` writable as far as its `size` says.
hoistway_status hoistway_experts_describe(const hoistway_experts *store, hoistway_experts_model *model);

// Describes the layer at a position among those that have experts. `HOISTWAY_NOT_FOUND` past the last.
//
// What the caller promises:
// `store` must be live, `layer` writable as far as its `size` says.
hoistway_status hoistway_experts_layer(const hoistway_experts *store,
                                       uint64_t index,
                                       hoistway_experts_layer_info *layer);

// Describes the part at a position of an expert. `HOISTWAY_NOT_FOUND` past the last, and if there is no such expert.
//
// What the caller promises:
// `store` must be live, `part` writable as far as its `size` says.
hoistway_status hoistway_experts_part(const hoistway_experts *store,
                                      uint32_t layer,
                                      uint32_t expert,
                                      uint64_t index,
                                      hoistway_part *part);

// Streams layers of a checkpoint, and reads nothing yet. As many as the budget holds stay in memory, spread over the pass. The
// catalog may be freed; the reader ends once its streams are freed too. `options` may be NULL.
//
// `HOISTWAY_MEMORY` if the budget does not hold the largest layer; `HOISTWAY_INVALID_ARGUMENT` if there is no layer.
//
// What the caller promises:
// `reader` and `catalog` must be live, `options` NULL or as its size says, `layers` writable.
hoistway_status hoistway_layers_open(const hoistway_reader *reader,
                                     const hoistway_catalog *catalog,
                                     const hoistway_layers_options *options,
                                     hoistway_layers **layers);

// Ends a stream of layers. Layers that the caller holds stay. NULL is fine.
//
// What the caller promises:
// `layers` must come from `hoistway_layers_open`, and not be in use nor have been freed.
void hoistway_layers_free(hoistway_layers *layers);

// Waits for the next layer, behind the last of which the first comes again, and starts to read those after it. Free a layer
// before its room is needed: `HOISTWAY_REFUSED` if the caller held it for as long as `timeout_ms` says. After a failure the
// layer is next again.
//
// What the caller promises:
// `layers` must be live, `layer` writable.
hoistway_status hoistway_layers_next(const hoistway_layers *layers,
                                     hoistway_layer **layer);

// Gives what a stream of layers has done, as JSON. Free it with `hoistway_string_free`.
//
// What the caller promises:
// `layers` must be live, `json` writable.
hoistway_status hoistway_layers_stats(const hoistway_layers *layers, char **json);

// Name of a layer; empty if `layer` is NULL. It lives as long as the layer.
//
// What the caller promises:
// `layer` must be NULL or live.
const char *hoistway_layer_name(const hoistway_layer *layer);

// Number of a layer's tensors; 0 if `layer` is NULL.
//
// What the caller promises:
// `layer` must be NULL or live.
uint64_t hoistway_layer_tensor_count(const hoistway_layer *layer);

// The tensor at a position of a layer. `HOISTWAY_NOT_FOUND` past the last.
//
// What the caller promises:
// `layer` must be live, `tensor` writable as far as its `size` says.
hoistway_status hoistway_layer_tensor(const hoistway_layer *layer,
                                      uint64_t index,
                                      hoistway_layer_part *tensor);

// Frees a layer: its memory may be used for others. NULL is fine.
//
// What the caller promises:
// `layer` must come from `hoistway_layers_next`, and not be in use nor have been freed. None of its bytes may be used
// afterwards.
void hoistway_layer_free(hoistway_layer *layer);

// Makes experts of a layer resident, waits for them, and leases them. What is missing is read at once, all experts side by
// side. An expert that is named twice is in the lease twice, and read once.
//
// On failure nothing is leased: `HOISTWAY_NOT_FOUND` if there is no such layer or expert; `HOISTWAY_REFUSED` if leases held
// the room for as long as the option `timeout_ms` says; `HOISTWAY_TIMED_OUT` if reads took longer; `HOISTWAY_MEMORY` if
// the request needs more than all slots of a device; `HOISTWAY_TRUNCATED`, `HOISTWAY_CHANGED` or `HOISTWAY_IO` if a part
// could not be read.
//
// What the caller promises:
// `store` must be live, `experts` be `count` numbers, `lease` writable.
hoistway_status hoistway_experts_ensure(const hoistway_experts *store,
                                        uint32_t layer,
                                        const uint32_t *experts,
                                        uint64_t count,
                                        hoistway_lease **lease);

// Makes dense tensors resident, waits for them, and leases them. Fails as `hoistway_experts_ensure` does. They are evicted by
// `hoistway_experts_evict_tensors`, or when no expert is left to evict.
//
// What the caller promises:
// `store` must be live, `names` be `count` strings, `lease` writable.
hoistway_status hoistway_experts_ensure_tensors(const hoistway_experts *store,
                                                const char *const *names,
                                                uint64_t count,
                                                hoistway_lease **lease);

// Releases what a lease holds: it may be evicted from then on. NULL is fine.
//
// What the caller promises:
// `lease` must come from `hoistway_experts_ensure` or `hoistway_experts_ensure_tensors`, and not be in use nor have been
// freed. Nothing that it holds may be used afterwards.
void hoistway_lease_free(hoistway_lease *lease);

// How many experts or dense tensors a lease holds; 0 if `lease` is NULL.
//
// What the caller promises:
// `lease` must be NULL or live.
uint64_t hoistway_lease_count(const hoistway_lease *lease);

// How many parts the expert at a position of the request has; 0 if there is none. A dense tensor is one part.
//
// What the caller promises:
// `lease` must be NULL or live.
uint64_t hoistway_lease_part_count(const hoistway_lease *lease, uint64_t position);

// Tells where a part lies: of the expert at `position` of the request, the part at `index`. Parts have the order of
// `hoistway_experts_part`.
//
// What the caller promises:
// `lease` must be live, `part` writable as far as its `size` says.
hoistway_status hoistway_lease_part(const hoistway_lease *lease,
                                    uint64_t position,
                                    uint64_t index,
                                    hoistway_part *part);

// Opens a tensor as a table: its rows are what lies under each index of its slowest dimension. Rows are small, so give it a
// reader with many reads at once, such as 64. The catalog may be freed; the reader ends once its tables are freed too.
//
// What the caller promises:
// `reader` and `catalog` must be live, `tensor` a string, `rows` writable.
hoistway_status hoistway_rows_open(const hoistway_reader *reader,
                                   const hoistway_catalog *catalog,
                                   const char *tensor,
                                   hoistway_rows **rows);

// Frees a table. NULL is fine.
//
// What the caller promises:
// `rows` must come from `hoistway_rows_open`, and not be in use nor have been freed.
void hoistway_rows_free(hoistway_rows *rows);

// Number of rows; 0 if `rows` is NULL.
//
// What the caller promises:
// `rows` must be NULL or live.
uint64_t hoistway_rows_count(const hoistway_rows *rows);

// Bytes of a row; 0 if `rows` is NULL.
//
// What the caller promises:
// `rows` must be NULL or live.
uint64_t hoistway_rows_row_bytes(const hoistway_rows *rows);

// Reads rows to memory of the host, in the order in which they are named, one after the other. Each is read once however
// often it is named, and rows that follow one another are read together. `bytes` must be what the rows take. If the call
// fails, the memory is as it was.
//
// What the caller promises:
// `rows` must be live, `numbers` be `count` numbers, `destination` writable for `bytes` bytes.
hoistway_status hoistway_rows_gather(const hoistway_rows *rows,
                                     const uint64_t *numbers,
                                     uint64_t count,
                                     void *destination,
                                     uint64_t bytes);

// Opens a KV store, and makes it if it is not there. In a child of `fork` it is closed: open it anew there.
//
// What the caller promises:
// `options` must be as its size says, `store` writable.
hoistway_status hoistway_kv_open(const hoistway_kv_options *options, hoistway_kv **store);

// Ends a store: nothing is accepted any more, stores under way get `timeout_ms` milliseconds to end (`UINT64_MAX`: as long
// as they take), other requests are cancelled. Then the system gets some seconds to end what it has.
// `HOISTWAY_TIMED_OUT` if something did not end in time: its tickets tell which memory is still in use. `HOISTWAY_IO` if the
// index cannot be written, or if blocks were not written to the far tier: the message says how many.
//
// What the caller promises:
// `store` must be live.
hoistway_status hoistway_kv_close(const hoistway_kv *store,
                                  uint64_t timeout_ms);

// Frees a store. With its last namespace it ends, if it was not closed: as `hoistway_kv_close` without time for stores.
// In a child of `fork` nothing is closed. NULL is fine.
//
// What the caller promises:
// `store` must come from `hoistway_kv_open`, and not be in use nor have been freed.
void hoistway_kv_free(hoistway_kv *store);

// Waits until every block that was given to the store before is where `durability` wants it, `timeout_ms` milliseconds at
// most; `UINT64_MAX` is for ever.
//
// What the caller promises:
// `store` must be live.
hoistway_status hoistway_kv_flush(const hoistway_kv *store,
                                  uint64_t timeout_ms);

// A descriptor that can be read, and so be watched with `poll` or `epoll`, while requests that asked for it by
// `HOISTWAY_KV_NOTIFY` have ended and were not drained. It is the store's: neither read nor close it. -1 if `store` is NULL.
//
// What the caller promises:
// `store` must be NULL or live.
int32_t hoistway_kv_event_fd(const hoistway_kv *store);

// Gives the numbers of tickets that asked for it by `HOISTWAY_KV_NOTIFY` and have ended, each once, in the order of their
// ends: at most `room`. Sets `count`. If that is `room`, there may be more, of which the descriptor does not tell again.
//
// What the caller promises:
// `store` must be live, `tickets` have room for `room` numbers, `count` be writable.
hoistway_status hoistway_kv_drain(const hoistway_kv *store,
                                  uint64_t *tickets,
                                  uint64_t room,
                                  uint64_t *count);

// Tells a store of memory ahead, so that storage can be read to a device's memory and written from it past the host's.
// Memory of the host needs no telling, and may be told of.
//
// What the caller promises:
// `store` must be live, `memory` readable and what it describes allocated until the region is freed; `region` writable.
hoistway_status hoistway_kv_register(const hoistway_kv *store,
                                     const hoistway_kv_piece *memory,
                                     hoistway_kv_region **region);

// Whether it is memory of a device whose bytes go past the host's memory. If not, `hoistway_kv_report` says why.
//
// What the caller promises:
// `region` must be NULL or live.
bool hoistway_kv_region_is_direct(const hoistway_kv_region *region);

// Has the store forget memory; then it may be freed. Requests that use it must have released it. NULL is fine.
//
// What the caller promises:
// `region` must come from `hoistway_kv_register`, and not have been freed.
void hoistway_kv_region_free(hoistway_kv_region *region);

// Gives what a store holds and did, as JSON. Free it with `hoistway_string_free`.
//
// What the caller promises:
// `store` must be live, `json` writable.
hoistway_status hoistway_kv_stats(const hoistway_kv *store, char **json);

// Gives the same as text for Prometheus (OpenMetrics). Free it with `hoistway_string_free`.
//
// What the caller promises:
// `store` must be live, `openmetrics` writable.
hoistway_status hoistway_kv_metrics(const hoistway_kv *store, char **openmetrics);

// Gives how a store works, as JSON: which way bytes went, and why not a better one. Free it with `hoistway_string_free`.
//
// What the caller promises:
// `store` must be live, `json` writable.
hoistway_status hoistway_kv_report(const hoistway_kv *store,
                                   char **json);

// Gives what happened since the last call, such as damaged blocks, as a list in JSON. Free it with
// `hoistway_string_free`.
//
// What the caller promises:
// `store` must be live, `json` writable.
hoistway_status hoistway_kv_events(const hoistway_kv *store, char **json);

// Opens a namespace. Opening it again sets its limits anew.
//
// What the caller promises:
// `store` must be live, `description` as its size says, `blocks` writable.
hoistway_status hoistway_kv_namespace_open(const hoistway_kv *store,
                                           const hoistway_kv_description *description,
                                           hoistway_kv_namespace **blocks);

// Frees a namespace. Its requests go on. NULL is fine.
//
// What the caller promises:
// `blocks` must come from `hoistway_kv_namespace_open`, and not be in use nor have been freed.
void hoistway_kv_namespace_free(hoistway_kv_namespace *blocks);

// Tells for each key whether its block is there, by `found`.
//
// What the caller promises:
// `blocks` must be live, `keys` be `count` keys, `found` have room for as many answers.
hoistway_status hoistway_kv_lookup(const hoistway_kv_namespace *blocks,
                                   const hoistway_kv_key *keys,
                                   uint64_t count,
                                   bool *found);

// Tells how many of these blocks, from the first on, are there without a gap.
//
// What the caller promises:
// `blocks` must be live, `keys` be `count` keys, `length` writable.
hoistway_status hoistway_kv_lookup_prefix(const hoistway_kv_namespace *blocks,
                                          const hoistway_kv_key *keys,
                                          uint64_t count,
                                          uint64_t *length);

// Tells which is the last of these blocks that is there; `HOISTWAY_NOT_FOUND` if none is.
//
// What the caller promises:
// `blocks` must be live, `keys` be `count` keys, `index` writable.
hoistway_status hoistway_kv_lookup_reverse(const hoistway_kv_namespace *blocks,
                                           const hoistway_kv_key *keys,
                                           uint64_t count,
                                           uint64_t *index);

// Removes blocks, as far as this process stored them. Tells how many were removed by `removed`.
//
// What the caller promises:
// `blocks` must be live, `keys` be `count` keys, `removed` writable.
hoistway_status hoistway_kv_delete(const hoistway_kv_namespace *blocks,
                                   const hoistway_kv_key *keys,
                                   uint64_t count,
                                   uint64_t *removed);

// Starts to load shards of blocks. Each item succeeds or fails for itself; this call fails, and starts nothing, if an item
// makes no sense. `priority` is `HOISTWAY_DEMAND`, `HOISTWAY_PREFETCH` or `HOISTWAY_BACKGROUND`; `request` may be NULL.
//
// **The memory is the store's until the ticket is released.** Every end but a time-out or a cancellation releases it; after
// these, the system may go on writing to it for a while: see `hoistway_kv_ticket_wait_released`.
//
// What the caller promises:
// `blocks` must be live; `items` be `count` structures as their size says, with keys and pieces that live until this
// returns, and memory that lives, and that nothing else uses, until the ticket is released; `request` must be NULL or as
// its size says, `ticket` writable.
hoistway_status hoistway_kv_load(const hoistway_kv_namespace *blocks,
                                 const hoistway_kv_item *items,
                                 uint64_t count,
                                 int32_t priority,
                                 const hoistway_kv_request *request,
                                 hoistway_kv_ticket **ticket);

// Starts to store shards of blocks. A block is found once all its shards were stored, by this request or several. Items of
// blocks that are there already end as `HOISTWAY_KV_EXISTS`, which is no failure. Else as `hoistway_kv_load`: the store
// reads the memory until the ticket is released, and nothing may write to it until then.
//
// What the caller promises:
// As `hoistway_kv_load`.
hoistway_status hoistway_kv_store(const hoistway_kv_namespace *blocks,
                                  const hoistway_kv_item *items,
                                  uint64_t count,
                                  int32_t priority,
                                  const hoistway_kv_request *request,
                                  hoistway_kv_ticket **ticket);

// The number of a ticket, as `hoistway_kv_drain` tells it; 0 if `ticket` is NULL.
//
// What the caller promises:
// `ticket` must be NULL or live.
uint64_t hoistway_kv_ticket_id(const hoistway_kv_ticket *ticket);

// Waits for the end of a request, `timeout_ms` milliseconds at most; `UINT64_MAX` is for ever.
//
// `HOISTWAY_OK` if every item was loaded, or is in the store; `HOISTWAY_PENDING` if the time ran out; else what came of
// the first item that failed: `HOISTWAY_NOT_FOUND` for a miss, `HOISTWAY_CORRUPT`, `HOISTWAY_REFUSED`, and so on.
// `hoistway_kv_ticket_outcomes` tells which items these were.
//
// What the caller promises:
// `ticket` must be live.
hoistway_status hoistway_kv_ticket_wait(const hoistway_kv_ticket *ticket,
                                        uint64_t timeout_ms);

// How far a request has got: `HOISTWAY_PENDING`, or what `hoistway_kv_ticket_wait` returns. Never waits, and leaves the
// thread's last error as it is.
//
// What the caller promises:
// `ticket` must be live.
hoistway_status hoistway_kv_ticket_poll(const hoistway_kv_ticket *ticket);

// Tells what became of each item, in the order of the request; `HOISTWAY_PENDING` if it has not ended.
//
// What the caller promises:
// `ticket` must be live, `outcomes` have room for `count`.
hoistway_status hoistway_kv_ticket_outcomes(const hoistway_kv_ticket *ticket,
                                            hoistway_kv_outcome *outcomes,
                                            uint64_t count);

// Gives what came of a request, as JSON: statuses by name, bytes, the way that these took, times. `HOISTWAY_PENDING` if it
// has not ended. Free it with `hoistway_string_free`.
//
// What the caller promises:
// `ticket` must be live, `json` writable.
hoistway_status hoistway_kv_ticket_report(const hoistway_kv_ticket *ticket,
                                          char **json);

// Ends a request now, if it has not ended: items that have not are cancelled. Its memory is the store's until the ticket is
// released. Does not wait.
//
// What the caller promises:
// `ticket` must be live.
hoistway_status hoistway_kv_ticket_cancel(const hoistway_kv_ticket *ticket);

// Whether the memory of a request is the caller's again: nothing reads or writes it any more. Requests release their memory
// as they end, but for those that timed out or were cancelled: these release it once the system is done with it.
//
// What the caller promises:
// `ticket` must be NULL or live.
bool hoistway_kv_ticket_is_released(const hoistway_kv_ticket *ticket);

// Waits until the memory of a request is the caller's again, `timeout_ms` milliseconds at most; `UINT64_MAX` is for ever.
// `HOISTWAY_PENDING` if the time ran out. `HOISTWAY_DEVICE` if the system or a device failed while it had the memory: then it
// cannot be known when it is free, so keep it, and do not touch it, for as long as the process lives. `HOISTWAY_CLOSED` in a
// child of `fork`.
//
// What the caller promises:
// `ticket` must be live.
hoistway_status hoistway_kv_ticket_wait_released(const hoistway_kv_ticket *ticket,
                                                 uint64_t timeout_ms);

// Frees a ticket. Cancels a request that has not ended, and waits until its memory is released: after that the memory is the
// caller's, unless `hoistway_kv_ticket_wait_released` says `HOISTWAY_DEVICE`. To let a request go on, keep its ticket. In a
// child of `fork` it does not wait. NULL is fine.
//
// What the caller promises:
// `ticket` must come from `hoistway_kv_load` or `hoistway_kv_store`,
// and not be in use nor have been freed.
void hoistway_kv_ticket_free(hoistway_kv_ticket *ticket);

// Starts a reader. `options` may be NULL.
//
// What the caller promises:
// `options` must be NULL or as its size says, `reader` writable.
hoistway_status hoistway_reader_create(const hoistway_reader_options *options, hoistway_reader **reader);

// Ends a reader: what waits is cancelled, what is under way is waited for. Its batches stay, and tell how they ended.
// NULL is fine.
//
// What the caller promises:
// `reader` must come from `hoistway_reader_create`, and not be in use nor have been freed.
void hoistway_reader_free(hoistway_reader *reader);

// Starts to read. Each read succeeds or fails for itself. This call fails, and starts nothing, if a read makes no sense
// or its file cannot be opened. `priority` is `HOISTWAY_DEMAND`,
// `HOISTWAY_PREFETCH` or `HOISTWAY_BACKGROUND`. What is written to memory of a device comes after the read's stream and event.
// Without both it comes after the work that is queued on the legacy default stream of the device by then, and so on every stream
// that is in order with it.
//
// What the caller promises:
// `reader` must be live; `reads` must be `count` structures as their size says, whose strings live until this returns,
// and whose destinations, sinks with their contexts, and places for `done` live until the read has ended and are used by
// nothing else meanwhile; `batch` must be writable.
hoistway_status hoistway_batch_submit(const hoistway_reader *reader,
                                      const hoistway_read *reads,
                                      uint64_t count,
                                      int32_t priority,
                                      hoistway_batch **batch);

// Waits for all reads, `timeout_ms` milliseconds at most, which makes them demand; `UINT64_MAX` is for ever. `progress`
// may be NULL.
//
// `HOISTWAY_OK` if every read delivered, `HOISTWAY_PENDING` if the time ran out; else how the first that failed did, in
// the order of the reads. Then all have ended, and `hoistway_batch_status` tells which delivered.
//
// What the caller promises:
// `batch` must be live.
hoistway_status hoistway_batch_wait(const hoistway_batch *batch,
                                    uint64_t timeout_ms,
                                    hoistway_progress progress,
                                    void *progress_context);

// Waits for one read, `timeout_ms` milliseconds at most, which makes it demand; `UINT64_MAX` is for ever. Returns how
// it ended, or `HOISTWAY_PENDING`.
//
// What the caller promises:
// `batch` must be live.
hoistway_status hoistway_batch_wait_read(const hoistway_batch *batch,
                                         uint64_t index,
                                         uint64_t timeout_ms);

// The next read to end, each once, in the order in which they end. Waits `timeout_ms` milliseconds at most;
// `HOISTWAY_PENDING` if none ended, `HOISTWAY_NOT_FOUND` once all were told.
//
// What the caller promises:
// `batch` must be live, `index` writable.
hoistway_status hoistway_batch_next_ended(const hoistway_batch *batch, uint64_t timeout_ms, uint64_t *index);

// How far a read has got: `HOISTWAY_PENDING`, `HOISTWAY_OK`, or how it failed. Never waits, and leaves the thread's last
// error as it is.
//
// What the caller promises:
// `batch` must be live.
hoistway_status hoistway_batch_status(const hoistway_batch *batch,
                                      uint64_t index);

// Gives the sentence that says why a read failed; an empty one if it did not. Free it with `hoistway_string_free`.
//
// What the caller promises:
// `batch` must be live, `message` writable.
hoistway_status hoistway_batch_error(const hoistway_batch *batch,
                                     uint64_t index,
                                     char **message);

// Makes the priority of reads that have not begun demand.
//
// What the caller promises:
// `batch` must be live.
hoistway_status hoistway_batch_promote(const hoistway_batch *batch);

// Reads that have not begun will not, and those that wait for a server end soon. Those that the kernel or a device has end
// as they may. Does not wait.
//
// What the caller promises:
// `batch` must be live.
hoistway_status hoistway_batch_cancel(const hoistway_batch *batch);

// Gives what the batch has done so far, as JSON: the route of every byte, and why it was not a better one. Free it with
// `hoistway_string_free`.
//
// What the caller promises:
// `batch` must be live, `json` writable.
hoistway_status hoistway_batch_report(const hoistway_batch *batch,
                                      char **json);

// Frees a batch: what has not begun is cancelled, what is under way is waited for. After that nothing uses the
// destinations any more, unless a read into a device has failed with `HOISTWAY_DEVICE`: then a copy may be under way
// until the device was waited for. NULL is fine.
//
// What the caller promises:
// `batch` must come from `hoistway_batch_submit`, and not be in use nor have been freed.
void hoistway_batch_free(hoistway_batch *batch);

// Why this thread's last call that returned a status failed: a sentence in UTF-8; empty if it did not. Valid until the
// next such call. `hoistway_batch_status` and `hoistway_kv_ticket_poll` leave it as it is.
const char *hoistway_last_error(void);

// Version of the library, such as "0.1.0".
const char *hoistway_version(void);

// Frees a string that a function of this library gave. NULL is fine.
//
// What the caller promises:
// `string` must come from this library, and not have been freed.
void hoistway_string_free(char *string);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* HOISTWAY_H */
