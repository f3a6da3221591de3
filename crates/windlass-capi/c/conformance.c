/* What the C ABI promises, checked from C. Usage: conformance FILE: a checkpoint of at least three tensors. */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static windlass_catalog *catalog;
static windlass_reader *reader;

/* The bytes of a tensor, read by other means. */
static unsigned char *bytes_of(const windlass_tensor *tensor) {
    unsigned char *bytes = malloc(tensor->bytes + 1);
    FILE *file = fopen(tensor->path, "rb");
    CHECK(bytes && file && fseek(file, (long)tensor->offset, SEEK_SET) == 0);
    CHECK(fread(bytes, 1, tensor->bytes, file) == tensor->bytes);
    fclose(file);
    return bytes;
}

static windlass_tensor tensor_at(uint64_t index) {
    windlass_tensor tensor = {.size = sizeof tensor};
    CHECK(windlass_catalog_tensor(catalog, index, &tensor) == WINDLASS_OK);
    return tensor;
}

static windlass_read read_of(const windlass_tensor *tensor, void *destination) {
    windlass_read read = {.size = sizeof read, .catalog = catalog, .file = tensor->file, .fd = -1};
    read.target = WINDLASS_TARGET_HOST;
    read.offset = tensor->offset;
    read.length = tensor->bytes;
    read.destination = destination;
    read.name = tensor->name;
    return read;
}

static void check_catalog(const char *path) {
    windlass_catalog *none = (windlass_catalog *)1;
    const char *missing = "/does/not/exist.safetensors";
    CHECK(windlass_catalog_open(&missing, 1, NULL, &none) == WINDLASS_NOT_FOUND && none == NULL);
    CHECK(strstr(windlass_last_error(), missing));
    CHECK(windlass_catalog_open(NULL, 1, NULL, &none) == WINDLASS_INVALID_ARGUMENT);
    CHECK(windlass_catalog_open(&path, 1, NULL, NULL) == WINDLASS_INVALID_ARGUMENT);
    windlass_catalog_options options = {0};
    CHECK(windlass_catalog_open(&path, 1, &options, &none) == WINDLASS_INVALID_ARGUMENT); /* no size */
    options.size = sizeof options;
    CHECK(windlass_catalog_open(&path, 1, &options, &catalog) == WINDLASS_OK);
    CHECK(strcmp(windlass_last_error(), "") == 0);
    uint64_t count = windlass_catalog_tensor_count(catalog);
    CHECK(count >= 3);
    for (uint64_t index = 0; index < count; index++) {
        windlass_tensor tensor = tensor_at(index), found = {.size = sizeof found};
        CHECK(windlass_catalog_find(catalog, tensor.name, &found) == WINDLASS_OK);
        CHECK(found.offset == tensor.offset && found.bytes == tensor.bytes && found.name == tensor.name);
        CHECK(strlen(tensor.dtype) > 0 && (tensor.dimensions == 0 || tensor.shape));
    }
    windlass_tensor tensor = {.size = sizeof tensor};
    CHECK(windlass_catalog_tensor(catalog, count, &tensor) == WINDLASS_NOT_FOUND);
    CHECK(windlass_catalog_find(catalog, "no such tensor", &tensor) == WINDLASS_NOT_FOUND);
    CHECK(windlass_catalog_find(catalog, "\xff\xfe", &tensor) == WINDLASS_INVALID_ARGUMENT);
    tensor.size = 8;
    CHECK(windlass_catalog_tensor(catalog, 0, &tensor) == WINDLASS_INVALID_ARGUMENT);
}

static bool count_calls(void *context, uint64_t bytes_done, uint64_t bytes_total) {
    CHECK(bytes_done <= bytes_total);
    ++*(int *)context;
    return true;
}

