/* What the C ABI promises of the KV store, checked from C. Usage: kv DIRECTORY: an empty one.
 * With HOISTWAY_CUDA_DRIVER, blocks move to and from memory of that driver's device, too. */
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

static hoistway_kv *store;
static hoistway_kv_namespace *blocks;
static unsigned char *source[BLOCKS], *target[BLOCKS];
static char names[BLOCKS][16];
static hoistway_kv_key keys[BLOCKS];

static hoistway_kv *open_store(const char *root) {
    hoistway_kv_options options = {.size = sizeof options, .root = root};
    options.capacity_bytes = 64 << 20;
    options.min_free_bytes = 1;
    options.durability = "none";
    hoistway_kv *opened = NULL;
    CHECK(hoistway_kv_open(&options, &opened) == HOISTWAY_OK && opened);
    return opened;
}

static hoistway_kv_namespace *open_namespace(hoistway_kv *of) {
    const char *other[] = {"lora", "none"};
    hoistway_kv_description description = {.size = sizeof description, .model = "m@1", .dtype = "bfloat16"};
    description.other = other;
    description.other_count = 1;
    description.tensor_rank = 1;
    description.tensor_ranks = 2;
    hoistway_kv_namespace *opened = NULL;
    CHECK(hoistway_kv_namespace_open(of, &description, &opened) == HOISTWAY_OK && opened);
    return opened;
}

/* Two pieces of odd lengths, as paged layouts have them. */
static hoistway_kv_item item_of(int block, unsigned char *const *memory, hoistway_kv_piece *pieces) {
    pieces[0] = (hoistway_kv_piece){.address = memory[block], .length = 777};
    pieces[1] = (hoistway_kv_piece){.address = memory[block] + 777, .length = BLOCK - 777};
    hoistway_kv_item item = {.size = sizeof item, .key = keys[block], .pieces = pieces, .piece_count = 2};
    return item;
}

static hoistway_kv_ticket *begin(bool is_load, int first, int count, const hoistway_kv_request *request) {
    hoistway_kv_item items[BLOCKS];
    hoistway_kv_piece pieces[BLOCKS][2];
    for (int index = 0; index < count; index++) {
        items[index] = item_of(first + index, is_load ? target : source, pieces[index]);
    }
    hoistway_kv_ticket *ticket = NULL;
    CHECK((is_load ? hoistway_kv_load(blocks, items, count, HOISTWAY_DEMAND, request, &ticket)
                   : hoistway_kv_store(blocks, items, count, HOISTWAY_BACKGROUND, request, &ticket)) == HOISTWAY_OK);
    return ticket;
}

static hoistway_kv_status outcome_of(const hoistway_kv_ticket *ticket, int index, int count) {
    hoistway_kv_outcome outcomes[BLOCKS];
    CHECK(hoistway_kv_ticket_outcomes(ticket, outcomes, count) == HOISTWAY_OK);
    CHECK(outcomes[index].error == 0);
    return outcomes[index].status;
}

static void load_and_compare(int first, int count) {
    for (int index = first; index < first + count; index++) {
        memset(target[index], 0, BLOCK);
    }
    hoistway_kv_ticket *ticket = begin(true, first, count, NULL);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_OK);
    CHECK(hoistway_kv_ticket_poll(ticket) == HOISTWAY_OK);
    CHECK(hoistway_kv_ticket_wait_released(ticket, 60000) == HOISTWAY_OK);
    CHECK(hoistway_kv_ticket_is_released(ticket));
    for (int index = first; index < first + count; index++) {
        CHECK(memcmp(source[index], target[index], BLOCK) == 0);
        CHECK(outcome_of(ticket, index - first, count) == HOISTWAY_KV_OK);
    }
    char *report = NULL;
    CHECK(hoistway_kv_ticket_report(ticket, &report) == HOISTWAY_OK);
    CHECK(strstr(report, "\"items\":[\"ok\"") && strstr(report, "\"carried\":{\""));
    hoistway_string_free(report);
    hoistway_kv_ticket_free(ticket);
}

