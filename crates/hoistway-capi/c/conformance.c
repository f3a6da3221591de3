/* What the C ABI promises, checked from C. Usage: conformance FILE: a checkpoint of at least three tensors. */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static hoistway_catalog *catalog;
static hoistway_reader *reader;

/* The bytes of a tensor, read by other means. */
static unsigned char *bytes_of(const hoistway_tensor *tensor) {
    unsigned char *bytes = malloc(tensor->bytes + 1);
    FILE *file = fopen(tensor->path, "rb");
    CHECK(bytes && file && fseek(file, (long)tensor->offset, SEEK_SET) == 0);
    CHECK(fread(bytes, 1, tensor->bytes, file) == tensor->bytes);
    fclose(file);
    return bytes;
}

static hoistway_tensor tensor_at(uint64_t index) {
    hoistway_tensor tensor = {.size = sizeof tensor};
    CHECK(hoistway_catalog_tensor(catalog, index, &tensor) == HOISTWAY_OK);
    return tensor;
}

static hoistway_read read_of(const hoistway_tensor *tensor, void *destination) {
    hoistway_read read = {.size = sizeof read, .catalog = catalog, .file = tensor->file, .fd = -1};
    read.target = HOISTWAY_TARGET_HOST;
    read.offset = tensor->offset;
    read.length = tensor->bytes;
    read.destination = destination;
    read.name = tensor->name;
    return read;
}

static void check_catalog(const char *path) {
    hoistway_catalog *none = (hoistway_catalog *)1;
    const char *missing = "/does/not/exist.safetensors";
    CHECK(hoistway_catalog_open(&missing, 1, NULL, &none) == HOISTWAY_NOT_FOUND && none == NULL);
    CHECK(strstr(hoistway_last_error(), missing));
    CHECK(hoistway_catalog_open(NULL, 1, NULL, &none) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_catalog_open(&path, 1, NULL, NULL) == HOISTWAY_INVALID_ARGUMENT);
    hoistway_catalog_options options = {0};
    CHECK(hoistway_catalog_open(&path, 1, &options, &none) == HOISTWAY_INVALID_ARGUMENT); /* no size */
    options.size = sizeof options;
    CHECK(hoistway_catalog_open(&path, 1, &options, &catalog) == HOISTWAY_OK);
    CHECK(strcmp(hoistway_last_error(), "") == 0);
    uint64_t count = hoistway_catalog_tensor_count(catalog);
    CHECK(count >= 3);
    for (uint64_t index = 0; index < count; index++) {
        hoistway_tensor tensor = tensor_at(index), found = {.size = sizeof found};
        CHECK(hoistway_catalog_find(catalog, tensor.name, &found) == HOISTWAY_OK);
        CHECK(found.offset == tensor.offset && found.bytes == tensor.bytes && found.name == tensor.name);
        CHECK(strlen(tensor.dtype) > 0 && (tensor.dimensions == 0 || tensor.shape));
    }
    hoistway_tensor tensor = {.size = sizeof tensor};
    CHECK(hoistway_catalog_tensor(catalog, count, &tensor) == HOISTWAY_NOT_FOUND);
    CHECK(hoistway_catalog_find(catalog, "no such tensor", &tensor) == HOISTWAY_NOT_FOUND);
    CHECK(hoistway_catalog_find(catalog, "\xff\xfe", &tensor) == HOISTWAY_INVALID_ARGUMENT);
    tensor.size = 8;
    CHECK(hoistway_catalog_tensor(catalog, 0, &tensor) == HOISTWAY_INVALID_ARGUMENT);
}

static bool count_calls(void *context, uint64_t bytes_done, uint64_t bytes_total) {
    CHECK(bytes_done <= bytes_total);
    ++*(int *)context;
    return true;
}

/* A descriptor for direct reads serves too, where the file system has them. Windows has none that libraries share. */
static int descriptor_of(const char *path) {
#ifdef _WIN32
    (void)path;
    return -1;
#else
    int fd = open(path, O_RDONLY | O_DIRECT);
    return fd < 0 ? open(path, O_RDONLY) : fd;
#endif
}

