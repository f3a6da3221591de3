/* Reads into memory of a CUDA device and of a ROCm device, allocated by the drivers that HOISTWAY_CUDA_DRIVER and
 * HOISTWAY_HIP_DRIVER name. Usage: device FILE: a checkpoint of at least three tensors. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
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

int main(int count, char **arguments) {
    CHECK(count == 2);
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

    driver = dlopen(getenv("HOISTWAY_HIP_DRIVER"), RTLD_NOW);
    CHECK(driver);
    init = (int (*)(unsigned))dlsym(driver, "hipInit");
    allocate = (allocate_function)dlsym(driver, "hipMalloc");
    hip_to_host_async = (int (*)(void *, uint64_t, size_t, void *))dlsym(driver, "hipMemcpyDtoHAsync");
    CHECK(init && allocate && hip_to_host_async && init(0) == 0);
    reads_arrive(arguments[1], HOISTWAY_TARGET_ROCM, allocate, hip_to_host, NULL, NULL);
    puts("ok");
    return 0;
}
