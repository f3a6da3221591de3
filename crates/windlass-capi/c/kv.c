/* What the C ABI promises of the KV store, checked from C. Usage: kv DIRECTORY: an empty one.
 * With WINDLASS_CUDA_DRIVER, blocks move to and from memory of that driver's device, too. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCK = 200000, BLOCKS = 6 };

static windlass_kv *store;
static windlass_kv_namespace *blocks;
static unsigned char *source[BLOCKS], *target[BLOCKS];
static char names[BLOCKS][16];
static windlass_kv_key keys[BLOCKS];

static windlass_kv *open_store(const char *root) {
    windlass_kv_options options = {.size = sizeof options, .root = root};
    options.capacity_bytes = 64 << 20;
    options.min_free_bytes = 1;
    options.durability = "none";
    windlass_kv *opened = NULL;
    CHECK(windlass_kv_open(&options, &opened) == WINDLASS_OK && opened);
    return opened;
}

static windlass_kv_namespace *open_namespace(windlass_kv *of) {
    const char *other[] = {"lora", "none"};
    windlass_kv_description description = {.size = sizeof description, .model = "m@1", .dtype = "bfloat16"};
    description.other = other;
    description.other_count = 1;
    description.tensor_rank = 1;
    description.tensor_ranks = 2;
    windlass_kv_namespace *opened = NULL;
    CHECK(windlass_kv_namespace_open(of, &description, &opened) == WINDLASS_OK && opened);
    return opened;
}

/* Two pieces of odd lengths, as paged layouts have them. */
static windlass_kv_item item_of(int block, unsigned char *const *memory, windlass_kv_piece *pieces) {
    pieces[0] = (windlass_kv_piece){.address = memory[block], .length = 777};
    pieces[1] = (windlass_kv_piece){.address = memory[block] + 777, .length = BLOCK - 777};
    windlass_kv_item item = {.size = sizeof item, .key = keys[block], .pieces = pieces, .piece_count = 2};
    return item;
}

static windlass_kv_ticket *begin(bool is_load, int first, int count, const windlass_kv_request *request) {
    windlass_kv_item items[BLOCKS];
    windlass_kv_piece pieces[BLOCKS][2];
    for (int index = 0; index < count; index++) {
        items[index] = item_of(first + index, is_load ? target : source, pieces[index]);
    }
    windlass_kv_ticket *ticket = NULL;
    CHECK((is_load ? windlass_kv_load(blocks, items, count, WINDLASS_DEMAND, request, &ticket)
                   : windlass_kv_store(blocks, items, count, WINDLASS_BACKGROUND, request, &ticket)) == WINDLASS_OK);
    return ticket;
}

static windlass_kv_status outcome_of(const windlass_kv_ticket *ticket, int index, int count) {
    windlass_kv_outcome outcomes[BLOCKS];
    CHECK(windlass_kv_ticket_outcomes(ticket, outcomes, count) == WINDLASS_OK);
    CHECK(outcomes[index].error == 0);
    return outcomes[index].status;
}

static void load_and_compare(int first, int count) {
    for (int index = first; index < first + count; index++) {
        memset(target[index], 0, BLOCK);
    }
    windlass_kv_ticket *ticket = begin(true, first, count, NULL);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_OK);
    CHECK(windlass_kv_ticket_poll(ticket) == WINDLASS_OK);
    CHECK(windlass_kv_ticket_wait_released(ticket, 10000) == WINDLASS_OK);
    CHECK(windlass_kv_ticket_is_released(ticket));
    for (int index = first; index < first + count; index++) {
        CHECK(memcmp(source[index], target[index], BLOCK) == 0);
        CHECK(outcome_of(ticket, index - first, count) == WINDLASS_KV_OK);
    }
    char *report = NULL;
    CHECK(windlass_kv_ticket_report(ticket, &report) == WINDLASS_OK);
    CHECK(strstr(report, "\"items\":[\"ok\"") && strstr(report, "\"carried\":{\""));
    windlass_string_free(report);
    windlass_kv_ticket_free(ticket);
}

