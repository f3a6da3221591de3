/* Reads and layers into memory of a CUDA device and of a ROCm device, allocated by the drivers that HOISTWAY_CUDA_DRIVER and
 * HOISTWAY_HIP_DRIVER name. Usage: device FILE: a checkpoint of at least three tensors. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int (*allocate_function)(uint64_t *, size_t);
typedef int (*to_host_function)(void *, uint64_t, size_t);

static int (*hip_to_host_async)(void *, uint64_t, size_t, void *);

/* Memory that is not pinned has been written when the call returns. */
static int hip_to_host(void *host, uint64_t device, size_t bytes) {
    return hip_to_host_async(host, device, bytes, NULL);
}

/* `stream` and `event` come before the first read; they may be NULL. */
static void reads_arrive(const char *path, int target, allocate_function allocate, to_host_function to_host,
                         void *stream, void *event) {
    hoistway_catalog *catalog = NULL;
    hoistway_reader *reader = NULL;
    CHECK(hoistway_catalog_open(&path, 1, NULL, &catalog) == HOISTWAY_OK);
    CHECK(hoistway_reader_create(NULL, &reader) == HOISTWAY_OK);
    hoistway_tensor tensor = {.size = sizeof tensor};
    CHECK(hoistway_catalog_tensor(catalog, 0, &tensor) == HOISTWAY_OK);

    uint64_t address = 0;
    CHECK(allocate(&address, tensor.bytes + 1) == 0);
    hoistway_read reads[3] = {0};
    unsigned char *expected = malloc(tensor.bytes), *found = malloc(tensor.bytes);
    for (int index = 0; index < 3; index++) {
        reads[index].size = sizeof reads[index];
        reads[index].catalog = catalog;
        reads[index].file = tensor.file;
        reads[index].fd = -1;
        reads[index].offset = tensor.offset;
        reads[index].length = tensor.bytes;
        reads[index].name = tensor.name;
    }
    reads[0].target = target;
    reads[0].stream = stream;
    reads[0].event = event;
    reads[0].destination = (void *)(uintptr_t)(address + 1);
    reads[1].destination = expected;
    /* A device that is not there fails its own read. */
    reads[2].target = target;
    reads[2].device = 99;
    reads[2].destination = (void *)(uintptr_t)address;
    hoistway_batch *batch = NULL;
    CHECK(hoistway_batch_submit(reader, reads, 3, HOISTWAY_DEMAND, &batch) == HOISTWAY_OK);
    CHECK(hoistway_batch_wait(batch, UINT64_MAX, NULL, NULL) == HOISTWAY_DEVICE);
    CHECK(hoistway_batch_status(batch, 0) == HOISTWAY_OK && hoistway_batch_status(batch, 1) == HOISTWAY_OK);
    char *report = NULL;
    CHECK(hoistway_batch_report(batch, &report) == HOISTWAY_OK && strstr(report, "\"via\":\"staged\""));
    hoistway_string_free(report);
    CHECK(to_host(found, address + 1, tensor.bytes) == 0);
    CHECK(memcmp(found, expected, tensor.bytes) == 0);
    hoistway_batch_free(batch);
    hoistway_reader_free(reader);
    hoistway_catalog_free(catalog);
    free(expected);
    free(found);
}

static int gate;

static void wait_at_gate(void *context) {
    (void)context;
    while (!__atomic_load_n(&gate, __ATOMIC_SEQ_CST)) {
        usleep(1000);
    }
}