static void check_host_reads(void) {
    uint64_t count = hoistway_catalog_tensor_count(catalog);
    hoistway_read *reads = calloc(count + 1, sizeof *reads);
    int32_t *done = calloc(count + 1, sizeof *done);
    int fd = descriptor_of(tensor_at(0).path);
    for (uint64_t index = 0; index < count; index++) {
        hoistway_tensor tensor = tensor_at(index);
        reads[index] = read_of(&tensor, malloc(tensor.bytes + 1));
        reads[index].done = &done[index];
        if (index % 3 == 1 && fd >= 0) { /* by descriptor, which is closed before the reads end */
            reads[index].catalog = NULL;
            reads[index].fd = fd;
        } else if (index % 3 == 2) {
            reads[index].catalog = NULL;
            reads[index].path = tensor.path;
        }
    }
    /* One that cannot be: the others are not disturbed. */
    hoistway_tensor first = tensor_at(0);
    unsigned char nothing[16];
    reads[count] = read_of(&first, nothing);
    reads[count].offset = 1ull << 60;
    reads[count].length = sizeof nothing;
    reads[count].done = &done[count];
    hoistway_batch *batch = NULL;
    CHECK(hoistway_batch_submit(reader, reads, count + 1, HOISTWAY_PREFETCH, &batch) == HOISTWAY_OK);
    if (fd >= 0) {
        close(fd);
    }
    CHECK(hoistway_batch_promote(batch) == HOISTWAY_OK);
    CHECK(hoistway_batch_wait_read(batch, 0, UINT64_MAX) == HOISTWAY_OK);
    int calls = 0;
    CHECK(hoistway_batch_wait(batch, UINT64_MAX, count_calls, &calls) == HOISTWAY_TRUNCATED);
    CHECK(calls > 0 && strstr(hoistway_last_error(), first.name));
    for (uint64_t index = 0; index < count; index++) {
        hoistway_tensor tensor = tensor_at(index);
        unsigned char *expected = bytes_of(&tensor);
        CHECK(hoistway_batch_status(batch, index) == HOISTWAY_OK);
        CHECK(__atomic_load_n(&done[index], __ATOMIC_ACQUIRE) == 1 + HOISTWAY_OK);
        CHECK(memcmp(expected, reads[index].destination, tensor.bytes) == 0);
        free(expected);
        free(reads[index].destination);
    }
    CHECK(hoistway_batch_status(batch, count) == HOISTWAY_TRUNCATED);
    CHECK(done[count] == 1 + HOISTWAY_TRUNCATED);
    char *message = NULL;
    CHECK(hoistway_batch_error(batch, count, &message) == HOISTWAY_OK && strlen(message) > 20);
    hoistway_string_free(message);
    CHECK(hoistway_batch_error(batch, 0, &message) == HOISTWAY_OK && strlen(message) == 0);
    hoistway_string_free(message);
    uint64_t told = 0, index = 0;
    hoistway_status status;
    while ((status = hoistway_batch_next_ended(batch, 0, &index)) == HOISTWAY_OK) {
        CHECK(index <= count);
        told++;
    }
    CHECK(status == HOISTWAY_NOT_FOUND && told == count + 1);
    char *report = NULL;
    CHECK(hoistway_batch_report(batch, &report) == HOISTWAY_OK);
    CHECK(strstr(report, "\"carriers\"") && strstr(report, "\"failed\":1"));
    hoistway_string_free(report);
    CHECK(hoistway_batch_status(batch, count + 1) == HOISTWAY_INVALID_ARGUMENT);
    hoistway_batch_free(batch);
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
        hoistway_tensor tensor = tensor_at(0);
        struct sink sink = {calloc(1, tensor.bytes), tensor.bytes, refuses ? tensor.bytes / 2 : UINT64_MAX};
        hoistway_read read = read_of(&tensor, NULL);
        read.target = HOISTWAY_TARGET_CALLBACK;
        read.sink = take;
        read.sink_context = &sink;
        hoistway_batch *batch = NULL;
        CHECK(hoistway_batch_submit(reader, &read, 1, HOISTWAY_DEMAND, &batch) == HOISTWAY_OK);
        hoistway_status status = hoistway_batch_wait(batch, UINT64_MAX, NULL, NULL);
        unsigned char *expected = bytes_of(&tensor);
        CHECK(status == (refuses ? HOISTWAY_IO : HOISTWAY_OK));
        CHECK(refuses || memcmp(expected, sink.bytes, tensor.bytes) == 0);
        CHECK(!refuses || strstr(hoistway_last_error(), "7"));
        hoistway_batch_free(batch);
        free(expected);
        free(sink.bytes);
    }
}

