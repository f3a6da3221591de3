//! A stand-in for NVIDIA's `libcuda.so.1` and `libcufile.so.0`, and for AMD's `libamdhip64.so`, on machines without a
//! GPU. It moves real bytes in real threads, in host memory, and is strict where the driver is only undefined.
//!
//! To use it, point a directory's `libcuda.so.1` and `libcufile.so.0` at `libfake_cuda.so` by links, not
//! copies: both must be one library, since cuFile reads into the memory that the driver allocated. Once
//! loaded it stays.
//!
//! On Windows it is the driver `nvcuda.dll`, without cuFile: `fake_cuda.dll` under that name in System32. A device has 64 GiB of
//! addresses there. It imports memory and fences of the stand-in of D3D12 that `testkit/fake-dstorage` has: `driver::external`.
//!
//! # What it does
//!
//! - **Device memory** lies at addresses that the host can't follow: dereferencing one gives SIGSEGV.
//!   Copies and kernels reach it by a second mapping and are checked against the live allocations; what lies
//!   outside is error 700. Allocations are full of 0xA5, aligned to no more than the driver promises (512
//!   bytes, or 256 from a pool), kept apart by unused pages, and their addresses rest for long after they
//!   were freed. `cuMemFree` first waits for all work on the device.
//! - **Streams** are threads, with no order between them but by events. The default stream, of which each context has one,
//!   is the legacy one: in order with streams that were made without `CU_STREAM_NON_BLOCKING`. Pinned sources are read when the stream gets to them, pageable ones at once.
//!   A copy to pageable memory returns when it is done.
//!   Copies that one call gives to a stream are made in the opposite order, since there is none to count on.
//! - **Mapped memory** (`cuMemCreate`, `cuMemAddressReserve`, `cuMemMap`) comes by granules of 2 MiB, of the current context's device,
//!   one block at one place. It cannot be used before `cuMemSetAccess`, and is poison whenever it is mapped. To unmap waits for
//!   nothing: what streams have yet to do there is error 700, and counted. None of it goes with a context.
//! - **Errors in a stream** (out of bounds, no longer pinned, or asked for) make the context unusable. From
//!   then on its calls report the error, copies, kernels and host functions don't run, and whatever ends or
//!   frees something does so before it reports the error.
//! - **Captures** make graphs of what is queued on a stream: `cuStreamBeginCapture_v2`, `cuStreamEndCapture`,
//!   `cuGraphInstantiateWithFlags` and `cuGraphLaunch`. Calls that do not go with one are refused with a code from 900 on, and
//!   invalidate it: which ones says `execution::capture`. HIP has none.
//! - **Contexts**: calls without one get 201. A handle of another context gets 400, one that was destroyed
//!   too. The last release of a primary context destroys what is left in it, and counts it as leaked. So does
//!   `cuDevicePrimaryCtxReset_v2`, which counts nothing; then streams are given the handles of those that are gone.
//! - **A forked child** gets 3 from every call but `cuGetErrorName` and `cuGetErrorString`. A host function
//!   gets 800.
//! - **Kernels** are those of the engine's `kernels.cu`, compiled for the CPU. A module's text is looked at
//!   only for `.version` and the names behind `.entry`, and an ELF file for the names of its kernels' sections.
//! - **HIP** is the same over devices of its own, as many and of the same size. Devices have one context each, which is
//!   never released; a device is current on a thread, at first the first. A module is an ELF file for AMD's devices. A
//!   stream that is destroyed forgets what it has not begun, as the header of HIP leaves open. A stream that it does not
//!   know is error 709, and so is such an event where it is destroyed; host memory is pinned for one driver alone. A thread's last error is
//!   kept until it is asked for.
//! - **cuFile** reads with `pread` and stores into device memory, for as many threads at once as call it.
//!   The mode decides what the properties say and as what the statistics count a read. Files can be
//!   registered only while the driver is open.
//!
//! # How to steer it
//!
//! Each key below is read from the environment as `FAKE_CUDA_<KEY>` at the first call, and set at run time by
//!
//! ```c
//! int fake_cuda_configure(const char *key_and_value);  // "KEY=VALUE"; 0, or 1 if it makes no sense
//! void fake_cuda_reset(void);                          // back to the environment; heals all contexts without what
//!                                                      // they had to do, and ends
//!                                                      // what COPY_LATENCY_US and COPY_MIB_S make copies wait for
//! uint64_t fake_cuda_count(const char *name);          // UINT64_MAX for a name that means nothing
//! ```
//!
//! An unknown or unreadable `FAKE_CUDA_` variable is reported on stderr and makes `cuInit` fail with 1, so
//! that a misspelt fault isn't taken for a passed test.
//!
//! | key | default | meaning |
//! |---|---|---|
//! | `DEVICES` | 2 | how many, up to 16; with 0, `cuInit` fails with 100 |
//! | `MEMORY_MIB` | 8192 | capacity of each device, up to 262144 |
//! | `ALIGNMENT` | 0 | multiple of which allocations begin, a power of two up to 2 MiB; 0 for exactly what the driver promises |
//! | `POISON` | 1 | 0 leaves memory as it is, and makes large allocations cheap |
//! | `COPY_LATENCY_US` | 0 | added to each copy, read and write; the bytes move at its end |
//! | `COPY_MIB_S` | 0 | speed of each copy, read and write; 0 for no limit |
//! | `BLOCKS` | | function whose calls do not begin until another is named, or none |
//! | `COSTS` | | `h100`: pinning, allocating, freeing and copies take the time that they take on an H100, whatever this machine does. All copies share one bus |
//! | `MOVES` | 1 | 0 makes copies between host and devices move no bytes: a simulated bus is faster than processors |
//! | `JITTER_US` | 0 | up to so much delay before each operation of a stream and each read and write |
//! | `DRIVER_VERSION` | 12080 | what `cuDriverGetVersion` says |
//! | `HIP_VERSION` | 60342134 | what `hipRuntimeGetVersion` says |
//! | `HIP_ARCHITECTURE` | `gfx942:…` | what `hipGetDevicePropertiesR0600` says of each device |
//! | `INTEGRATED` | 0 | 1 for a device that shares the host's page tables: kernels reach host memory |
//! | `LUIDS` | 1 | on Windows, 0 for devices that D3D12 does not know |
//! | `LUID_NODES` | 1 | on Windows, the nodes of its adapter that a device has: 2 for the second of two that are linked |
//! | `PINS_READ_ONLY` | 1 | whether devices say that they pin memory that cannot be written |
//! | `PINNED_MIB` | 262144 | host memory that may be pinned for all devices; beyond that, `cuMemHostRegister` fails with 2 |
//! | `REFUSES_READ_ONLY` | 0 | 1 makes that fail with 801, whatever the device says |
//! | `MAPS` | 1 | 0 for devices whose memory cannot be mapped: the attribute is 0, and the functions fail with 801 |
//! | `POOLS` | 1 | 0 makes `cuMemAllocAsync` and `cuMemFreeAsync` fail with 801, and those of HIP |
//! | `FAULTS` | | `function:nth=code`, by commas; see below |
//! | `TRACE` | | file to which each executed copy, fill and kernel appends a line of JSON, or a folder where each process has one |
//! | `CUFILE_MODE` | `compat` | `nvfs`, `p2pdma`, `compat`, `compat_strict` (5033 if compatibility isn't allowed), `closed` (5033) |
//! | `CUFILE_STATS` | 1 | 0 makes `cuFileGetStatsL3` fail with 5022 |
//! | `CUFILE_REFUSE_FS` | 0 | 1 makes `cuFileHandleRegister` fail with 5030 in the modes `nvfs` and `p2pdma` |
//! | `CUFILE_THROUGH_HOST` | 0 | 1 makes the statistics count reads as made through host memory, in any mode |
//! | `CUFILE_READ_FAULTS` | | `nth=-errno`, `nth=-5xxx` or `nth=short:bytes`, by commas |
//!
//! Setting faults replaces those set before, and counts from then on, from 1; `*` means every time, `%7` every 7th time. A call
//! fault makes the n-th call of a function return the code and do nothing; 700 and 719 make the
//! current context unusable as well, and end its work before the call returns: nothing of it is under way then, and what waits is left
//! out. So does 201 from `cuCtxPushCurrent_v2`, `hipGetDevice` and `hipSetDevice`, for all contexts of the driver, which stay usable.
//! `copy`, `fill` and `kernel` stand for operations that a stream executes:
//! the n-th does nothing, and its code makes the stream's context unusable. For cuFile's functions, codes
//! above 5000 are cuFile's and others the driver's, passed on with 5011. Read faults concern the n-th read
//! that is executed.
//!
//! A line of the trace is `{"stream":1,"op":"h2d","bytes":4096,"begin_ns":…,"end_ns":…,"device":0}`, in times
//! of CLOCK_MONOTONIC (on Windows, from the first one on). `op` is `h2d`, `d2h`, `d2d`, `fill` or the name of a kernel, for which `bytes` are
//! those stored.
//!
//! What can be counted:
//!
//! - what exists: `device_bytes` and `pinned_bytes`, also of one driver's devices (`pinned_bytes.hip`), `streams`, `events`, `modules`, `graphs`, `contexts` (retains of
//!   primary ones), `newest_stream` (its handle, or 0), `context_depth` (of the calling thread's stack), `cufile_handles`, `cufile_buffers`,
//!   `external_memories`, `external_semaphores`, `reserved` (ranges of addresses), `blocks` (handles of memory) and `mapped`;
//! - what happened: `calls_under_interpreter` (by threads that held Python's interpreter), `copies`, `pageable_copies` (on streams, from
//!   or to host memory that is not pinned), `copied_bytes`, `kernels`, `cufile_reads`, `cufile_writes`, `calls.<function>`,
//!   `leaked` (what was destroyed only with its context or with the last `cuFileDriverClose`), `unmapped_in_use` (calls of `cuMemUnmap` of what a
//!   stream had yet to copy or fill), and `destroyed_in_use` (fences of
//!   D3D12 that a stream had yet to wait for).

#![cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "cuFile is an interface of Linux"))]

mod control;
#[cfg(target_os = "linux")]
mod cufile;
mod driver;
mod execution;
mod gate;
mod hip;
mod interpreter;
mod memory;
mod status;
mod status_names;
mod system;