static void check_blocks(void) {
    bool found[BLOCKS];
    uint64_t length = 9, last = 9;
    CHECK(hoistway_kv_lookup(blocks, keys, BLOCKS, found) == HOISTWAY_OK && !found[0] && !found[BLOCKS - 1]);
    CHECK(hoistway_kv_lookup_reverse(blocks, keys, BLOCKS, &last) == HOISTWAY_NOT_FOUND);
    hoistway_kv_ticket *ticket = begin(false, 0, 2, NULL);
    CHECK(hoistway_kv_ticket_id(ticket) > 0);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_OK);
    CHECK(strcmp(hoistway_last_error(), "") == 0);
    hoistway_kv_ticket_free(ticket);
    ticket = begin(false, 3, 1, NULL);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_OK);
    hoistway_kv_ticket_free(ticket);
    CHECK(hoistway_kv_flush(store, UINT64_MAX) == HOISTWAY_OK);

    CHECK(hoistway_kv_lookup(blocks, keys, BLOCKS, found) == HOISTWAY_OK);
    CHECK(found[0] && found[1] && !found[2] && found[3] && !found[4]);
    CHECK(hoistway_kv_lookup_prefix(blocks, keys, BLOCKS, &length) == HOISTWAY_OK && length == 2);
    CHECK(hoistway_kv_lookup_reverse(blocks, keys, BLOCKS, &last) == HOISTWAY_OK && last == 3);
    CHECK(hoistway_kv_lookup_prefix(blocks, NULL, 0, &length) == HOISTWAY_OK && length == 0);
    load_and_compare(0, 2);
    load_and_compare(3, 1);

    /* What is there already is not stored again, and is no failure. */
    ticket = begin(false, 0, 1, NULL);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_OK);
    CHECK(outcome_of(ticket, 0, 1) == HOISTWAY_KV_EXISTS);
    hoistway_kv_ticket_free(ticket);

    /* A miss among others fails alone. */
    ticket = begin(true, 1, 3, NULL);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_NOT_FOUND);
    CHECK(strstr(hoistway_last_error(), "item 1 of 3: miss"));
    CHECK(hoistway_kv_ticket_poll(ticket) == HOISTWAY_NOT_FOUND);
    CHECK(outcome_of(ticket, 0, 3) == HOISTWAY_KV_OK && outcome_of(ticket, 1, 3) == HOISTWAY_KV_MISS);
    CHECK(outcome_of(ticket, 2, 3) == HOISTWAY_KV_OK);
    hoistway_kv_ticket_free(ticket);
}

static void check_shards(void) {
    hoistway_kv_request request = {.size = sizeof request, .shards = 2, .shard_bytes = BLOCK};
    hoistway_kv_piece piece = {.address = source[4], .length = BLOCK};
    hoistway_kv_item item = {.size = sizeof item, .key = keys[4], .pieces = &piece, .piece_count = 1};
    hoistway_kv_ticket *ticket = NULL;
    bool found = true;
    for (item.shard = 0; item.shard < 2; item.shard++) {
        CHECK(hoistway_kv_store(blocks, &item, 1, HOISTWAY_DEMAND, &request, &ticket) == HOISTWAY_OK);
        CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_OK);
        hoistway_kv_ticket_free(ticket);
        CHECK(hoistway_kv_lookup(blocks, &keys[4], 1, &found) == HOISTWAY_OK && found == (item.shard == 1));
    }
    item.shard = 1;
    piece.address = target[4];
    CHECK(hoistway_kv_load(blocks, &item, 1, HOISTWAY_DEMAND, NULL, &ticket) == HOISTWAY_OK);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_OK);
    CHECK(memcmp(source[4], target[4], BLOCK) == 0);
    hoistway_kv_ticket_free(ticket);
    /* Memory of another length gets nothing, and the block stays. */
    piece.length = BLOCK - 1;
    CHECK(hoistway_kv_load(blocks, &item, 1, HOISTWAY_DEMAND, NULL, &ticket) == HOISTWAY_OK);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(outcome_of(ticket, 0, 1) == HOISTWAY_KV_MISMATCH);
    hoistway_kv_ticket_free(ticket);
    CHECK(hoistway_kv_lookup(blocks, &keys[4], 1, &found) == HOISTWAY_OK && found);
    uint64_t removed = 0;
    CHECK(hoistway_kv_delete(blocks, &keys[4], 2, &removed) == HOISTWAY_OK && removed == 1);
    CHECK(hoistway_kv_lookup(blocks, &keys[4], 1, &found) == HOISTWAY_OK && !found);
}