static void put(FILE *file, uint64_t number, int bytes) {
    while (bytes-- > 0) {
        fputc((int)(number >> 8 * bytes & 255), file);
    }
}

/* Writes a big-endian GGUF file: 8 numbers, and 32 single bytes. */
static void write_big_endian(const char *path) {
    const char *names[] = {"numbers", "bytes"};
    const uint32_t types[] = {0, 24};
    const uint64_t lengths[] = {8, 32};
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite("GGUF", 1, 4, file) == 4);
    put(file, 3, 4);
    put(file, 2, 8);
    put(file, 0, 8);
    for (int index = 0; index < 2; index++) {
        put(file, strlen(names[index]), 8);
        fputs(names[index], file);
        put(file, 1, 4);
        put(file, lengths[index], 8);
        put(file, types[index], 4);
        put(file, (uint64_t)index * 32, 8);
    }
    while (ftell(file) % 32 != 0) {
        fputc(0, file);
    }
    for (int byte = 0; byte < 64; byte++) {
        fputc(byte, file);
    }
    CHECK(fclose(file) == 0);
}

/* Numbers in the other byte order would not be the tensor's. */
static void check_byte_order(const char *beside) {
    hoistway_catalog *little = catalog;
    char written[4096];
    CHECK(snprintf(written, sizeof written, "%s.gguf", beside) < (int)sizeof written);
    write_big_endian(written);
    const char *path = written;
    CHECK(hoistway_catalog_open(&path, 1, NULL, &catalog) == HOISTWAY_OK);
    for (uint64_t index = 0; index < 2; index++) {
        hoistway_tensor tensor = tensor_at(index);
        unsigned char bytes[32];
        hoistway_read read = read_of(&tensor, bytes);
        hoistway_batch *batch = NULL;
        bool is_number = strcmp(tensor.name, "numbers") == 0;
        hoistway_status status = hoistway_batch_submit(reader, &read, 1, HOISTWAY_DEMAND, &batch);
        CHECK(status == (is_number ? HOISTWAY_INVALID_ARGUMENT : HOISTWAY_OK));
        CHECK(!is_number || strstr(hoistway_last_error(), "big-endian"));
        CHECK(is_number || (hoistway_batch_wait(batch, UINT64_MAX, NULL, NULL) == HOISTWAY_OK && bytes[31] == 63));
        hoistway_batch_free(batch);
    }
    hoistway_catalog_free(catalog);
    remove(path);
    catalog = little;
}