static void check_blocks(void) {
    bool found[BLOCKS];
    uint64_t length = 9, last = 9;
    CHECK(windlass_kv_lookup(blocks, keys, BLOCKS, found) == WINDLASS_OK && !found[0] && !found[BLOCKS - 1]);
    CHECK(windlass_kv_lookup_reverse(blocks, keys, BLOCKS, &last) == WINDLASS_NOT_FOUND);
    windlass_kv_ticket *ticket = begin(false, 0, 2, NULL);
    CHECK(windlass_kv_ticket_id(ticket) > 0);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_OK);
    CHECK(strcmp(windlass_last_error(), "") == 0);
    windlass_kv_ticket_free(ticket);
    ticket = begin(false, 3, 1, NULL);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_OK);
    windlass_kv_ticket_free(ticket);
    CHECK(windlass_kv_flush(store, UINT64_MAX) == WINDLASS_OK);

    CHECK(windlass_kv_lookup(blocks, keys, BLOCKS, found) == WINDLASS_OK);
    CHECK(found[0] && found[1] && !found[2] && found[3] && !found[4]);
    CHECK(windlass_kv_lookup_prefix(blocks, keys, BLOCKS, &length) == WINDLASS_OK && length == 2);
    CHECK(windlass_kv_lookup_reverse(blocks, keys, BLOCKS, &last) == WINDLASS_OK && last == 3);
    CHECK(windlass_kv_lookup_prefix(blocks, NULL, 0, &length) == WINDLASS_OK && length == 0);
    load_and_compare(0, 2);
    load_and_compare(3, 1);

    /* What is there already is not stored again, and is no failure. */
    ticket = begin(false, 0, 1, NULL);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_OK);
    CHECK(outcome_of(ticket, 0, 1) == WINDLASS_KV_EXISTS);
    windlass_kv_ticket_free(ticket);

    /* A miss among others fails alone. */
    ticket = begin(true, 1, 3, NULL);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_NOT_FOUND);
    CHECK(strstr(windlass_last_error(), "item 1 of 3: miss"));
    CHECK(windlass_kv_ticket_poll(ticket) == WINDLASS_NOT_FOUND);
    CHECK(outcome_of(ticket, 0, 3) == WINDLASS_KV_OK && outcome_of(ticket, 1, 3) == WINDLASS_KV_MISS);
    CHECK(outcome_of(ticket, 2, 3) == WINDLASS_KV_OK);
    windlass_kv_ticket_free(ticket);
}

static void check_shards(void) {
    windlass_kv_request request = {.size = sizeof request, .shards = 2, .shard_bytes = BLOCK};
    windlass_kv_piece piece = {.address = source[4], .length = BLOCK};
    windlass_kv_item item = {.size = sizeof item, .key = keys[4], .pieces = &piece, .piece_count = 1};
    windlass_kv_ticket *ticket = NULL;
    bool found = true;
    for (item.shard = 0; item.shard < 2; item.shard++) {
        CHECK(windlass_kv_store(blocks, &item, 1, WINDLASS_DEMAND, &request, &ticket) == WINDLASS_OK);
        CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_OK);
        windlass_kv_ticket_free(ticket);
        CHECK(windlass_kv_lookup(blocks, &keys[4], 1, &found) == WINDLASS_OK && found == (item.shard == 1));
    }
    item.shard = 1;
    piece.address = target[4];
    CHECK(windlass_kv_load(blocks, &item, 1, WINDLASS_DEMAND, NULL, &ticket) == WINDLASS_OK);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_OK);
    CHECK(memcmp(source[4], target[4], BLOCK) == 0);
    windlass_kv_ticket_free(ticket);
    /* Memory of another length gets nothing, and the block stays. */
    piece.length = BLOCK - 1;
    CHECK(windlass_kv_load(blocks, &item, 1, WINDLASS_DEMAND, NULL, &ticket) == WINDLASS_OK);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_INVALID_ARGUMENT);
    CHECK(outcome_of(ticket, 0, 1) == WINDLASS_KV_MISMATCH);
    windlass_kv_ticket_free(ticket);
    CHECK(windlass_kv_lookup(blocks, &keys[4], 1, &found) == WINDLASS_OK && found);
    uint64_t removed = 0;
    CHECK(windlass_kv_delete(blocks, &keys[4], 2, &removed) == WINDLASS_OK && removed == 1);
    CHECK(windlass_kv_lookup(blocks, &keys[4], 1, &found) == WINDLASS_OK && !found);
}