static void check_completions(void) {
    hoistway_kv_request request = {.size = sizeof request, .flags = HOISTWAY_KV_NOTIFY};
    hoistway_kv_ticket *tickets[3];
    for (int index = 0; index < 3; index++) {
        tickets[index] = begin(true, 0, 1, &request);
    }
    uint64_t ended[4], count = 0, told = 0;
    while (told < 3) {
        struct pollfd watched = {.fd = hoistway_kv_event_fd(store), .events = POLLIN};
        CHECK(poll(&watched, 1, 60000) == 1);
        do {
            CHECK(hoistway_kv_drain(store, ended, 1, &count) == HOISTWAY_OK);
            for (uint64_t index = 0; index < count; index++, told++) {
                int place = 0;
                while (place < 3 && hoistway_kv_ticket_id(tickets[place]) != ended[index]) {
                    place++;
                }
                CHECK(place < 3 && hoistway_kv_ticket_poll(tickets[place]) == HOISTWAY_OK);
            }
        } while (count > 0);
    }
    CHECK(hoistway_kv_drain(store, ended, 4, &count) == HOISTWAY_OK && count == 0);
    /* A caller without room takes nothing, and the descriptor tells of it still. */
    hoistway_kv_ticket *late = begin(true, 0, 1, &request);
    struct pollfd watched = {.fd = hoistway_kv_event_fd(store), .events = POLLIN};
    CHECK(poll(&watched, 1, 60000) == 1);
    CHECK(hoistway_kv_drain(store, NULL, 0, &count) == HOISTWAY_OK && count == 0);
    CHECK(poll(&watched, 1, 0) == 1);
    CHECK(hoistway_kv_drain(store, ended, 4, &count) == HOISTWAY_OK && count == 1);
    CHECK(ended[0] == hoistway_kv_ticket_id(late));
    hoistway_kv_ticket_free(late);
    for (int index = 0; index < 3; index++) {
        hoistway_kv_ticket_free(tickets[index]);
    }
}

