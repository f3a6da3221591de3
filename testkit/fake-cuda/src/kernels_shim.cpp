// Runs the engine's kernels on a CPU: their indices, and their global memory, whose addresses the stand-in
// translates. Everything here belongs to the thread that executes a stream.

#include KERNELS_SOURCE

thread_local WlIndex blockIdx, threadIdx, gridDim, blockDim;

namespace {

// Why a kernel stopped being meaningful, as the driver's error codes. Its loads yield zeros from then on.
constexpr int ILLEGAL_ADDRESS = 700, MISALIGNED_ADDRESS = 716;

// Device addresses [begin, end), which the host finds at `host`.
struct Reachable {
    u64 begin, end;
    unsigned char* host;
};

// A kernel touches few allocations, each of them for every element: so the answers are kept.
constexpr u32 REMEMBERED = 4;
thread_local Reachable reachable[REMEMBERED];
thread_local u32 oldest;
thread_local int failure;
thread_local u64 bytes_stored;

// Finds out what can be reached around an address.
using Reach = bool (*)(u64 address, u64* begin, u64* end, unsigned char** host);
thread_local Reach reach;

unsigned char* host_address(u64 address, u32 size) {
    if (failure != 0) return nullptr;
    if (address % size != 0) {
        failure = MISALIGNED_ADDRESS;
        return nullptr;
    }
    for (const Reachable& range : reachable) {
        if (address >= range.begin && address < range.end && size <= range.end - address) {
            return range.host + (address - range.begin);
        }
    }
    Reachable found = {};
    if (!reach(address, &found.begin, &found.end, &found.host) || size > found.end - address) {
        failure = ILLEGAL_ADDRESS;
        return nullptr;
    }
    reachable[oldest] = found;
    oldest = (oldest + 1) % REMEMBERED;
    return found.host + (address - found.begin);
}

}  // namespace

extern "C" void wl_load_bytes(u64 address, void* into, u32 size) {
    if (const unsigned char* from = host_address(address, size)) {
        __builtin_memcpy(into, from, size);
    } else {
        __builtin_memset(into, 0, size);
    }
}

extern "C" void wl_store_bytes(u64 address, const void* from, u32 size) {
    if (unsigned char* into = host_address(address, size)) {
        __builtin_memcpy(into, from, size);
        bytes_stored += size;
    }
}

// Runs every thread of a launch, one after another. Returns 0 or the driver's error code.
extern "C" int fake_cuda_run_kernel(void (*kernel)(u64), u64 argument, const u32* grid, const u32* block,
                                    Reach reaching, u64* stored) {
    reach = reaching;
    for (Reachable& range : reachable) range = {};
    failure = 0;
    bytes_stored = 0;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++)
                for (threadIdx.z = 0; threadIdx.z < block[2]; threadIdx.z++)
                    for (threadIdx.y = 0; threadIdx.y < block[1]; threadIdx.y++)
                        for (threadIdx.x = 0; threadIdx.x < block[0]; threadIdx.x++) {
                            kernel(argument);
                            if (failure != 0) return failure;
                        }
    *stored = bytes_stored;
    return 0;
}