static void check_completions(void) {
    windlass_kv_request request = {.size = sizeof request, .flags = WINDLASS_KV_NOTIFY};
    windlass_kv_ticket *tickets[3];
    for (int index = 0; index < 3; index++) {
        tickets[index] = begin(true, 0, 1, &request);
    }
    uint64_t ended[4], count = 0, told = 0;
    while (told < 3) {
        struct pollfd watched = {.fd = windlass_kv_event_fd(store), .events = POLLIN};
        CHECK(poll(&watched, 1, 60000) == 1);
        do {
            CHECK(windlass_kv_drain(store, ended, 1, &count) == WINDLASS_OK);
            for (uint64_t index = 0; index < count; index++, told++) {
                int place = 0;
                while (place < 3 && windlass_kv_ticket_id(tickets[place]) != ended[index]) {
                    place++;
                }
                CHECK(place < 3 && windlass_kv_ticket_poll(tickets[place]) == WINDLASS_OK);
            }
        } while (count > 0);
    }
    CHECK(windlass_kv_drain(store, ended, 4, &count) == WINDLASS_OK && count == 0);
    /* A caller without room takes nothing, and the descriptor tells of it still. */
    windlass_kv_ticket *late = begin(true, 0, 1, &request);
    struct pollfd watched = {.fd = windlass_kv_event_fd(store), .events = POLLIN};
    CHECK(poll(&watched, 1, 60000) == 1);
    CHECK(windlass_kv_drain(store, NULL, 0, &count) == WINDLASS_OK && count == 0);
    CHECK(poll(&watched, 1, 0) == 1);
    CHECK(windlass_kv_drain(store, ended, 4, &count) == WINDLASS_OK && count == 1);
    CHECK(ended[0] == windlass_kv_ticket_id(late));
    windlass_kv_ticket_free(late);
    for (int index = 0; index < 3; index++) {
        windlass_kv_ticket_free(tickets[index]);
    }
}

static void check_words(void) {
    char *words = NULL;
    CHECK(windlass_kv_stats(store, &words) == WINDLASS_OK && strstr(words, "\"blocks\":3"));
    windlass_string_free(words);
    CHECK(windlass_kv_report(store, &words) == WINDLASS_OK && strstr(words, "\"carriers\""));
    windlass_string_free(words);
    CHECK(windlass_kv_metrics(store, &words) == WINDLASS_OK && strstr(words, "# EOF"));
    windlass_string_free(words);
    CHECK(windlass_kv_events(store, &words) == WINDLASS_OK && words[0] == '[');
    windlass_string_free(words);
}

static void *load_often(void *first) {
    for (int round = 0; round < 20; round++) {
        load_and_compare(*(int *)first, 1);
    }
    return NULL;
}

static void check_threads(void) {
    int first[2] = {0, 1};
    pthread_t threads[2];
    for (int index = 0; index < 2; index++) {
        CHECK(pthread_create(&threads[index], NULL, load_often, &first[index]) == 0);
    }
    for (int index = 0; index < 2; index++) {
        CHECK(pthread_join(threads[index], NULL) == 0);
    }
}