static void check_host_reads(void) {
    uint64_t count = windlass_catalog_tensor_count(catalog);
    windlass_read *reads = calloc(count + 1, sizeof *reads);
    int32_t *done = calloc(count + 1, sizeof *done);
    /* A descriptor for direct reads serves too, where the file system has them. */
    int fd = open(tensor_at(0).path, O_RDONLY | O_DIRECT);
    if (fd < 0) {
        fd = open(tensor_at(0).path, O_RDONLY);
    }
    for (uint64_t index = 0; index < count; index++) {
        windlass_tensor tensor = tensor_at(index);
        reads[index] = read_of(&tensor, malloc(tensor.bytes + 1));
        reads[index].done = &done[index];
        if (index % 3 == 1) { /* by descriptor, which is closed before the reads end */
            reads[index].catalog = NULL;
            reads[index].fd = fd;
        } else if (index % 3 == 2) {
            reads[index].catalog = NULL;
            reads[index].path = tensor.path;
        }
    }
    /* One that cannot be: the others are not disturbed. */
    windlass_tensor first = tensor_at(0);
    unsigned char nothing[16];
    reads[count] = read_of(&first, nothing);
    reads[count].offset = 1ull << 60;
    reads[count].length = sizeof nothing;
    reads[count].done = &done[count];
    windlass_batch *batch = NULL;
    CHECK(windlass_batch_submit(reader, reads, count + 1, WINDLASS_PREFETCH, &batch) == WINDLASS_OK);
    close(fd);
    CHECK(windlass_batch_promote(batch) == WINDLASS_OK);
    CHECK(windlass_batch_wait_read(batch, 0, UINT64_MAX) == WINDLASS_OK);
    int calls = 0;
    CHECK(windlass_batch_wait(batch, UINT64_MAX, count_calls, &calls) == WINDLASS_TRUNCATED);
    CHECK(calls > 0 && strstr(windlass_last_error(), first.name));
    for (uint64_t index = 0; index < count; index++) {
        windlass_tensor tensor = tensor_at(index);
        unsigned char *expected = bytes_of(&tensor);
        CHECK(windlass_batch_status(batch, index) == WINDLASS_OK);
        CHECK(__atomic_load_n(&done[index], __ATOMIC_ACQUIRE) == 1 + WINDLASS_OK);
        CHECK(memcmp(expected, reads[index].destination, tensor.bytes) == 0);
        free(expected);
        free(reads[index].destination);
    }
    CHECK(windlass_batch_status(batch, count) == WINDLASS_TRUNCATED);
    CHECK(done[count] == 1 + WINDLASS_TRUNCATED);
    char *message = NULL;
    CHECK(windlass_batch_error(batch, count, &message) == WINDLASS_OK && strlen(message) > 20);
    windlass_string_free(message);
    CHECK(windlass_batch_error(batch, 0, &message) == WINDLASS_OK && strlen(message) == 0);
    windlass_string_free(message);
    uint64_t told = 0, index = 0;
    windlass_status status;
    while ((status = windlass_batch_next_ended(batch, 0, &index)) == WINDLASS_OK) {
        CHECK(index <= count);
        told++;
    }
    CHECK(status == WINDLASS_NOT_FOUND && told == count + 1);
    char *report = NULL;
    CHECK(windlass_batch_report(batch, &report) == WINDLASS_OK);
    CHECK(strstr(report, "\"carriers\"") && strstr(report, "\"failed\":1"));
    windlass_string_free(report);
    CHECK(windlass_batch_status(batch, count + 1) == WINDLASS_INVALID_ARGUMENT);
    windlass_batch_free(batch);
    free(reads);
    free(done);
}

struct sink {
    unsigned char *bytes;
    uint64_t length;
    uint64_t refuse_at;
};

static int32_t take(void *context, uint64_t position, const void *bytes, uint64_t length) {
    struct sink *sink = context;
    CHECK(position + length <= sink->length);
    memcpy(sink->bytes + position, bytes, length);
    return position <= sink->refuse_at && sink->refuse_at < position + length ? 7 : 0;
}

static void check_sinks(void) {
    for (int refuses = 0; refuses < 2; refuses++) {
        windlass_tensor tensor = tensor_at(0);
        struct sink sink = {calloc(1, tensor.bytes), tensor.bytes, refuses ? tensor.bytes / 2 : UINT64_MAX};
        windlass_read read = read_of(&tensor, NULL);
        read.target = WINDLASS_TARGET_CALLBACK;
        read.sink = take;
        read.sink_context = &sink;
        windlass_batch *batch = NULL;
        CHECK(windlass_batch_submit(reader, &read, 1, WINDLASS_DEMAND, &batch) == WINDLASS_OK);
        windlass_status status = windlass_batch_wait(batch, UINT64_MAX, NULL, NULL);
        unsigned char *expected = bytes_of(&tensor);
        CHECK(status == (refuses ? WINDLASS_IO : WINDLASS_OK));
        CHECK(refuses || memcmp(expected, sink.bytes, tensor.bytes) == 0);
        CHECK(!refuses || strstr(windlass_last_error(), "7"));
        windlass_batch_free(batch);
        free(expected);
        free(sink.bytes);
    }
}

