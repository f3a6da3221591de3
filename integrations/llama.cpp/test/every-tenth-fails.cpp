// Hoistway's functions, passed on to the library that FORWARD_TO names, but for every tenth read: that one writes
// nonsense to a part of its destination and fails.
#include "hoistway.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <dlfcn.h>

// A read's place in the batch that was passed on.
struct hoistway_batch {
    hoistway_batch *    inner;
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

uint32_t hoistway_abi_version(void) {
    return FORWARD(hoistway_abi_version)();
}

const char * hoistway_version(void) {
    return FORWARD(hoistway_version)();
}

const char * hoistway_last_error(void) {
    return FORWARD(hoistway_last_error)();
}

void hoistway_string_free(char * string) {
    FORWARD(hoistway_string_free)(string);
}

hoistway_status hoistway_reader_create(const hoistway_reader_options * options, hoistway_reader ** reader) {
    return FORWARD(hoistway_reader_create)(options, reader);
}

void hoistway_reader_free(hoistway_reader * reader) {
    FORWARD(hoistway_reader_free)(reader);
}

hoistway_status hoistway_batch_submit(const hoistway_reader * reader, const hoistway_read * reads, uint64_t count,
                                      int32_t priority, hoistway_batch ** batch) {
    auto * created = new hoistway_batch { nullptr, {} };
    std::vector<hoistway_read> kept;
    for (uint64_t i = 0; i < count; ++i) {
        if (i % 10 == 0) {
            std::memset(reads[i].destination, 0xa5, reads[i].length / 2);
            created->places.push_back(FAILED);
        } else {
            created->places.push_back(kept.size());
            kept.push_back(reads[i]);
        }
    }
    const hoistway_status status =
        FORWARD(hoistway_batch_submit)(reader, kept.data(), kept.size(), priority, &created->inner);
    if (status != HOISTWAY_OK) {
        delete created;
        return status;
    }
    *batch = created;
    return HOISTWAY_OK;
}

hoistway_status hoistway_batch_wait(const hoistway_batch * batch, uint64_t timeout_ms, hoistway_progress progress,
                                    void * context) {
    const hoistway_status status = FORWARD(hoistway_batch_wait)(batch->inner, timeout_ms, progress, context);
    return status == HOISTWAY_OK ? HOISTWAY_IO : status;
}

hoistway_status hoistway_batch_status(const hoistway_batch * batch, uint64_t index) {
    const size_t place = batch->places[index];
    return place == FAILED ? HOISTWAY_IO : FORWARD(hoistway_batch_status)(batch->inner, place);
}

hoistway_status hoistway_batch_error(const hoistway_batch * batch, uint64_t index, char ** message) {
    const size_t place = batch->places[index];
    if (place != FAILED) {
        return FORWARD(hoistway_batch_error)(batch->inner, place, message);
    }
    // The other library's own strings are the only ones that its hoistway_string_free may get.
    *message = nullptr;
    return HOISTWAY_NOT_FOUND;
}

void hoistway_batch_free(hoistway_batch * batch) {
    if (batch) {
        FORWARD(hoistway_batch_free)(batch->inner);
        delete batch;
    }
}

} // extern "C"