static void check_wrong_arguments(void) {
    windlass_kv_piece pieces[2];
    windlass_kv_item good = item_of(0, target, pieces), bad;
    windlass_kv_request request = {.size = sizeof request}, asked;
    windlass_kv_ticket *ticket = (windlass_kv_ticket *)1;
#define REFUSED(change)                                                                                       \
    bad = good;                                                                                               \
    asked = request;                                                                                          \
    change;                                                                                                   \
    CHECK(windlass_kv_load(blocks, &bad, 1, WINDLASS_DEMAND, &asked, &ticket) == WINDLASS_INVALID_ARGUMENT);  \
    CHECK(ticket == NULL && strlen(windlass_last_error()) > 10)
    REFUSED(bad.size = 8);
    REFUSED(bad.reserved = 1);
    REFUSED(bad.pieces = NULL);
    REFUSED(bad.key.length = 0);
    REFUSED(bad.key.length = 1025);
    REFUSED(bad.key.bytes = NULL);
    REFUSED(asked.flags = 1ull << 40);
    REFUSED(asked.reserved = 1);
    REFUSED(asked.size = 0);
    pieces[0].target = 99;
    REFUSED((void)0);
    pieces[0] = (windlass_kv_piece){.length = 777};
    REFUSED((void)0);
    pieces[0] = (windlass_kv_piece){.address = target[0], .length = 777, .target = WINDLASS_TARGET_CUDA, .device = -1};
    REFUSED((void)0);
    good = item_of(0, target, pieces);
    CHECK(windlass_kv_load(blocks, &good, 1, 99, NULL, &ticket) == WINDLASS_INVALID_ARGUMENT);
    CHECK(windlass_kv_load(blocks, &good, 0, WINDLASS_DEMAND, NULL, &ticket) == WINDLASS_INVALID_ARGUMENT);
    CHECK(windlass_kv_load(blocks, NULL, 1, WINDLASS_DEMAND, NULL, &ticket) == WINDLASS_INVALID_ARGUMENT);
    CHECK(windlass_kv_load(NULL, &good, 1, WINDLASS_DEMAND, NULL, &ticket) == WINDLASS_INVALID_ARGUMENT);
    CHECK(windlass_kv_load(blocks, &good, 1, WINDLASS_DEMAND, NULL, NULL) == WINDLASS_INVALID_ARGUMENT);
    CHECK(windlass_kv_lookup(blocks, keys, 1, NULL) == WINDLASS_INVALID_ARGUMENT);
    CHECK(windlass_kv_lookup(blocks, NULL, 1, (bool[1]){0}) == WINDLASS_INVALID_ARGUMENT);
    CHECK(windlass_kv_drain(store, NULL, 1, (uint64_t[1]){0}) == WINDLASS_INVALID_ARGUMENT);
    CHECK(windlass_kv_event_fd(NULL) == -1 && windlass_kv_ticket_id(NULL) == 0);
    CHECK(!windlass_kv_ticket_is_released(NULL) && !windlass_kv_region_is_direct(NULL));
    CHECK(windlass_kv_ticket_poll(NULL) == WINDLASS_INVALID_ARGUMENT);
    CHECK(windlass_kv_ticket_wait(NULL, 0) == WINDLASS_INVALID_ARGUMENT);
    CHECK(windlass_kv_close(NULL, 0) == WINDLASS_INVALID_ARGUMENT);

    windlass_kv *none = (windlass_kv *)1;
    windlass_kv_options options = {.size = sizeof options, .root = "/tmp", .capacity_bytes = 1 << 20};
    CHECK(windlass_kv_open(NULL, &none) == WINDLASS_INVALID_ARGUMENT && none == NULL);
    options.flags = 1ull << 40;
    CHECK(windlass_kv_open(&options, &none) == WINDLASS_INVALID_ARGUMENT);
    options.flags = WINDLASS_KV_NO_VERIFY;
    options.durability = "perhaps";
    CHECK(windlass_kv_open(&options, &none) == WINDLASS_INVALID_ARGUMENT);
    CHECK(strstr(windlass_last_error(), "batched"));
    options.durability = NULL;
    options.root = NULL;
    CHECK(windlass_kv_open(&options, &none) == WINDLASS_INVALID_ARGUMENT);
    options.root = "/does/not/exist";
    options.access = "read";
    CHECK(windlass_kv_open(&options, &none) == WINDLASS_INVALID_FILE && none == NULL);
    windlass_kv_namespace *no_blocks = NULL;
    windlass_kv_description description = {.size = sizeof description, .other_count = 1};
    CHECK(windlass_kv_namespace_open(store, &description, &no_blocks) == WINDLASS_INVALID_ARGUMENT && !no_blocks);
    windlass_kv_free(NULL);
    windlass_kv_namespace_free(NULL);
    windlass_kv_ticket_free(NULL);
    windlass_kv_region_free(NULL);
}

