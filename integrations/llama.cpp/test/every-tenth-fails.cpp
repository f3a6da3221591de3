// Windlass's functions, passed on to the library that FORWARD_TO names, but for every tenth read: that one writes
// nonsense to a part of its destination and fails.
#include "windlass.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <dlfcn.h>

// A read's place in the batch that was passed on.
struct windlass_batch {
    windlass_batch *    inner;
    std::vector<size_t> places;
};

namespace {

constexpr size_t FAILED = SIZE_MAX;

template <typename function> function forward(function, const char * name) {
    static void * const library = dlopen(std::getenv("FORWARD_TO"), RTLD_NOW | RTLD_LOCAL);
    void * const found = library ? dlsym(library, name) : nullptr;
    if (!found) {
        std::fprintf(stderr, "every-tenth-fails: FORWARD_TO has no %s\n", name);
        std::abort();
    }
    return reinterpret_cast<function>(found);
}

} // namespace

#define FORWARD(name) forward(&name, #name)

extern "C" {

uint32_t windlass_abi_version(void) {
    return FORWARD(windlass_abi_version)();
}

const char * windlass_version(void) {
    return FORWARD(windlass_version)();
}

const char * windlass_last_error(void) {
    return FORWARD(windlass_last_error)();
}

void windlass_string_free(char * string) {
    FORWARD(windlass_string_free)(string);
}

windlass_status windlass_reader_create(const windlass_reader_options * options, windlass_reader ** reader) {
    return FORWARD(windlass_reader_create)(options, reader);
}

void windlass_reader_free(windlass_reader * reader) {
    FORWARD(windlass_reader_free)(reader);
}

windlass_status windlass_batch_submit(const windlass_reader * reader, const windlass_read * reads, uint64_t count,
                                      int32_t priority, windlass_batch ** batch) {
    auto * created = new windlass_batch { nullptr, {} };
    std::vector<windlass_read> kept;
    for (uint64_t i = 0; i < count; ++i) {
        if (i % 10 == 0) {
            std::memset(reads[i].destination, 0xa5, reads[i].length / 2);
            created->places.push_back(FAILED);
        } else {
            created->places.push_back(kept.size());
            kept.push_back(reads[i]);
        }
    }
    const windlass_status status =
        FORWARD(windlass_batch_submit)(reader, kept.data(), kept.size(), priority, &created->inner);
    if (status != WINDLASS_OK) {
        delete created;
        return status;
    }
    *batch = created;
    return WINDLASS_OK;
}

windlass_status windlass_batch_wait(const windlass_batch * batch, uint64_t timeout_ms, windlass_progress progress,
                                    void * context) {
    const windlass_status status = FORWARD(windlass_batch_wait)(batch->inner, timeout_ms, progress, context);
    return status == WINDLASS_OK ? WINDLASS_IO : status;
}

windlass_status windlass_batch_status(const windlass_batch * batch, uint64_t index) {
    const size_t place = batch->places[index];
    return place == FAILED ? WINDLASS_IO : FORWARD(windlass_batch_status)(batch->inner, place);
}

windlass_status windlass_batch_error(const windlass_batch * batch, uint64_t index, char ** message) {
    const size_t place = batch->places[index];
    if (place != FAILED) {
        return FORWARD(windlass_batch_error)(batch->inner, place, message);
    }
    // The other library's own strings are the only ones that its windlass_string_free may get.
    *message = nullptr;
    return WINDLASS_NOT_FOUND;
}

void windlass_batch_free(windlass_batch * batch) {
    if (batch) {
        FORWARD(windlass_batch_free)(batch->inner);
        delete batch;
    }
}

} // extern "C"