/* What is queued on a stream sees the bytes that were there before a read that comes after it: by the stream, or by an event. */
static void reads_come_after(const char *path, void *driver, int by_event) {
    enum { OLD = 0x5a };
    allocate_function allocate = (allocate_function)dlsym(driver, "cuMemAlloc_v2");
    to_host_function to_host = (to_host_function)dlsym(driver, "cuMemcpyDtoH_v2");
    int (*make_stream)(void **, unsigned) = (int (*)(void **, unsigned))dlsym(driver, "cuStreamCreate");
    int (*make_event)(void **, unsigned) = (int (*)(void **, unsigned))dlsym(driver, "cuEventCreate");
    int (*record)(void *, void *) = (int (*)(void *, void *))dlsym(driver, "cuEventRecord");
    int (*fill)(uint64_t, unsigned char, size_t, void *) =
        (int (*)(uint64_t, unsigned char, size_t, void *))dlsym(driver, "cuMemsetD8Async");
    int (*copy)(uint64_t, uint64_t, size_t, void *) =
        (int (*)(uint64_t, uint64_t, size_t, void *))dlsym(driver, "cuMemcpyDtoDAsync_v2");
    int (*launch)(void *, void (*)(void *), void *) =
        (int (*)(void *, void (*)(void *), void *))dlsym(driver, "cuLaunchHostFunc");
    CHECK(allocate && to_host && make_stream && make_event && record && fill && copy && launch);

    hoistway_catalog *catalog = NULL;
    hoistway_reader *reader = NULL;
    CHECK(hoistway_catalog_open(&path, 1, NULL, &catalog) == HOISTWAY_OK);
    CHECK(hoistway_reader_create(NULL, &reader) == HOISTWAY_OK);
    hoistway_tensor tensor = {.size = sizeof tensor};
    CHECK(hoistway_catalog_tensor(catalog, 0, &tensor) == HOISTWAY_OK);

    /* A stream that is in no order with the default one. */
    void *stream = NULL, *event = NULL;
    uint64_t place = 0, earlier = 0;
    CHECK(make_stream(&stream, 1) == 0 && make_event(&event, 2) == 0);
    CHECK(allocate(&place, tensor.bytes) == 0 && allocate(&earlier, tensor.bytes) == 0);
    __atomic_store_n(&gate, 0, __ATOMIC_SEQ_CST);
    CHECK(fill(place, OLD, tensor.bytes, stream) == 0 && launch(stream, wait_at_gate, NULL) == 0);
    CHECK(copy(earlier, place, tensor.bytes, stream) == 0 && record(event, stream) == 0);

    hoistway_read read = {.size = sizeof read, .catalog = catalog, .fd = -1, .target = HOISTWAY_TARGET_CUDA};
    read.file = tensor.file;
    read.offset = tensor.offset;
    read.length = tensor.bytes;
    read.destination = (void *)(uintptr_t)place;
    *(by_event ? &read.event : &read.stream) = by_event ? event : stream;
    hoistway_batch *batch = NULL;
    CHECK(hoistway_batch_submit(reader, &read, 1, HOISTWAY_DEMAND, &batch) == HOISTWAY_OK);
    CHECK(hoistway_batch_wait(batch, 200, NULL, NULL) == HOISTWAY_PENDING);
    __atomic_store_n(&gate, 1, __ATOMIC_SEQ_CST);
    CHECK(hoistway_batch_wait(batch, UINT64_MAX, NULL, NULL) == HOISTWAY_OK);
    hoistway_batch_free(batch);

    unsigned char *found = malloc(tensor.bytes), *expected = malloc(tensor.bytes);
    CHECK(to_host(found, earlier, tensor.bytes) == 0);
    for (uint64_t index = 0; index < tensor.bytes; index++) {
        CHECK(found[index] == OLD);
    }
    read.target = HOISTWAY_TARGET_HOST;
    read.stream = read.event = NULL;
    read.destination = expected;
    CHECK(hoistway_batch_submit(reader, &read, 1, HOISTWAY_DEMAND, &batch) == HOISTWAY_OK);
    CHECK(hoistway_batch_wait(batch, UINT64_MAX, NULL, NULL) == HOISTWAY_OK);
    CHECK(to_host(found, place, tensor.bytes) == 0 && memcmp(found, expected, tensor.bytes) == 0);
    hoistway_batch_free(batch);
    hoistway_reader_free(reader);
    hoistway_catalog_free(catalog);
    free(expected);
    free(found);
}