/* Programs of a later version have longer items: taken as long as they ask for nothing that is not there. */
static void check_later_versions(void) {
    struct later {
        windlass_kv_item now;
        uint64_t more;
    } items[2];
    windlass_kv_piece pieces[2][2];
    windlass_kv_ticket *ticket = NULL;
    for (int index = 0; index < 2; index++) {
        items[index].now = item_of(index, target, pieces[index]);
        items[index].now.size = sizeof items[index];
        items[index].more = 0;
    }
    CHECK(windlass_kv_load(blocks, &items[0].now, 2, WINDLASS_PREFETCH, NULL, &ticket) == WINDLASS_OK);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_OK);
    windlass_kv_ticket_free(ticket);
    items[1].more = 1;
    CHECK(windlass_kv_load(blocks, &items[0].now, 2, WINDLASS_PREFETCH, NULL, &ticket) == WINDLASS_INVALID_ARGUMENT);
    CHECK(strstr(windlass_last_error(), "does not know"));
}

/* A child of fork has no store. What it frees changes nothing in its parent. */
static void check_fork(void) {
    windlass_kv_ticket *ticket = begin(true, 0, 1, NULL);
    pid_t child = fork();
    if (child == 0) {
        bool found;
        uint64_t count;
        CHECK(windlass_kv_lookup(blocks, keys, 1, &found) == WINDLASS_CLOSED);
        CHECK(windlass_kv_drain(store, &count, 1, &count) == WINDLASS_CLOSED);
        CHECK(windlass_kv_ticket_wait(ticket, 0) == WINDLASS_CLOSED);
        windlass_status status = windlass_kv_ticket_wait_released(ticket, UINT64_MAX);
        CHECK(status == WINDLASS_CLOSED || (status == WINDLASS_OK && windlass_kv_ticket_is_released(ticket)));
        windlass_kv_ticket_free(ticket);
        windlass_kv_namespace_free(blocks);
        windlass_kv_free(store);
        _exit(0);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_OK);
    windlass_kv_ticket_free(ticket);
    load_and_compare(0, 2);
}

/* Memory of a device, and a request that takes too long, as a copy on the device that it waits for is held up. */
static uint64_t gate;

static void wait_at_gate(void *context) {
    (void)context;
    while (!__atomic_load_n(&gate, __ATOMIC_SEQ_CST)) {
        usleep(1000);
    }
}