static void check_wrong_arguments(void) {
    windlass_tensor tensor = tensor_at(0);
    windlass_read good = read_of(&tensor, malloc(tensor.bytes)), bad;
    windlass_batch *batch = (windlass_batch *)1;
#define REFUSED(change, status)                                                                               \
    bad = good;                                                                                               \
    change;                                                                                                   \
    CHECK(windlass_batch_submit(reader, &bad, 1, WINDLASS_DEMAND, &batch) == status && batch == NULL)
    REFUSED(bad.size = 8, WINDLASS_INVALID_ARGUMENT);
    REFUSED(bad.target = 99, WINDLASS_INVALID_ARGUMENT);
    REFUSED(bad.destination = NULL, WINDLASS_INVALID_ARGUMENT);
    REFUSED(bad.catalog = NULL, WINDLASS_INVALID_ARGUMENT);
    REFUSED(bad.file = 99, WINDLASS_INVALID_ARGUMENT);
    REFUSED((bad.catalog = NULL, bad.fd = 123456), WINDLASS_INVALID_ARGUMENT);
    REFUSED(bad.reserved = 1, WINDLASS_INVALID_ARGUMENT);
    REFUSED(bad.size = sizeof bad + 4, WINDLASS_INVALID_ARGUMENT);
    REFUSED((bad.offset = UINT64_MAX, bad.length = 2), WINDLASS_INVALID_ARGUMENT);
    REFUSED((bad.catalog = NULL, bad.path = "/does/not/exist"), WINDLASS_NOT_FOUND);
    REFUSED(bad.target = WINDLASS_TARGET_CALLBACK, WINDLASS_INVALID_ARGUMENT);
    REFUSED((bad.target = WINDLASS_TARGET_CUDA, bad.device = -1), WINDLASS_INVALID_ARGUMENT);
    REFUSED((bad.target = WINDLASS_TARGET_ROCM, bad.device = -1), WINDLASS_INVALID_ARGUMENT);
    CHECK(windlass_batch_submit(reader, &good, 1, 99, &batch) == WINDLASS_INVALID_ARGUMENT);
    CHECK(windlass_batch_submit(NULL, &good, 1, WINDLASS_DEMAND, &batch) == WINDLASS_INVALID_ARGUMENT);
    CHECK(windlass_batch_wait(NULL, 0, NULL, NULL) == WINDLASS_INVALID_ARGUMENT);
    windlass_reader_options options = {.size = sizeof options, .flags = 1ull << 40};
    windlass_reader *other = NULL;
    CHECK(windlass_reader_create(&options, &other) == WINDLASS_INVALID_ARGUMENT && !other);
    options.flags = WINDLASS_SMALL_PAGES;
    options.route = "mapped";
    CHECK(windlass_reader_create(&options, &other) == WINDLASS_INVALID_ARGUMENT && !other);
    CHECK(strstr(windlass_last_error(), "io_uring"));
    /* No read at all is a batch that has ended. */
    CHECK(windlass_batch_submit(reader, NULL, 0, WINDLASS_DEMAND, &batch) == WINDLASS_OK);
    CHECK(windlass_batch_wait(batch, 0, NULL, NULL) == WINDLASS_OK);
    windlass_batch_free(batch);
    CHECK(windlass_batch_wait(NULL, 0, NULL, NULL) == WINDLASS_INVALID_ARGUMENT);
    windlass_batch_free(NULL); /* which leave the last error as it is */
    windlass_reader_free(NULL);
    CHECK(strlen(windlass_last_error()) > 0);
    windlass_catalog_free(NULL);
    windlass_string_free(NULL);
    free(good.destination);
}

/* Programs of a later version have longer structures: taken as long as they ask for nothing that is not there. */
static void check_later_versions(void) {
    struct later {
        windlass_read now;
        uint64_t more;
    } reads[2];
    windlass_tensor tensor = tensor_at(0);
    unsigned char *memory[2];
    for (int index = 0; index < 2; index++) {
        memory[index] = malloc(tensor.bytes);
        reads[index].now = read_of(&tensor, memory[index]);
        reads[index].now.size = sizeof reads[index];
        reads[index].more = 0;
    }
    windlass_batch *batch = NULL;
    CHECK(windlass_batch_submit(reader, &reads[0].now, 2, WINDLASS_DEMAND, &batch) == WINDLASS_OK);
    CHECK(windlass_batch_wait(batch, UINT64_MAX, NULL, NULL) == WINDLASS_OK);
    windlass_batch_free(batch);
    CHECK(memcmp(memory[0], memory[1], tensor.bytes) == 0);
    reads[1].more = 1;
    CHECK(windlass_batch_submit(reader, &reads[0].now, 2, WINDLASS_DEMAND, &batch) == WINDLASS_INVALID_ARGUMENT);
    CHECK(strstr(windlass_last_error(), "does not know"));
    free(memory[0]);
    free(memory[1]);

    struct {
        windlass_tensor now;
        uint64_t more;
    } longer = {.more = 42};
    longer.now.size = sizeof longer;
    CHECK(windlass_catalog_tensor(catalog, 0, &longer.now) == WINDLASS_OK);
    CHECK(longer.now.size == sizeof longer.now && longer.more == 42);
}

enum { LANES = 4, READS = 40 };
static int at_gate, is_open;

