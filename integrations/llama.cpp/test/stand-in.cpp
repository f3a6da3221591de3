// A stand-in for windlass's library: plain reads on a few threads, behind the same functions.
#include "windlass.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

struct windlass_reader {};

namespace {

constexpr uint64_t CHUNK = 4 << 20;
constexpr unsigned THREADS = 4;

// Part of a read, small enough that threads share a large tensor.
struct piece {
    size_t   read;
    uint64_t position;
    uint64_t length;
};

} // namespace

struct windlass_batch {
    std::vector<windlass_read>                     reads;
    std::vector<piece>                             pieces;
    std::unique_ptr<std::atomic<windlass_status>[]> statuses;
    std::unique_ptr<std::atomic<uint64_t>[]>       missing;
    uint64_t                                       bytes = 0;
    std::atomic<size_t>                            next { 0 };
    std::atomic<uint64_t>                          bytes_done { 0 };
    std::atomic<bool>                              cancelled { false };
    std::mutex                                     mutex;
    std::condition_variable                        changed;
    size_t                                         running = 0;
    std::vector<std::thread>                       threads;
    std::vector<int>                               opened;

    ~windlass_batch() {
        for (const int file : opened) {
            close(file);
        }
    }

    void work() {
        for (size_t i = next++; i < pieces.size() && !cancelled; i = next++) {
            const piece & part = pieces[i];
            const windlass_status status = copy(reads[part.read], part);
            if (status != WINDLASS_OK) {
                statuses[part.read] = status;
            } else if ((missing[part.read] -= part.length) == 0) {
                statuses[part.read] = WINDLASS_OK;
            }
            bytes_done += part.length;
        }
        std::lock_guard<std::mutex> lock(mutex);
        --running;
        changed.notify_all();
    }

    static windlass_status copy(const windlass_read & read, const piece & part) {
        auto * destination = static_cast<char *>(read.destination) + part.position;
        for (uint64_t done = 0; done < part.length;) {
            const ssize_t count = pread(read.fd, destination + done, part.length - done,
                                        static_cast<off_t>(read.offset + part.position + done));
            if (count < 0 && errno != EINTR) {
                return WINDLASS_IO;
            }
            if (count == 0) {
                return WINDLASS_TRUNCATED;
            }
            done += count > 0 ? static_cast<uint64_t>(count) : 0;
        }
        return WINDLASS_OK;
    }
};

extern "C" {

uint32_t windlass_abi_version(void) {
    const char * version = std::getenv("STAND_IN_ABI_VERSION");
    return version ? static_cast<uint32_t>(std::atoi(version)) : WINDLASS_ABI_VERSION;
}

const char * windlass_version(void) {
    return "stand-in";
}

const char * windlass_last_error(void) {
    return "the stand-in gives no reasons";
}

void windlass_string_free(char * string) {
    std::free(string);
}

windlass_status windlass_reader_create(const windlass_reader_options *, windlass_reader ** reader) {
    if (std::getenv("STAND_IN_NO_READER")) {
        return WINDLASS_MEMORY;
    }
    *reader = new windlass_reader;
    return WINDLASS_OK;
}

void windlass_reader_free(windlass_reader * reader) {
    delete reader;
}

windlass_status windlass_batch_submit(const windlass_reader *, const windlass_read * reads, uint64_t count, int32_t,
                                      windlass_batch ** batch) {
    auto * created = new windlass_batch;
    created->reads.assign(reads, reads + count);
    created->statuses = std::make_unique<std::atomic<windlass_status>[]>(count);
    created->missing = std::make_unique<std::atomic<uint64_t>[]>(count);
    for (uint64_t i = 0; i < count; ++i) {
        // The only device is that of the tests, which CUDA counts second.
        const bool reachable = reads[i].target == WINDLASS_TARGET_HOST ||
                               (reads[i].target == WINDLASS_TARGET_CUDA && reads[i].device == 1);
        if (reads[i].size != sizeof(windlass_read) || !reachable) {
            delete created;
            return WINDLASS_INVALID_ARGUMENT;
        }
        // Opened again: the caller's may be for direct reads only.
        const std::string path = reads[i].path ? reads[i].path : "/proc/self/fd/" + std::to_string(reads[i].fd);
        created->reads[i].fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        created->opened.push_back(created->reads[i].fd);
        created->statuses[i] = WINDLASS_PENDING;
        created->missing[i] = reads[i].length;
        created->bytes += reads[i].length;
        for (uint64_t at = 0; at < reads[i].length; at += CHUNK) {
            created->pieces.push_back({ i, at, std::min(CHUNK, reads[i].length - at) });
        }
    }
    created->running = THREADS;
    for (unsigned i = 0; i < THREADS; ++i) {
        created->threads.emplace_back(&windlass_batch::work, created);
    }
    *batch = created;
    return WINDLASS_OK;
}

windlass_status windlass_batch_wait(const windlass_batch * waited, uint64_t, windlass_progress progress, void * context) {
    auto * batch = const_cast<windlass_batch *>(waited);
    std::unique_lock<std::mutex> lock(batch->mutex);
    while (batch->running > 0) {
        lock.unlock();
        if (progress && !progress(context, batch->bytes_done, batch->bytes)) {
            batch->cancelled = true;
        }
        lock.lock();
        batch->changed.wait_for(lock, std::chrono::milliseconds(2), [&] { return batch->running == 0; });
    }
    for (size_t i = 0; i < batch->reads.size(); ++i) {
        if (batch->statuses[i] == WINDLASS_PENDING) {
            batch->statuses[i] = WINDLASS_CANCELLED;
        }
    }
    for (size_t i = 0; i < batch->reads.size(); ++i) {
        if (batch->statuses[i] != WINDLASS_OK) {
            return batch->statuses[i];
        }
    }
    return WINDLASS_OK;
}

windlass_status windlass_batch_status(const windlass_batch * batch, uint64_t index) {
    return batch->statuses[index];
}

windlass_status windlass_batch_error(const windlass_batch * batch, uint64_t index, char ** message) {
    const char * name = batch->reads[index].name;
    *message = strdup((std::string("the stand-in could not read ") + (name ? name : "a tensor")).c_str());
    return WINDLASS_OK;
}

void windlass_batch_free(windlass_batch * batch) {
    if (!batch) {
        return;
    }
    batch->cancelled = true;
    for (auto & thread : batch->threads) {
        thread.join();
    }
    delete batch;
}

} // extern "C"