static void check_device(void) {
    void *driver = dlopen(getenv("WINDLASS_CUDA_DRIVER"), RTLD_NOW);
    CHECK(driver);
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*set_current)(void *) = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
    int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(driver, "cuMemAlloc_v2");
    int (*to_host)(void *, uint64_t, size_t) = (int (*)(void *, uint64_t, size_t))dlsym(driver, "cuMemcpyDtoH_v2");
    int (*stream_create)(void **, unsigned) = (int (*)(void **, unsigned))dlsym(driver, "cuStreamCreate");
    int (*event_create)(uint64_t *, unsigned) = (int (*)(uint64_t *, unsigned))dlsym(driver, "cuEventCreate");
    int (*record)(uint64_t, void *) = (int (*)(uint64_t, void *))dlsym(driver, "cuEventRecord");
    int (*launch)(void *, void (*)(void *), void *) =
        (int (*)(void *, void (*)(void *), void *))dlsym(driver, "cuLaunchHostFunc");
    CHECK(init && retain && set_current && allocate && to_host && stream_create && event_create && record && launch);
    void *context = NULL, *stream = NULL;
    uint64_t address = 0, event = 0;
    CHECK(init(0) == 0 && retain(&context, 0) == 0 && set_current(context) == 0);
    CHECK(allocate(&address, BLOCK) == 0 && stream_create(&stream, 1) == 0 && event_create(&event, 2) == 0);

    windlass_kv_piece piece = {.address = (void *)(uintptr_t)address, .length = BLOCK, .target = WINDLASS_TARGET_CUDA};
    windlass_kv_region *region = NULL;
    CHECK(windlass_kv_register(store, &piece, &region) == WINDLASS_OK && region);
    CHECK(!windlass_kv_region_is_direct(region)); /* The stand-in goes by way of the host. */
    windlass_kv_item item = {.size = sizeof item, .key = keys[1], .pieces = &piece, .piece_count = 1};
    windlass_kv_ticket *ticket = NULL;
    CHECK(windlass_kv_load(blocks, &item, 1, WINDLASS_DEMAND, NULL, &ticket) == WINDLASS_OK);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_OK);
    windlass_kv_ticket_free(ticket);
    CHECK(to_host(target[1], address, BLOCK) == 0 && memcmp(source[1], target[1], BLOCK) == 0);

    /* Its event does not come: the request ends in time, and the memory is the caller's some time after that. */
    CHECK(launch(stream, wait_at_gate, NULL) == 0 && record(event, stream) == 0);
    windlass_kv_request request = {.size = sizeof request, .timeout_ms = 50, .wait_event = event};
    CHECK(windlass_kv_load(blocks, &item, 1, WINDLASS_DEMAND, &request, &ticket) == WINDLASS_OK);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_TIMED_OUT);
    CHECK(outcome_of(ticket, 0, 1) == WINDLASS_KV_TIMED_OUT);
    /* One that has no such time is cancelled. */
    windlass_kv_ticket *other = NULL;
    windlass_kv_outcome outcome;
    request.timeout_ms = 0;
    CHECK(windlass_kv_load(blocks, &item, 1, WINDLASS_DEMAND, &request, &other) == WINDLASS_OK);
    CHECK(windlass_kv_ticket_wait(other, 1) == WINDLASS_PENDING);
    CHECK(windlass_kv_ticket_poll(other) == WINDLASS_PENDING && !windlass_kv_ticket_is_released(other));
    CHECK(windlass_kv_ticket_wait_released(other, 1) == WINDLASS_PENDING);
    CHECK(windlass_kv_ticket_outcomes(other, &outcome, 1) == WINDLASS_PENDING);
    CHECK(windlass_kv_ticket_cancel(other) == WINDLASS_OK);
    CHECK(windlass_kv_ticket_wait(other, UINT64_MAX) == WINDLASS_CANCELLED);
    __atomic_store_n(&gate, 1, __ATOMIC_SEQ_CST);
    CHECK(windlass_kv_ticket_wait_released(ticket, UINT64_MAX) == WINDLASS_OK);
    windlass_kv_ticket_free(ticket);
    windlass_kv_ticket_free(other);
    windlass_kv_region_free(region);
}

/* Joins two parts of a path. */
static char *path_of(const char *root, const char *name) {
    char *path = malloc(strlen(root) + strlen(name) + 2);
    CHECK(path);
    sprintf(path, "%s/%s", root, name);
    return path;
}