/* Of layers on a device, the bytes of each tensor are those that a stream to the host brings. */
static void layers_arrive(const char *path, int target, to_host_function to_host) {
    hoistway_catalog *catalog = NULL;
    hoistway_reader *reader = NULL;
    CHECK(hoistway_catalog_open(&path, 1, NULL, &catalog) == HOISTWAY_OK);
    CHECK(hoistway_reader_create(NULL, &reader) == HOISTWAY_OK);
    const char *names[] = {"tensor.0", "tensor.4", "tensor.3", "tensor.1", "tensor.2"};
    hoistway_layer_spec specs[] = {{"first", names, 1}, {"second", names + 1, 2}, {"third", names + 3, 2}};
    hoistway_layers_options options = {.size = sizeof options, .layers = specs, .layer_count = 3};
    hoistway_layers *to_the_host = NULL, *layers = NULL;
    /* A program with an older header gives no device. */
    options.size = offsetof(hoistway_layers_options, target);
    options.target = target;
    CHECK(hoistway_layers_open(reader, catalog, &options, &to_the_host) == HOISTWAY_OK);
    options.size = sizeof options;
    /* The first two layers, of 5000001, and of 123457 and 4096 bytes: each tensor takes whole multiples of 256. */
    options.budget_bytes = 5000192 + 123648 + 4096;
    CHECK(hoistway_layers_open(reader, catalog, &options, &layers) == HOISTWAY_OK);
    for (int pass = 0; pass < 2; pass++) {
        for (int number = 0; number < 3; number++) {
            hoistway_layer *layer = NULL, *expected = NULL;
            CHECK(hoistway_layers_next(layers, &layer) == HOISTWAY_OK);
            CHECK(hoistway_layers_next(to_the_host, &expected) == HOISTWAY_OK);
            CHECK(strcmp(hoistway_layer_name(layer), specs[number].name) == 0);
            CHECK(hoistway_layer_tensor_count(layer) == specs[number].tensor_count);
            for (uint64_t index = 0; index < specs[number].tensor_count; index++) {
                hoistway_layer_part part = {.size = sizeof part}, host = {.size = sizeof host};
                CHECK(hoistway_layer_tensor(layer, index, &part) == HOISTWAY_OK);
                /* An older structure has no member that says where the address leads. */
                hoistway_layer_part older = {.size = offsetof(hoistway_layer_part, target)};
                CHECK(hoistway_layer_tensor(layer, index, &older) == HOISTWAY_INVALID_ARGUMENT && !older.address);
                CHECK(hoistway_layer_tensor(expected, index, &older) == HOISTWAY_OK && older.address);
                CHECK(hoistway_layer_tensor(expected, index, &host) == HOISTWAY_OK);
                CHECK(part.target == target && part.device == 0 && part.bytes == host.bytes);
                CHECK(host.target == HOISTWAY_TARGET_HOST && host.device == 0);
                CHECK((uintptr_t)part.address % 256 == 0 && strcmp(part.name, host.name) == 0);
                unsigned char *found = malloc(part.bytes + 1);
                CHECK(part.bytes == 0 || to_host(found, (uintptr_t)part.address, part.bytes) == 0);
                CHECK(memcmp(found, host.address, part.bytes) == 0);
                free(found);
            }
            if (pass == 0) {
                CHECK(hoistway_layer_used_behind(layer, NULL) == HOISTWAY_OK);
                CHECK(hoistway_layer_used_behind(expected, NULL) == HOISTWAY_INVALID_ARGUMENT);
            }
            hoistway_layer_free(layer);
            hoistway_layer_free(expected);
        }
    }
    char *stats = NULL;
    CHECK(hoistway_layers_stats(layers, &stats) == HOISTWAY_OK && !strstr(stats, "\"peak_device_bytes\":0,"));
    hoistway_string_free(stats);
    CHECK(hoistway_layers_stats(to_the_host, &stats) == HOISTWAY_OK && strstr(stats, "\"peak_device_bytes\":0,"));
    hoistway_string_free(stats);
    hoistway_layers_free(layers);
    hoistway_layers_free(to_the_host);

    layers = NULL;
    options.device = 99;
    CHECK(hoistway_layers_open(reader, catalog, &options, &layers) == HOISTWAY_DEVICE && !layers);
    options.device = -1;
    CHECK(hoistway_layers_open(reader, catalog, &options, &layers) == HOISTWAY_INVALID_ARGUMENT && !layers);
    options.device = 0;
    options.target = HOISTWAY_TARGET_CALLBACK;
    CHECK(hoistway_layers_open(reader, catalog, &options, &layers) == HOISTWAY_INVALID_ARGUMENT && !layers);
    CHECK(hoistway_layer_used_behind(NULL, NULL) == HOISTWAY_INVALID_ARGUMENT);
    hoistway_reader_free(reader);
    hoistway_catalog_free(catalog);
}