static int32_t wait_at_gate(void *context, uint64_t position, const void *bytes, uint64_t length) {
    (void)context, (void)position, (void)bytes, (void)length;
    __atomic_add_fetch(&at_gate, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(&is_open, __ATOMIC_SEQ_CST)) {
        usleep(1000);
    }
    return 0;
}

/* Opens the gate once what has not begun was cancelled. */
static void *open_gate(void *batch) {
    while (windlass_batch_status(batch, READS - 1) == WINDLASS_PENDING) {
        usleep(1000);
    }
    __atomic_store_n(&is_open, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

static bool refuse_at_gate(void *context, uint64_t bytes_done, uint64_t bytes_total) {
    (void)context, (void)bytes_done, (void)bytes_total;
    return __atomic_load_n(&at_gate, __ATOMIC_SEQ_CST) < LANES;
}

static void check_cancel(void) {
    windlass_reader_options options = {.size = sizeof options, .in_flight = LANES};
    windlass_reader *four = NULL;
    CHECK(windlass_reader_create(&options, &four) == WINDLASS_OK);
    windlass_tensor tensor = tensor_at(2);
    windlass_read reads[READS];
    at_gate = is_open = 0;
    for (int index = 0; index < READS; index++) {
        reads[index] = read_of(&tensor, NULL);
        reads[index].target = WINDLASS_TARGET_CALLBACK;
        reads[index].sink = wait_at_gate;
    }
    windlass_batch *batch = NULL;
    CHECK(windlass_batch_submit(four, reads, READS, WINDLASS_DEMAND, &batch) == WINDLASS_OK);
    pthread_t opener;
    CHECK(pthread_create(&opener, NULL, open_gate, batch) == 0);
    CHECK(windlass_batch_wait(batch, UINT64_MAX, refuse_at_gate, NULL) == WINDLASS_CANCELLED);
    CHECK(pthread_join(opener, NULL) == 0);
    int delivered = 0, cancelled = 0;
    for (int index = 0; index < READS; index++) {
        windlass_status status = windlass_batch_status(batch, index);
        delivered += status == WINDLASS_OK;
        cancelled += status == WINDLASS_CANCELLED;
    }
    CHECK(delivered == LANES && cancelled == READS - LANES);
    windlass_batch_free(batch);
    windlass_reader_free(four);
}

/* A model without experts has tensors that are leased by name. */
static void check_dense_tensors(void) {
    windlass_experts *store = NULL;
    CHECK(windlass_experts_open(catalog, NULL, &store) == WINDLASS_OK);
    windlass_experts_model model = {.size = sizeof model};
    CHECK(windlass_experts_describe(store, &model) == WINDLASS_OK && model.experts == 0 && model.layers == 0);
    CHECK(model.dense_tensors == windlass_catalog_tensor_count(catalog) && model.token_cycle_bytes == 0);
    windlass_tensor tensor = tensor_at(0);
    windlass_lease *lease = NULL;
    CHECK(windlass_experts_ensure_tensors(store, &tensor.name, 1, &lease) == WINDLASS_OK);
    windlass_part part = {.size = sizeof part};
    CHECK(windlass_lease_part(lease, 0, 0, &part) == WINDLASS_OK && part.bytes == tensor.bytes);
    unsigned char *expected = bytes_of(&tensor);
    CHECK(memcmp(part.address, expected, part.bytes) == 0);
    free(expected);
    uint32_t expert = 0;
    windlass_lease *none = NULL;
    CHECK(windlass_experts_ensure(store, 0, &expert, 1, &none) == WINDLASS_NOT_FOUND && !none);
    windlass_lease_free(lease);
    windlass_experts_free(store);
}

static void *from_a_thread(void *unused) {
    for (int round = 0; round < 5; round++) {
        check_host_reads();
        check_sinks();
    }
    return unused;
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    CHECK(windlass_abi_version() == WINDLASS_ABI_VERSION);
    CHECK(strlen(windlass_version()) >= 5);
    check_catalog(arguments[1]);
    check_dense_tensors();
    const char *routes[] = {NULL, "threads", "auto"};
    for (int round = 0; round < 3; round++) {
        windlass_reader_options options = {.size = sizeof options, .route = routes[round], .in_flight = 4};
        CHECK(windlass_reader_create(round == 0 ? NULL : &options, &reader) == WINDLASS_OK);
        check_host_reads();
        check_sinks();
        check_wrong_arguments();
        check_later_versions();
        check_cancel();
        pthread_t threads[4];
        for (int index = 0; index < 4; index++) {
            CHECK(pthread_create(&threads[index], NULL, from_a_thread, NULL) == 0);
        }
        for (int index = 0; index < 4; index++) {
            CHECK(pthread_join(threads[index], NULL) == 0);
        }
        windlass_reader_free(reader);
    }
    windlass_catalog_free(catalog);
    puts("ok");
    return 0;
}