/* A far tier has what a near one lacks. Its directory is not made, and its absence fails nothing. */
static void check_far(const char *root) {
    windlass_kv *store_before = store;
    windlass_kv_namespace *blocks_before = blocks;
    char *near = path_of(root, "near"), *other = path_of(root, "other"), *far_root = path_of(root, "far");
    windlass_kv_far_options far = {.size = sizeof far, .root = far_root, .layout = "files", .policy = "write_back"};
    far.capacity_bytes = 64 << 20;
    far.min_free_bytes = 1;
    far.timeout_ms = 60000;
    far.lookup_timeout_ms = 60000;
    far.backlog_bytes = 8 << 20;
    far.staging_bytes = 8 << 20;
    windlass_kv_options options = {.size = sizeof options, .root = near, .capacity_bytes = 64 << 20};
    options.min_free_bytes = 1;
    options.far_tier = &far;

    CHECK(windlass_kv_open(&options, &store) == WINDLASS_OK);
    blocks = open_namespace(store);
    windlass_kv_ticket *ticket = begin(false, 0, 1, NULL);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_OK);
    windlass_kv_ticket_free(ticket);
    load_and_compare(0, 1);
    char *words = NULL;
    CHECK(windlass_kv_report(store, &words) == WINDLASS_OK && strstr(words, "mount its file system"));
    windlass_string_free(words);
    CHECK(windlass_kv_metrics(store, &words) == WINDLASS_OK && strstr(words, "windlass_kv_far_up 0\n"));
    windlass_string_free(words);
    uint64_t removed = 0;
    CHECK(windlass_kv_delete(blocks, keys, 1, &removed) == WINDLASS_IO);
    CHECK(strstr(windlass_last_error(), "far tier"));
    ticket = begin(false, 0, 1, NULL);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_OK);
    windlass_kv_ticket_free(ticket);
    CHECK(windlass_kv_close(store, 0) == WINDLASS_IO && strstr(windlass_last_error(), "1 blocks were not written"));
    windlass_kv_namespace_free(blocks);
    windlass_kv_free(store);

    CHECK(mkdir(far_root, 0700) == 0);
    CHECK(windlass_kv_open(&options, &store) == WINDLASS_OK);
    blocks = open_namespace(store);
    ticket = begin(false, 0, 2, NULL);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_OK);
    windlass_kv_ticket_free(ticket);
    CHECK(windlass_kv_close(store, 60000) == WINDLASS_OK); /* The backlog is written. */
    windlass_kv_namespace_free(blocks);
    windlass_kv_free(store);

    options.root = other;
    far.flags = WINDLASS_KV_NO_PROMOTE;
    CHECK(windlass_kv_open(&options, &store) == WINDLASS_OK);
    blocks = open_namespace(store);
    load_and_compare(0, 2);
    ticket = begin(true, 1, 1, NULL);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_OK);
    CHECK(windlass_kv_ticket_report(ticket, &words) == WINDLASS_OK && strstr(words, "\"far_bytes\":200000"));
    windlass_string_free(words);
    windlass_kv_ticket_free(ticket);
    windlass_kv_namespace_free(blocks);
    windlass_kv_free(store);

    windlass_kv *none = (windlass_kv *)1;
    far.policy = "perhaps";
    CHECK(windlass_kv_open(&options, &none) == WINDLASS_INVALID_ARGUMENT && none == NULL);
    CHECK(strstr(windlass_last_error(), "write_through"));
    far.policy = NULL;
    far.flags = 1ull << 40;
    CHECK(windlass_kv_open(&options, &none) == WINDLASS_INVALID_ARGUMENT);
    far.flags = 0;
    far.root = NULL;
    CHECK(windlass_kv_open(&options, &none) == WINDLASS_INVALID_ARGUMENT);
    far.root = far_root;
    far.size = 8;
    CHECK(windlass_kv_open(&options, &none) == WINDLASS_INVALID_ARGUMENT);
    /* Programs of the first version have no far tier. */
    options.size = offsetof(windlass_kv_options, far_tier);
    CHECK(windlass_kv_open(&options, &none) == WINDLASS_OK);
    windlass_kv_free(none);
    free(near);
    free(other);
    free(far_root);
    store = store_before;
    blocks = blocks_before;
}

