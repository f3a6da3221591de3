// The kernels as a shared library that runs them on the CPU, and watches where they read and write.

#define HOISTWAY_HOST_KERNELS
#include "../../crates/hoistway-device/src/driver/kernels.cu"

#include <cstdint>
#include <cstring>

thread_local WlIndex blockIdx, threadIdx, gridDim, blockDim;

namespace {

struct Range {
    u64 begin, end;

    bool holds(u64 address, u32 size) const { return begin <= address && address + size <= end; }
};

// Where the running thread may read and write, and what it has done.
thread_local Range table_entry, readable, writable;
thread_local u64 strays, stored_bytes;

void* pointer(u64 address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }

}  // namespace

extern "C" void wl_load_bytes(unsigned long long address, void* into, unsigned size) {
    const bool allowed = table_entry.holds(address, size) || readable.holds(address, size);
    if (!allowed || address % size != 0) {
        strays++;
        std::memset(into, 0, size);
        return;
    }
    std::memcpy(into, pointer(address), size);
}

extern "C" void wl_store_bytes(unsigned long long address, const void* from, unsigned size) {
    if (!writable.holds(address, size) || address % size != 0) {
        strays++;
        return;
    }
    stored_bytes += size;
    std::memcpy(pointer(address), from, size);
}

struct Outcome {
    // Accesses that are misaligned or outside what the segment allows. None of them reached memory.
    u64 strays;
    // Each byte of the destinations is stored once, or this differs from their sum.
    u64 stored_bytes;
};

// Runs a kernel over `segments` entries of the table, one thread after another. The sizes are the bytes of a
// counted unit on either side; reads may go beyond a segment as far as the next multiple of
// `read_granularity`. False if there is no kernel of this name.
extern "C" bool run_kernel(const char* name, const Segment* table, u32 segments, u32 blocks, u32 threads,
                           u32 source_size, u32 destination_size, u32 read_granularity, Outcome* outcome) {
    void (*const kernel)(u64) = hoistway_kernel(name);
    if (kernel == nullptr) return false;
    strays = stored_bytes = 0;
    gridDim = {blocks, segments, 1};
    blockDim = {threads, 1, 1};
    const u64 table_address = reinterpret_cast<std::uintptr_t>(table);
    for (u32 y = 0; y < segments; y++) {
        const Segment& segment = table[y];
        const u64 source_end = segment.source + segment.count * source_size;
        table_entry = {table_address + y * sizeof(Segment), table_address + (y + 1) * sizeof(Segment)};
        readable = {segment.source / read_granularity * read_granularity,
                    (source_end + read_granularity - 1) / read_granularity * read_granularity};
        writable = {segment.destination, segment.destination + segment.count * destination_size};
        if (segment.count == 0) readable = writable = {};
        for (u32 x = 0; x < blocks; x++) {
            for (u32 thread = 0; thread < threads; thread++) {
                blockIdx = {x, y, 0};
                threadIdx = {thread, 0, 0};
                kernel(table_address);
            }
        }
    }
    *outcome = {strays, stored_bytes};
    return true;
}
