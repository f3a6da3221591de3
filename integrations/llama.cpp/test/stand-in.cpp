// A stand-in for hoistway's library: plain reads on a few threads, behind the same functions.
#include "hoistway.h"

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

struct hoistway_reader {};

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

struct hoistway_batch {
    std::vector<hoistway_read>                     reads;
    std::vector<piece>                             pieces;
    std::unique_ptr<std::atomic<hoistway_status>[]> statuses;
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

    ~hoistway_batch() {
        for (const int file : opened) {
            close(file);
        }
    }

    void work() {
        for (size_t i = next++; i < pieces.size() && !cancelled; i = next++) {
            const piece & part = pieces[i];
            const hoistway_status status = copy(reads[part.read], part);
            if (status != HOISTWAY_OK) {
                statuses[part.read] = status;
            } else if ((missing[part.read] -= part.length) == 0) {
                statuses[part.read] = HOISTWAY_OK;
            }
            bytes_done += part.length;
        }
        std::lock_guard<std::mutex> lock(mutex);
        --running;
        changed.notify_all();
    }

    static hoistway_status copy(const hoistway_read & read, const piece & part) {
        auto * destination = static_cast<char *>(read.destination) + part.position;
        for (uint64_t done = 0; done < part.length;) {
            const ssize_t count = pread(read.fd, destination + done, part.length - done,
                                        static_cast<off_t>(read.offset + part.position + done));
            if (count < 0 && errno != EINTR) {
                return HOISTWAY_IO;
            }
            if (count == 0) {
                return HOISTWAY_TRUNCATED;
            }
            done += count > 0 ? static_cast<uint64_t>(count) : 0;
        }
        return HOISTWAY_OK;
    }
};

extern "C" {

uint32_t hoistway_abi_version(void) {
    const char * version = std::getenv("STAND_IN_ABI_VERSION");
    return version ? static_cast<uint32_t>(std::atoi(version)) : HOISTWAY_ABI_VERSION;
}

const char * hoistway_version(void) {
    return "stand-in";
}

const char * hoistway_last_error(void) {
    return "the stand-in gives no reasons";
}

void hoistway_string_free(char * string) {
    std::free(string);
}

hoistway_status hoistway_reader_create(const hoistway_reader_options *, hoistway_reader ** reader) {
    if (std::getenv("STAND_IN_NO_READER")) {
        return HOISTWAY_MEMORY;
    }
    *reader = new hoistway_reader;
    return HOISTWAY_OK;
}

void hoistway_reader_free(hoistway_reader * reader) {
    delete reader;
}

hoistway_status hoistway_batch_submit(const hoistway_reader *, const hoistway_read * reads, uint64_t count, int32_t,
                                      hoistway_batch ** batch) {
    auto * created = new hoistway_batch;
    created->reads.assign(reads, reads + count);
    created->statuses = std::make_unique<std::atomic<hoistway_status>[]>(count);
    created->missing = std::make_unique<std::atomic<uint64_t>[]>(count);
    for (uint64_t i = 0; i < count; ++i) {
        // The only device is that of the tests, which CUDA counts second.
        const bool reachable = reads[i].target == HOISTWAY_TARGET_HOST ||
                               (reads[i].target == HOISTWAY_TARGET_CUDA && reads[i].device == 1);
        if (reads[i].size != sizeof(hoistway_read) || !reachable) {
            delete created;
            return HOISTWAY_INVALID_ARGUMENT;
        }
        // Opened again: the caller's may be for direct reads only.
        const std::string path = reads[i].path ? reads[i].path : "/proc/self/fd/" + std::to_string(reads[i].fd);
        created->reads[i].fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        created->opened.push_back(created->reads[i].fd);
        created->statuses[i] = HOISTWAY_PENDING;
        created->missing[i] = reads[i].length;
        created->bytes += reads[i].length;
        for (uint64_t at = 0; at < reads[i].length; at += CHUNK) {
            created->pieces.push_back({ i, at, std::min(CHUNK, reads[i].length - at) });
        }
    }
    created->running = THREADS;
    for (unsigned i = 0; i < THREADS; ++i) {
        created->threads.emplace_back(&hoistway_batch::work, created);
    }
    *batch = created;
    return HOISTWAY_OK;
}

hoistway_status hoistway_batch_wait(const hoistway_batch * waited, uint64_t, hoistway_progress progress, void * context) {
    auto * batch = const_cast<hoistway_batch *>(waited);
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
        if (batch->statuses[i] == HOISTWAY_PENDING) {
            batch->statuses[i] = HOISTWAY_CANCELLED;
        }
    }
    for (size_t i = 0; i < batch->reads.size(); ++i) {
        if (batch->statuses[i] != HOISTWAY_OK) {
            return batch->statuses[i];
        }
    }
    return HOISTWAY_OK;
}

hoistway_status hoistway_batch_status(const hoistway_batch * batch, uint64_t index) {
    return batch->statuses[index];
}

hoistway_status hoistway_batch_error(const hoistway_batch * batch, uint64_t index, char ** message) {
    const char * name = batch->reads[index].name;
    *message = strdup((std::string("the stand-in could not read ") + (name ? name : "a tensor")).c_str());
    return HOISTWAY_OK;
}

void hoistway_batch_free(hoistway_batch * batch) {
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