/* A layer arrives in memory that an earlier one had while other streams of the device are busy: the stream that used it was named. */
static void layers_come_after_their_stream_alone(const char *path, void *driver) {
    int (*make_stream)(void **, unsigned) = (int (*)(void **, unsigned))dlsym(driver, "cuStreamCreate");
    int (*finish)(void *) = (int (*)(void *))dlsym(driver, "cuStreamSynchronize");
    int (*launch)(void *, void (*)(void *), void *) =
        (int (*)(void *, void (*)(void *), void *))dlsym(driver, "cuLaunchHostFunc");
    CHECK(make_stream && finish && launch);
    hoistway_catalog *catalog = NULL;
    hoistway_reader *reader = NULL;
    CHECK(hoistway_catalog_open(&path, 1, NULL, &catalog) == HOISTWAY_OK);
    CHECK(hoistway_reader_create(NULL, &reader) == HOISTWAY_OK);
    const char *name = "tensor.3";
    hoistway_layer_spec specs[] = {{"first", &name, 1}, {"second", &name, 1}};
    /* Memory for one layer. */
    hoistway_layers_options options = {.size = sizeof options, .budget_bytes = 4096, .layers = specs};
    options.layer_count = 2;
    options.target = HOISTWAY_TARGET_CUDA;
    hoistway_layers *layers = NULL;
    CHECK(hoistway_layers_open(reader, catalog, &options, &layers) == HOISTWAY_OK);

    void *busy = NULL, *own = NULL;
    CHECK(make_stream(&busy, 1) == 0 && make_stream(&own, 1) == 0);
    hoistway_layer *layer = NULL;
    const void *address = NULL;
    __atomic_store_n(&gate, 0, __ATOMIC_SEQ_CST);
    for (int number = 0; number < 3; number++) {
        CHECK(hoistway_layers_next(layers, &layer) == HOISTWAY_OK);
        hoistway_layer_part part = {.size = sizeof part};
        CHECK(hoistway_layer_tensor(layer, 0, &part) == HOISTWAY_OK);
        CHECK(number == 0 || part.address == address);
        address = part.address;
        if (number == 0) {
            CHECK(launch(busy, wait_at_gate, NULL) == 0);
        }
        CHECK(hoistway_layer_used_behind(layer, own) == HOISTWAY_OK);
        hoistway_layer_free(layer);
    }
    __atomic_store_n(&gate, 1, __ATOMIC_SEQ_CST);
    CHECK(finish(busy) == 0);
    hoistway_layers_free(layers);
    hoistway_reader_free(reader);
    hoistway_catalog_free(catalog);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    /* A layer that waits for work which never ends fails, rather than hangs. */
    alarm(60);
    void *driver = dlopen(getenv("HOISTWAY_CUDA_DRIVER"), RTLD_NOW);
    CHECK(driver);
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*set_current)(void *) = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
    allocate_function allocate = (allocate_function)dlsym(driver, "cuMemAlloc_v2");
    to_host_function to_host = (to_host_function)dlsym(driver, "cuMemcpyDtoH_v2");
    CHECK(init && retain && set_current && allocate && to_host);
    void *context = NULL;
    CHECK(init(0) == 0 && retain(&context, 0) == 0 && set_current(context) == 0);
    reads_arrive(arguments[1], HOISTWAY_TARGET_CUDA, allocate, to_host, NULL, NULL);
    int (*make_stream)(void **, unsigned) = (int (*)(void **, unsigned))dlsym(driver, "cuStreamCreate");
    int (*make_event)(void **, unsigned) = (int (*)(void **, unsigned))dlsym(driver, "cuEventCreate");
    int (*record)(void *, void *) = (int (*)(void *, void *))dlsym(driver, "cuEventRecord");
    CHECK(make_stream && make_event && record);
    void *stream = NULL, *event = NULL;
    CHECK(make_stream(&stream, 1) == 0 && make_event(&event, 2) == 0 && record(event, stream) == 0);
    reads_arrive(arguments[1], HOISTWAY_TARGET_CUDA, allocate, to_host, stream, NULL);
    reads_arrive(arguments[1], HOISTWAY_TARGET_CUDA, allocate, to_host, NULL, event);
    reads_arrive(arguments[1], HOISTWAY_TARGET_CUDA, allocate, to_host, stream, event);
    reads_come_after(arguments[1], driver, 0);
    reads_come_after(arguments[1], driver, 1);
    layers_arrive(arguments[1], HOISTWAY_TARGET_CUDA, to_host);
    layers_come_after_their_stream_alone(arguments[1], driver);

    driver = dlopen(getenv("HOISTWAY_HIP_DRIVER"), RTLD_NOW);
    CHECK(driver);
    init = (int (*)(unsigned))dlsym(driver, "hipInit");
    allocate = (allocate_function)dlsym(driver, "hipMalloc");
    hip_to_host_async = (int (*)(void *, uint64_t, size_t, void *))dlsym(driver, "hipMemcpyDtoHAsync");
    CHECK(init && allocate && hip_to_host_async && init(0) == 0);
    reads_arrive(arguments[1], HOISTWAY_TARGET_ROCM, allocate, hip_to_host, NULL, NULL);
    layers_arrive(arguments[1], HOISTWAY_TARGET_ROCM, hip_to_host);
    puts("ok");
    return 0;
}