static void check_words(void) {
    char *words = NULL;
    CHECK(hoistway_kv_stats(store, &words) == HOISTWAY_OK && strstr(words, "\"blocks\":3"));
    hoistway_string_free(words);
    CHECK(hoistway_kv_report(store, &words) == HOISTWAY_OK && strstr(words, "\"carriers\""));
    hoistway_string_free(words);
    CHECK(hoistway_kv_metrics(store, &words) == HOISTWAY_OK && strstr(words, "# EOF"));
    hoistway_string_free(words);
    CHECK(hoistway_kv_events(store, &words) == HOISTWAY_OK && words[0] == '[');
    hoistway_string_free(words);
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
    hoistway_kv_piece pieces[2];
    hoistway_kv_item good = item_of(0, target, pieces), bad;
    hoistway_kv_request request = {.size = sizeof request}, asked;
    hoistway_kv_ticket *ticket = (hoistway_kv_ticket *)1;
#define REFUSED(change)                                                                                       \
    bad = good;                                                                                               \
    asked = request;                                                                                          \
    change;                                                                                                   \
    CHECK(hoistway_kv_load(blocks, &bad, 1, HOISTWAY_DEMAND, &asked, &ticket) == HOISTWAY_INVALID_ARGUMENT);  \
    CHECK(ticket == NULL && strlen(hoistway_last_error()) > 10)
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
    pieces[0] = (hoistway_kv_piece){.length = 777};
    REFUSED((void)0);
    pieces[0] = (hoistway_kv_piece){.address = target[0], .length = 777, .target = HOISTWAY_TARGET_CUDA, .device = -1};
    REFUSED((void)0);
    good = item_of(0, target, pieces);
    CHECK(hoistway_kv_load(blocks, &good, 1, 99, NULL, &ticket) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_kv_load(blocks, &good, 0, HOISTWAY_DEMAND, NULL, &ticket) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_kv_load(blocks, NULL, 1, HOISTWAY_DEMAND, NULL, &ticket) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_kv_load(NULL, &good, 1, HOISTWAY_DEMAND, NULL, &ticket) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_kv_load(blocks, &good, 1, HOISTWAY_DEMAND, NULL, NULL) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_kv_lookup(blocks, keys, 1, NULL) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_kv_lookup(blocks, NULL, 1, (bool[1]){0}) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_kv_drain(store, NULL, 1, (uint64_t[1]){0}) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_kv_event_fd(NULL) == -1 && hoistway_kv_ticket_id(NULL) == 0);
    CHECK(!hoistway_kv_ticket_is_released(NULL) && !hoistway_kv_region_is_direct(NULL));
    CHECK(hoistway_kv_ticket_poll(NULL) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_kv_ticket_wait(NULL, 0) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_kv_close(NULL, 0) == HOISTWAY_INVALID_ARGUMENT);

    hoistway_kv *none = (hoistway_kv *)1;
    hoistway_kv_options options = {.size = sizeof options, .root = "/tmp", .capacity_bytes = 1 << 20};
    CHECK(hoistway_kv_open(NULL, &none) == HOISTWAY_INVALID_ARGUMENT && none == NULL);
    options.flags = 1ull << 40;
    CHECK(hoistway_kv_open(&options, &none) == HOISTWAY_INVALID_ARGUMENT);
    options.flags = HOISTWAY_KV_NO_VERIFY;
    options.durability = "perhaps";
    CHECK(hoistway_kv_open(&options, &none) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(strstr(hoistway_last_error(), "batched"));
    options.durability = NULL;
    options.root = NULL;
    CHECK(hoistway_kv_open(&options, &none) == HOISTWAY_INVALID_ARGUMENT);
    options.root = "/does/not/exist";
    options.access = "read";
    CHECK(hoistway_kv_open(&options, &none) == HOISTWAY_INVALID_FILE && none == NULL);
    hoistway_kv_namespace *no_blocks = NULL;
    hoistway_kv_description description = {.size = sizeof description, .other_count = 1};
    CHECK(hoistway_kv_namespace_open(store, &description, &no_blocks) == HOISTWAY_INVALID_ARGUMENT && !no_blocks);
    hoistway_kv_free(NULL);
    hoistway_kv_namespace_free(NULL);
    hoistway_kv_ticket_free(NULL);
    hoistway_kv_region_free(NULL);
}

/* Programs of a later version have longer items: taken as long as they ask for nothing that is not there. */
static void check_later_versions(void) {
    struct later {
        hoistway_kv_item now;
        uint64_t more;
    } items[2];
    hoistway_kv_piece pieces[2][2];
    hoistway_kv_ticket *ticket = NULL;
    for (int index = 0; index < 2; index++) {
        items[index].now = item_of(index, target, pieces[index]);
        items[index].now.size = sizeof items[index];
        items[index].more = 0;
    }
    CHECK(hoistway_kv_load(blocks, &items[0].now, 2, HOISTWAY_PREFETCH, NULL, &ticket) == HOISTWAY_OK);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_OK);
    hoistway_kv_ticket_free(ticket);
    items[1].more = 1;
    CHECK(hoistway_kv_load(blocks, &items[0].now, 2, HOISTWAY_PREFETCH, NULL, &ticket) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(strstr(hoistway_last_error(), "does not know"));
}

/* A child of fork has no store. What it frees changes nothing in its parent. */
static void check_fork(void) {
    hoistway_kv_ticket *ticket = begin(true, 0, 1, NULL);
    pid_t child = fork();
    if (child == 0) {
        bool found;
        uint64_t count;
        CHECK(hoistway_kv_lookup(blocks, keys, 1, &found) == HOISTWAY_CLOSED);
        CHECK(hoistway_kv_drain(store, &count, 1, &count) == HOISTWAY_CLOSED);
        CHECK(hoistway_kv_ticket_wait(ticket, 0) == HOISTWAY_CLOSED);
        hoistway_status status = hoistway_kv_ticket_wait_released(ticket, UINT64_MAX);
        CHECK(status == HOISTWAY_CLOSED || (status == HOISTWAY_OK && hoistway_kv_ticket_is_released(ticket)));
        hoistway_kv_ticket_free(ticket);
        hoistway_kv_namespace_free(blocks);
        hoistway_kv_free(store);
        _exit(0);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_OK);
    hoistway_kv_ticket_free(ticket);
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
    void *driver = dlopen(getenv("HOISTWAY_CUDA_DRIVER"), RTLD_NOW);
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

    hoistway_kv_piece piece = {.address = (void *)(uintptr_t)address, .length = BLOCK, .target = HOISTWAY_TARGET_CUDA};
    hoistway_kv_region *region = NULL;
    CHECK(hoistway_kv_register(store, &piece, &region) == HOISTWAY_OK && region);
    CHECK(!hoistway_kv_region_is_direct(region)); /* The stand-in goes by way of the host. */
    hoistway_kv_item item = {.size = sizeof item, .key = keys[1], .pieces = &piece, .piece_count = 1};
    hoistway_kv_ticket *ticket = NULL;
    CHECK(hoistway_kv_load(blocks, &item, 1, HOISTWAY_DEMAND, NULL, &ticket) == HOISTWAY_OK);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_OK);
    hoistway_kv_ticket_free(ticket);
    CHECK(to_host(target[1], address, BLOCK) == 0 && memcmp(source[1], target[1], BLOCK) == 0);

    /* Its event does not come: the request ends in time, and the memory is the caller's some time after that. */
    CHECK(launch(stream, wait_at_gate, NULL) == 0 && record(event, stream) == 0);
    hoistway_kv_request request = {.size = sizeof request, .timeout_ms = 50, .wait_event = event};
    CHECK(hoistway_kv_load(blocks, &item, 1, HOISTWAY_DEMAND, &request, &ticket) == HOISTWAY_OK);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_TIMED_OUT);
    CHECK(outcome_of(ticket, 0, 1) == HOISTWAY_KV_TIMED_OUT);
    /* One that has no such time is cancelled. */
    hoistway_kv_ticket *other = NULL;
    hoistway_kv_outcome outcome;
    request.timeout_ms = 0;
    CHECK(hoistway_kv_load(blocks, &item, 1, HOISTWAY_DEMAND, &request, &other) == HOISTWAY_OK);
    CHECK(hoistway_kv_ticket_wait(other, 1) == HOISTWAY_PENDING);
    CHECK(hoistway_kv_ticket_poll(other) == HOISTWAY_PENDING && !hoistway_kv_ticket_is_released(other));
    CHECK(hoistway_kv_ticket_wait_released(other, 1) == HOISTWAY_PENDING);
    CHECK(hoistway_kv_ticket_outcomes(other, &outcome, 1) == HOISTWAY_PENDING);
    CHECK(hoistway_kv_ticket_cancel(other) == HOISTWAY_OK);
    CHECK(hoistway_kv_ticket_wait(other, UINT64_MAX) == HOISTWAY_CANCELLED);
    __atomic_store_n(&gate, 1, __ATOMIC_SEQ_CST);
    CHECK(hoistway_kv_ticket_wait_released(ticket, UINT64_MAX) == HOISTWAY_OK);
    hoistway_kv_ticket_free(ticket);
    hoistway_kv_ticket_free(other);
    hoistway_kv_region_free(region);
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
    hoistway_kv *store_before = store;
    hoistway_kv_namespace *blocks_before = blocks;
    char *near = path_of(root, "near"), *other = path_of(root, "other"), *far_root = path_of(root, "far");
    hoistway_kv_far_options far = {.size = sizeof far, .root = far_root, .layout = "files", .policy = "write_back"};
    far.capacity_bytes = 64 << 20;
    far.min_free_bytes = 1;
    far.timeout_ms = 60000;
    far.lookup_timeout_ms = 60000;
    far.backlog_bytes = 8 << 20;
    far.staging_bytes = 8 << 20;
    hoistway_kv_options options = {.size = sizeof options, .root = near, .capacity_bytes = 64 << 20};
    options.min_free_bytes = 1;
    options.far_tier = &far;

    CHECK(hoistway_kv_open(&options, &store) == HOISTWAY_OK);
    blocks = open_namespace(store);
    hoistway_kv_ticket *ticket = begin(false, 0, 1, NULL);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_OK);
    hoistway_kv_ticket_free(ticket);
    load_and_compare(0, 1);
    char *words = NULL;
    CHECK(hoistway_kv_report(store, &words) == HOISTWAY_OK && strstr(words, "mount its file system"));
    hoistway_string_free(words);
    CHECK(hoistway_kv_metrics(store, &words) == HOISTWAY_OK);
    const char *is_up = strstr(words, "\nhoistway_kv_far_up{");
    CHECK(is_up && strchr(is_up, '}') && strncmp(strchr(is_up, '}'), "} 0\n", 4) == 0);
    hoistway_string_free(words);
    uint64_t removed = 0;
    CHECK(hoistway_kv_delete(blocks, keys, 1, &removed) == HOISTWAY_IO);
    CHECK(strstr(hoistway_last_error(), "far tier"));
    ticket = begin(false, 0, 1, NULL);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_OK);
    hoistway_kv_ticket_free(ticket);
    CHECK(hoistway_kv_close(store, 0) == HOISTWAY_IO && strstr(hoistway_last_error(), "1 blocks were not written"));
    hoistway_kv_namespace_free(blocks);
    hoistway_kv_free(store);

    CHECK(mkdir(far_root, 0700) == 0);
    CHECK(hoistway_kv_open(&options, &store) == HOISTWAY_OK);
    blocks = open_namespace(store);
    ticket = begin(false, 0, 2, NULL);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_OK);
    hoistway_kv_ticket_free(ticket);
    CHECK(hoistway_kv_close(store, 60000) == HOISTWAY_OK); /* The backlog is written. */
    hoistway_kv_namespace_free(blocks);
    hoistway_kv_free(store);

    options.root = other;
    far.flags = HOISTWAY_KV_NO_PROMOTE;
    CHECK(hoistway_kv_open(&options, &store) == HOISTWAY_OK);
    blocks = open_namespace(store);
    load_and_compare(0, 2);
    ticket = begin(true, 1, 1, NULL);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_OK);
    CHECK(hoistway_kv_ticket_report(ticket, &words) == HOISTWAY_OK && strstr(words, "\"far_bytes\":200000"));
    hoistway_string_free(words);
    hoistway_kv_ticket_free(ticket);
    hoistway_kv_namespace_free(blocks);
    hoistway_kv_free(store);

    hoistway_kv *none = (hoistway_kv *)1;
    far.policy = "perhaps";
    CHECK(hoistway_kv_open(&options, &none) == HOISTWAY_INVALID_ARGUMENT && none == NULL);
    CHECK(strstr(hoistway_last_error(), "write_through"));
    far.policy = NULL;
    far.flags = 1ull << 40;
    CHECK(hoistway_kv_open(&options, &none) == HOISTWAY_INVALID_ARGUMENT);
    far.flags = 0;
    far.root = NULL;
    CHECK(hoistway_kv_open(&options, &none) == HOISTWAY_INVALID_ARGUMENT);
    far.root = far_root;
    far.size = 8;
    CHECK(hoistway_kv_open(&options, &none) == HOISTWAY_INVALID_ARGUMENT);
    /* Programs of the first version have no far tier. */
    options.size = offsetof(hoistway_kv_options, far_tier);
    CHECK(hoistway_kv_open(&options, &none) == HOISTWAY_OK);
    hoistway_kv_free(none);
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
    hoistway_kv_ticket *ticket = begin(true, 0, 2, NULL);
    CHECK(hoistway_kv_ticket_wait(ticket, UINT64_MAX) == HOISTWAY_CORRUPT);
    CHECK(outcome_of(ticket, 0, 2) == HOISTWAY_KV_CORRUPT && outcome_of(ticket, 1, 2) == HOISTWAY_KV_OK);
    hoistway_kv_ticket_free(ticket);
    bool found = true;
    CHECK(hoistway_kv_lookup(blocks, keys, 1, &found) == HOISTWAY_OK && !found);
    char *events = NULL;
    CHECK(hoistway_kv_events(store, &events) == HOISTWAY_OK && strstr(events, "corrupt_block"));
    hoistway_string_free(events);
}