static void check_wrong_arguments(void) {
    hoistway_tensor tensor = tensor_at(0);
    hoistway_read good = read_of(&tensor, malloc(tensor.bytes)), bad;
    hoistway_batch *batch = (hoistway_batch *)1;
#define REFUSED(change, status)                                                                               \
    bad = good;                                                                                               \
    change;                                                                                                   \
    CHECK(hoistway_batch_submit(reader, &bad, 1, HOISTWAY_DEMAND, &batch) == status && batch == NULL)
    REFUSED(bad.size = 8, HOISTWAY_INVALID_ARGUMENT);
    REFUSED(bad.target = 99, HOISTWAY_INVALID_ARGUMENT);
    REFUSED(bad.destination = NULL, HOISTWAY_INVALID_ARGUMENT);
    REFUSED(bad.catalog = NULL, HOISTWAY_INVALID_ARGUMENT);
    REFUSED(bad.file = 99, HOISTWAY_INVALID_ARGUMENT);
    REFUSED((bad.catalog = NULL, bad.fd = 123456), HOISTWAY_INVALID_ARGUMENT);
    REFUSED(bad.reserved = 1, HOISTWAY_INVALID_ARGUMENT);
    REFUSED(bad.size = sizeof bad + 4, HOISTWAY_INVALID_ARGUMENT);
    REFUSED((bad.offset = UINT64_MAX, bad.length = 2), HOISTWAY_INVALID_ARGUMENT);
    REFUSED((bad.catalog = NULL, bad.path = "/does/not/exist"), HOISTWAY_NOT_FOUND);
    REFUSED(bad.target = HOISTWAY_TARGET_CALLBACK, HOISTWAY_INVALID_ARGUMENT);
    REFUSED((bad.target = HOISTWAY_TARGET_CUDA, bad.device = -1), HOISTWAY_INVALID_ARGUMENT);
    REFUSED((bad.target = HOISTWAY_TARGET_ROCM, bad.device = -1), HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_batch_submit(reader, &good, 1, 99, &batch) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_batch_submit(NULL, &good, 1, HOISTWAY_DEMAND, &batch) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_batch_wait(NULL, 0, NULL, NULL) == HOISTWAY_INVALID_ARGUMENT);
    hoistway_reader_options options = {.size = sizeof options, .flags = 1ull << 40};
    hoistway_reader *other = NULL;
    CHECK(hoistway_reader_create(&options, &other) == HOISTWAY_INVALID_ARGUMENT && !other);
    options.flags = HOISTWAY_SMALL_PAGES;
    options.route = "mapped";
    CHECK(hoistway_reader_create(&options, &other) == HOISTWAY_INVALID_ARGUMENT && !other);
    CHECK(strstr(hoistway_last_error(), "io_uring"));
    /* No read at all is a batch that has ended. */
    CHECK(hoistway_batch_submit(reader, NULL, 0, HOISTWAY_DEMAND, &batch) == HOISTWAY_OK);
    CHECK(hoistway_batch_wait(batch, 0, NULL, NULL) == HOISTWAY_OK);
    hoistway_batch_free(batch);
    CHECK(hoistway_batch_wait(NULL, 0, NULL, NULL) == HOISTWAY_INVALID_ARGUMENT);
    hoistway_batch_free(NULL); /* which leave the last error as it is */
    hoistway_reader_free(NULL);
    CHECK(strlen(hoistway_last_error()) > 0);
    hoistway_catalog_free(NULL);
    hoistway_string_free(NULL);
    free(good.destination);
}