static int flip_in(const char *path, const struct stat *found, int kind, struct FTW *walk) {
    (void)walk;
    if (kind != FTW_F || found->st_size < BLOCK) {
        return 0;
    }
    char *bytes = malloc((size_t)found->st_size);
    int file = open(path, O_RDWR);
    CHECK(bytes && file >= 0 && pread(file, bytes, (size_t)found->st_size, 0) == found->st_size);
    char *block = memmem(bytes, (size_t)found->st_size, source[0], BLOCK);
    if (block) {
        block[BLOCK / 2] ^= 1;
        CHECK(pwrite(file, block + BLOCK / 2, 1, block + BLOCK / 2 - bytes) == 1);
    }
    close(file);
    free(bytes);
    return block != NULL;
}

static void check_corrupt(const char *root) {
    CHECK(nftw(root, flip_in, 8, FTW_PHYS) == 1);
    windlass_kv_ticket *ticket = begin(true, 0, 2, NULL);
    CHECK(windlass_kv_ticket_wait(ticket, UINT64_MAX) == WINDLASS_CORRUPT);
    CHECK(outcome_of(ticket, 0, 2) == WINDLASS_KV_CORRUPT && outcome_of(ticket, 1, 2) == WINDLASS_KV_OK);
    windlass_kv_ticket_free(ticket);
    bool found = true;
    CHECK(windlass_kv_lookup(blocks, keys, 1, &found) == WINDLASS_OK && !found);
    char *events = NULL;
    CHECK(windlass_kv_events(store, &events) == WINDLASS_OK && strstr(events, "corrupt_block"));
    windlass_string_free(events);
}

static void check_close(const char *root) {
    windlass_kv_namespace_free(blocks);
    CHECK(windlass_kv_close(store, UINT64_MAX) == WINDLASS_OK);
    CHECK(windlass_kv_close(store, UINT64_MAX) == WINDLASS_OK);
    CHECK(windlass_kv_flush(store, 0) == WINDLASS_CLOSED);
    windlass_kv_free(store);
    /* What was stored is found by the next, and a namespace keeps its store open. */
    store = open_store(root);
    blocks = open_namespace(store);
    windlass_kv_free(store);
    load_and_compare(1, 1);
    windlass_kv_namespace_free(blocks);
    windlass_kv_options options = {.size = sizeof options, .root = root, .access = "read"};
    CHECK(windlass_kv_open(&options, &store) == WINDLASS_OK);
    blocks = open_namespace(store);
    load_and_compare(1, 1);
    windlass_kv_piece pieces[2];
    windlass_kv_item item = item_of(2, source, pieces);
    windlass_kv_ticket *ticket = NULL;
    CHECK(windlass_kv_store(blocks, &item, 1, WINDLASS_DEMAND, NULL, &ticket) == WINDLASS_READ_ONLY && !ticket);
    windlass_kv_namespace_free(blocks);
    windlass_kv_free(store);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    for (int index = 0; index < BLOCKS; index++) {
        snprintf(names[index], sizeof names[index], "block %d", index);
        keys[index] = (windlass_kv_key){.bytes = names[index], .length = strlen(names[index])};
        source[index] = malloc(BLOCK);
        target[index] = malloc(BLOCK);
        CHECK(source[index] && target[index]);
        for (int place = 0; place < BLOCK; place++) {
            source[index][place] = (unsigned char)((place * 2654435761u + (unsigned)index * 97) >> 13);
        }
    }
    store = open_store(arguments[1]);
    blocks = open_namespace(store);
    check_blocks();
    check_shards();
    check_completions();
    check_words();
    check_threads();
    check_wrong_arguments();
    check_later_versions();
    check_fork();
    if (getenv("WINDLASS_CUDA_DRIVER")) {
        check_device();
    }
    char *of_far = path_of(arguments[1], "../tiers");
    CHECK(mkdir(of_far, 0700) == 0);
    check_far(of_far);
    free(of_far);
    check_corrupt(arguments[1]);
    check_close(arguments[1]);
    for (int index = 0; index < BLOCKS; index++) {
        free(source[index]);
        free(target[index]);
    }
    puts("ok");
    return 0;
}