static void check_close(const char *root) {
    hoistway_kv_namespace_free(blocks);
    CHECK(hoistway_kv_close(store, UINT64_MAX) == HOISTWAY_OK);
    CHECK(hoistway_kv_close(store, UINT64_MAX) == HOISTWAY_OK);
    CHECK(hoistway_kv_flush(store, 0) == HOISTWAY_CLOSED);
    hoistway_kv_free(store);
    /* What was stored is found by the next, and a namespace keeps its store open. */
    store = open_store(root);
    blocks = open_namespace(store);
    hoistway_kv_free(store);
    load_and_compare(1, 1);
    hoistway_kv_namespace_free(blocks);
    hoistway_kv_options options = {.size = sizeof options, .root = root, .access = "read"};
    CHECK(hoistway_kv_open(&options, &store) == HOISTWAY_OK);
    blocks = open_namespace(store);
    load_and_compare(1, 1);
    hoistway_kv_piece pieces[2];
    hoistway_kv_item item = item_of(2, source, pieces);
    hoistway_kv_ticket *ticket = NULL;
    CHECK(hoistway_kv_store(blocks, &item, 1, HOISTWAY_DEMAND, NULL, &ticket) == HOISTWAY_READ_ONLY && !ticket);
    hoistway_kv_namespace_free(blocks);
    hoistway_kv_free(store);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    for (int index = 0; index < BLOCKS; index++) {
        snprintf(names[index], sizeof names[index], "block %d", index);
        keys[index] = (hoistway_kv_key){.bytes = names[index], .length = strlen(names[index])};
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
    if (getenv("HOISTWAY_CUDA_DRIVER")) {
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