/* Programs of a later version have longer structures: taken as long as they ask for nothing that is not there. */
static void check_later_versions(void) {
    struct later {
        hoistway_read now;
        uint64_t more;
    } reads[2];
    hoistway_tensor tensor = tensor_at(0);
    unsigned char *memory[2];
    for (int index = 0; index < 2; index++) {
        memory[index] = malloc(tensor.bytes);
        reads[index].now = read_of(&tensor, memory[index]);
        reads[index].now.size = sizeof reads[index];
        reads[index].more = 0;
    }
    hoistway_batch *batch = NULL;
    CHECK(hoistway_batch_submit(reader, &reads[0].now, 2, HOISTWAY_DEMAND, &batch) == HOISTWAY_OK);
    CHECK(hoistway_batch_wait(batch, UINT64_MAX, NULL, NULL) == HOISTWAY_OK);
    hoistway_batch_free(batch);
    CHECK(memcmp(memory[0], memory[1], tensor.bytes) == 0);
    reads[1].more = 1;
    CHECK(hoistway_batch_submit(reader, &reads[0].now, 2, HOISTWAY_DEMAND, &batch) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(strstr(hoistway_last_error(), "does not know"));
    free(memory[0]);
    free(memory[1]);

    struct {
        hoistway_tensor now;
        uint64_t more;
    } longer = {.more = 42};
    longer.now.size = sizeof longer;
    CHECK(hoistway_catalog_tensor(catalog, 0, &longer.now) == HOISTWAY_OK);
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
    while (hoistway_batch_status(batch, READS - 1) == HOISTWAY_PENDING) {
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
    hoistway_reader_options options = {.size = sizeof options, .in_flight = LANES};
    hoistway_reader *four = NULL;
    CHECK(hoistway_reader_create(&options, &four) == HOISTWAY_OK);
    hoistway_tensor tensor = tensor_at(2);
    hoistway_read reads[READS];
    at_gate = is_open = 0;
    for (int index = 0; index < READS; index++) {
        reads[index] = read_of(&tensor, NULL);
        reads[index].target = HOISTWAY_TARGET_CALLBACK;
        reads[index].sink = wait_at_gate;
    }
    hoistway_batch *batch = NULL;
    CHECK(hoistway_batch_submit(four, reads, READS, HOISTWAY_DEMAND, &batch) == HOISTWAY_OK);
    pthread_t opener;
    CHECK(pthread_create(&opener, NULL, open_gate, batch) == 0);
    CHECK(hoistway_batch_wait(batch, UINT64_MAX, refuse_at_gate, NULL) == HOISTWAY_CANCELLED);
    CHECK(pthread_join(opener, NULL) == 0);
    int delivered = 0, cancelled = 0;
    for (int index = 0; index < READS; index++) {
        hoistway_status status = hoistway_batch_status(batch, index);
        delivered += status == HOISTWAY_OK;
        cancelled += status == HOISTWAY_CANCELLED;
    }
    CHECK(delivered == LANES && cancelled == READS - LANES);
    hoistway_batch_free(batch);
    hoistway_reader_free(four);
}

/* A model without experts has tensors that are leased by name. */
static void check_dense_tensors(void) {
    hoistway_experts *store = NULL;
    CHECK(hoistway_experts_open(catalog, NULL, &store) == HOISTWAY_OK);
    hoistway_experts_model model = {.size = sizeof model};
    CHECK(hoistway_experts_describe(store, &model) == HOISTWAY_OK && model.experts == 0 && model.layers == 0);
    CHECK(model.dense_tensors == hoistway_catalog_tensor_count(catalog) && model.token_cycle_bytes == 0);
    hoistway_tensor tensor = tensor_at(0);
    hoistway_lease *lease = NULL;
    CHECK(hoistway_experts_ensure_tensors(store, &tensor.name, 1, &lease) == HOISTWAY_OK);
    hoistway_part part = {.size = sizeof part};
    CHECK(hoistway_lease_part(lease, 0, 0, &part) == HOISTWAY_OK && part.bytes == tensor.bytes);
    unsigned char *expected = bytes_of(&tensor);
    CHECK(memcmp(part.address, expected, part.bytes) == 0);
    free(expected);
    uint32_t expert = 0;
    hoistway_lease *none = NULL;
    CHECK(hoistway_experts_ensure(store, 0, &expert, 1, &none) == HOISTWAY_NOT_FOUND && !none);
    hoistway_lease_free(lease);
    hoistway_experts_free(store);
}

#ifdef _WIN32
/* Every function is there, and says that it cannot serve. */
static void check_kv_is_refused(void) {
    hoistway_kv *store = (hoistway_kv *)1;
    hoistway_kv_options options = {.size = sizeof options, .root = "store", .capacity_bytes = 1 << 30};
    CHECK(hoistway_kv_open(&options, &store) == HOISTWAY_ROUTE_UNAVAILABLE && !store);
    CHECK(strstr(hoistway_last_error(), "Linux"));
    CHECK(hoistway_kv_flush(store, 0) == HOISTWAY_ROUTE_UNAVAILABLE && hoistway_kv_event_fd(store) == -1);
    hoistway_kv_ticket *ticket = (hoistway_kv_ticket *)1;
    CHECK(hoistway_kv_load(NULL, NULL, 0, HOISTWAY_DEMAND, NULL, &ticket) == HOISTWAY_ROUTE_UNAVAILABLE && !ticket);
    CHECK(hoistway_kv_ticket_id(ticket) == 0 && hoistway_kv_ticket_is_released(ticket));
    hoistway_kv_ticket_free(ticket);
    hoistway_kv_free(store);
}
#endif

static void *from_a_thread(void *unused) {
    for (int round = 0; round < 5; round++) {
        check_host_reads();
        check_sinks();
    }
    return unused;
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    CHECK(hoistway_abi_version() == HOISTWAY_ABI_VERSION);
    CHECK(strlen(hoistway_version()) >= 5);
    check_catalog(arguments[1]);
    check_dense_tensors();
#ifdef _WIN32
    check_kv_is_refused();
#endif
    const char *routes[] = {NULL, "threads", "auto"};
    for (int round = 0; round < 3; round++) {
        hoistway_reader_options options = {.size = sizeof options, .route = routes[round], .in_flight = 4};
        CHECK(hoistway_reader_create(round == 0 ? NULL : &options, &reader) == HOISTWAY_OK);
        check_host_reads();
        check_sinks();
        check_byte_order(arguments[1]);
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
        hoistway_reader_free(reader);
    }
    hoistway_catalog_free(catalog);
    puts("ok");
    return 0;
}
