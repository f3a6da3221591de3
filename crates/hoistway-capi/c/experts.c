/* What the C ABI promises of models larger than memory, checked from C. Usage: experts MODEL.gguf: of 3 layers with 8 experts,
 * of which a token uses 2, with a table token_embd.weight and blk.N.attn_q.weight. The program cuts the file short at its end.
 * With HOISTWAY_CUDA_DRIVER, experts go to memory of that driver's device, too. */
#define _GNU_SOURCE
#include "check.h"

#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LAYERS = 3, EXPERTS = 8, PARTS = 3, ROWS = 50 };

static const char *path;
static unsigned char *file;
static hoistway_catalog *catalog;
static hoistway_reader *reader;

static unsigned char *read_file(void) {
    FILE *opened = fopen(path, "rb");
    CHECK(opened && fseek(opened, 0, SEEK_END) == 0);
    long length = ftell(opened);
    unsigned char *bytes = malloc((size_t)length);
    rewind(opened);
    CHECK(length > 0 && bytes && fread(bytes, 1, (size_t)length, opened) == (size_t)length);
    fclose(opened);
    return bytes;
}

static hoistway_experts_options options_of(const char *backing, uint64_t budget) {
    hoistway_experts_options options = {.size = sizeof options, .backing = backing, .budget_bytes = budget};
    return options;
}

static hoistway_experts *open_store(const hoistway_experts_options *options) {
    hoistway_experts *store = NULL;
    CHECK(hoistway_experts_open(catalog, options, &store) == HOISTWAY_OK && store);
    return store;
}

static hoistway_part part_of(const hoistway_lease *lease, uint64_t position, uint64_t index) {
    hoistway_part part = {.size = sizeof part};
    CHECK(hoistway_lease_part(lease, position, index, &part) == HOISTWAY_OK);
    return part;
}

/* Each part of the lease has the bytes that the file has at its place. */
static void check_bytes(const hoistway_lease *lease) {
    for (uint64_t position = 0; position < hoistway_lease_count(lease); position++) {
        for (uint64_t index = 0; index < hoistway_lease_part_count(lease, position); index++) {
            hoistway_part part = part_of(lease, position, index);
            CHECK(part.address && part.target == HOISTWAY_TARGET_HOST && part.bytes > 0);
            CHECK(memcmp(part.address, file + part.offset, part.bytes) == 0);
        }
    }
}

static hoistway_lease *ensure(const hoistway_experts *store, uint32_t layer, uint32_t first, uint32_t second) {
    uint32_t experts[] = {first, second};
    hoistway_lease *lease = NULL;
    CHECK(hoistway_experts_ensure(store, layer, experts, 2, &lease) == HOISTWAY_OK && lease);
    CHECK(strcmp(hoistway_last_error(), "") == 0);
    return lease;
}

static void check_model(const hoistway_experts *store) {
    hoistway_experts_model model = {.size = sizeof model};
    CHECK(hoistway_experts_describe(store, &model) == HOISTWAY_OK);
    CHECK(model.layers == LAYERS && model.experts == LAYERS * EXPERTS && model.experts_per_token == 2);
    CHECK(model.dense_tensors > LAYERS && model.dense_bytes > 0);
    CHECK(model.token_cycle_bytes * EXPERTS == model.expert_bytes * 2);
    hoistway_experts_layer_info layer = {.size = sizeof layer};
    CHECK(hoistway_experts_layer(store, 2, &layer) == HOISTWAY_OK && layer.layer == 2 && layer.experts == EXPERTS);
    CHECK(layer.demand_bytes == 2 * layer.expert_bytes);
    CHECK(hoistway_experts_layer(store, 3, &layer) == HOISTWAY_NOT_FOUND);
    hoistway_part part = {.size = sizeof part};
    uint64_t bytes = 0;
    for (uint64_t index = 0; index < PARTS; index++) {
        CHECK(hoistway_experts_part(store, 1, 7, index, &part) == HOISTWAY_OK);
        CHECK(!part.address && part.slot == -1 && part.dimensions == 2 && strcmp(part.component, "weight") == 0);
        bytes += part.bytes;
    }
    CHECK(bytes == layer.expert_bytes && strcmp(part.role, "down") == 0 && strcmp(part.dtype, "F16") == 0);
    CHECK(strcmp(part.tensor, "blk.1.ffn_down_exps.weight") == 0 && part.ggml_type == 1);
    CHECK(hoistway_experts_part(store, 1, 7, PARTS, &part) == HOISTWAY_NOT_FOUND);
    CHECK(hoistway_experts_part(store, 1, EXPERTS, 0, &part) == HOISTWAY_NOT_FOUND);
    part.size = 0;
    CHECK(hoistway_experts_part(store, 1, 7, 0, &part) == HOISTWAY_INVALID_ARGUMENT);
}

static void check_leases(void) {
    hoistway_experts_options options = options_of(NULL, 1 << 20);
    options.policy = "lru";
    options.events = 100;
    hoistway_experts *store = open_store(&options);
    check_model(store);
    bool resident = true;
    CHECK(hoistway_experts_is_resident(store, 0, 3, &resident) == HOISTWAY_OK && !resident);
    uint32_t chosen[] = {3, 5};
    float weights[] = {0.75f, 0.25f};
    CHECK(hoistway_experts_observe(store, 0, chosen, weights, 2) == HOISTWAY_OK);
    CHECK(hoistway_experts_observe(store, 1, chosen, NULL, 2) == HOISTWAY_OK);
    hoistway_lease *lease = ensure(store, 0, 3, 5), *same = ensure(store, 0, 3, 3);
    CHECK(hoistway_lease_count(lease) == 2 && hoistway_lease_part_count(lease, 1) == PARTS);
    CHECK(hoistway_lease_part_count(lease, 2) == 0);
    check_bytes(lease);
    CHECK(part_of(lease, 0, 1).address == part_of(same, 1, 1).address && part_of(lease, 0, 0).slot >= 0);
    CHECK(part_of(lease, 0, 0).slot != part_of(lease, 1, 0).slot);

    /* What is leased is not evicted; what was released is. */
    uint64_t evicted = 9;
    CHECK(hoistway_experts_evict(store, 0, chosen, 2, &evicted) == HOISTWAY_OK && evicted == 0);
    hoistway_lease_free(lease);
    CHECK(hoistway_experts_evict(store, 0, chosen, 2, &evicted) == HOISTWAY_OK && evicted == 1);
    hoistway_lease_free(same);
    CHECK(hoistway_experts_evict(store, 0, chosen, 2, NULL) == HOISTWAY_OK);
    CHECK(hoistway_experts_is_resident(store, 0, 3, &resident) == HOISTWAY_OK && !resident);

    const char *names[] = {"token_embd.weight", "blk.1.attn_q.weight"};
    CHECK(hoistway_experts_ensure_tensors(store, names, 2, &lease) == HOISTWAY_OK);
    CHECK(hoistway_lease_count(lease) == 2 && strcmp(part_of(lease, 1, 0).tensor, names[1]) == 0);
    CHECK(strcmp(part_of(lease, 1, 0).role, "dense") == 0);
    check_bytes(lease);
    CHECK(hoistway_experts_is_tensor_resident(store, names[0], &resident) == HOISTWAY_OK && resident);
    hoistway_lease_free(lease);
    CHECK(hoistway_experts_evict_tensors(store, names, 2, &evicted) == HOISTWAY_OK && evicted == 2);

    /* A prefetched expert is there sooner or later. */
    CHECK(hoistway_experts_prefetch(store, 2, chosen, 2, UINT64_MAX) == HOISTWAY_OK);
    for (int turn = 0; turn < 60000 && !resident; turn++) {
        usleep(1000);
        CHECK(hoistway_experts_is_resident(store, 2, 5, &resident) == HOISTWAY_OK);
    }
    CHECK(resident && hoistway_experts_cancel_before(store, 2) == HOISTWAY_OK);
    char *words = NULL;
    CHECK(hoistway_experts_stats(store, &words) == HOISTWAY_OK);
    CHECK(strstr(words, "\"policy\":\"lru\"") && strstr(words, "\"misses\":4") && strstr(words, "\"hit_rate\":"));
    hoistway_string_free(words);
    CHECK(hoistway_experts_events(store, &words) == HOISTWAY_OK);
    CHECK(strstr(words, "\"expert\":3") && strstr(words, "\"change\":\"evicted\""));
    CHECK(strstr(words, "\"tensor\":\"token_embd.weight\"") && strstr(words, "\"lost\":0"));
    hoistway_string_free(words);

    /* A lease outlives its store, and so do the strings of its parts. */
    lease = ensure(store, 2, 0, 7);
    hoistway_experts_free(store);
    check_bytes(lease);
    CHECK(strcmp(part_of(lease, 1, 2).tensor, "blk.2.ffn_down_exps.weight") == 0);
    hoistway_lease_free(lease);
}

static void check_sparse(void) {
    hoistway_experts_options options = options_of("host_sparse", 1 << 20);
    hoistway_experts *store = open_store(&options);
    void *base = NULL;
    CHECK(hoistway_experts_tensor_address(store, "blk.1.ffn_up_exps.weight", &base) == HOISTWAY_OK && base);
    hoistway_lease *lease = ensure(store, 1, 2, 6);
    check_bytes(lease);
    hoistway_part part = part_of(lease, 1, 1);
    CHECK(part.address == (unsigned char *)base + 6 * part.bytes && part.slot == -1);
    CHECK(hoistway_experts_tensor_address(store, "nothing", &base) == HOISTWAY_NOT_FOUND);
    hoistway_lease_free(lease);
    hoistway_experts_free(store);
}

static void check_device(void) {
    hoistway_experts_options options = options_of("device_slots", 1 << 20);
    hoistway_experts *store = NULL;
    CHECK(hoistway_experts_open(catalog, &options, &store) == HOISTWAY_INVALID_ARGUMENT && !store);
    if (!getenv("HOISTWAY_CUDA_DRIVER")) {
        return;
    }
    options.target = HOISTWAY_TARGET_CUDA;
    options.backing = "device_sparse";
    CHECK(hoistway_experts_open(catalog, &options, &store) == HOISTWAY_INVALID_ARGUMENT && !store);
    CHECK(strstr(hoistway_last_error(), "granules of 2097152 bytes"));
    options.backing = "device_slots";
    store = open_store(&options);
    hoistway_lease *lease = ensure(store, 1, 2, 6);
    hoistway_part part = part_of(lease, 1, 1);
    CHECK(part.target == HOISTWAY_TARGET_CUDA && part.device == 0 && part.address && part.slot >= 0);
    hoistway_lease_free(lease);
    hoistway_experts_free(store);

    /* What was evicted comes back from host memory. A program with an older header has no such member. */
    options.host_level_bytes = 1 << 20;
    store = open_store(&options);
    for (int turn = 0; turn < 2; turn++) {
        uint32_t experts[] = {2, 6};
        uint64_t evicted = 0;
        hoistway_lease_free(ensure(store, 1, 2, 6));
        CHECK(hoistway_experts_evict(store, 1, experts, 2, &evicted) == HOISTWAY_OK && evicted == 2);
    }
    char *stats = NULL;
    CHECK(hoistway_experts_stats(store, &stats) == HOISTWAY_OK && strstr(stats, "\"hits\":2,"));
    hoistway_string_free(stats);
    hoistway_experts_free(store);
    store = NULL;
    options.host_level_bytes = 1;
    CHECK(hoistway_experts_open(catalog, &options, &store) == HOISTWAY_INVALID_ARGUMENT && !store);
    options.size = offsetof(hoistway_experts_options, host_level_bytes);
    CHECK(hoistway_experts_open(catalog, &options, &store) == HOISTWAY_OK && store);
    hoistway_experts_free(store);
}

/* The time-out of the store is for the wait for room. Reads may take longer on a busy machine. */
static hoistway_lease *ensure_repeatedly(const hoistway_experts *store, uint32_t layer, uint32_t first,
                                         uint32_t second) {
    uint32_t experts[] = {first, second};
    hoistway_lease *lease = NULL;
    hoistway_status status = HOISTWAY_TIMED_OUT;
    while (status == HOISTWAY_TIMED_OUT) {
        status = hoistway_experts_ensure(store, layer, experts, 2, &lease);
    }
    CHECK(status == HOISTWAY_OK && lease);
    return lease;
}

static void check_errors(void) {
    hoistway_experts *store = NULL;
    hoistway_experts_options options = options_of(NULL, 1 << 20);
    CHECK(hoistway_experts_open(NULL, NULL, &store) == HOISTWAY_INVALID_ARGUMENT && !store);
    options.reserved = 1;
    CHECK(hoistway_experts_open(catalog, &options, &store) == HOISTWAY_INVALID_ARGUMENT);
    options = options_of("slots", 0);
    CHECK(hoistway_experts_open(catalog, &options, &store) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(strstr(hoistway_last_error(), "host_sparse"));
    options = options_of(NULL, 0);
    options.policy = "belady";
    CHECK(hoistway_experts_open(catalog, &options, &store) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(strstr(hoistway_last_error(), "future"));
    options = options_of(NULL, 100);
    CHECK(hoistway_experts_open(catalog, &options, &store) == HOISTWAY_MEMORY && !store);
    CHECK(strstr(hoistway_last_error(), "does not hold expert"));

    /* A budget of two experts. */
    options = options_of(NULL, 2 * PARTS * 3 * 4096);
    options.timeout_ms = 50;
    store = open_store(&options);
    hoistway_lease *lease = NULL, *other = NULL;
    uint32_t experts[] = {1, EXPERTS, 2, 3};
    CHECK(hoistway_experts_ensure(store, 0, experts, 2, &lease) == HOISTWAY_NOT_FOUND && !lease);
    CHECK(strstr(hoistway_last_error(), "there is no expert 8"));
    CHECK(hoistway_experts_ensure(store, LAYERS, experts, 1, &lease) == HOISTWAY_NOT_FOUND);
    CHECK(hoistway_experts_ensure(store, 0, NULL, 1, &lease) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_experts_observe(store, 0, experts, NULL, 2) == HOISTWAY_NOT_FOUND);
    CHECK(hoistway_experts_prefetch(store, 9, experts, 1, 0) == HOISTWAY_NOT_FOUND);
    const char *names[] = {"blk.0.ffn_up_exps.weight", "nothing", NULL};
    CHECK(hoistway_experts_ensure_tensors(store, names, 1, &lease) == HOISTWAY_NOT_FOUND);
    CHECK(strstr(hoistway_last_error(), "leased by layer"));
    CHECK(hoistway_experts_ensure_tensors(store, names + 1, 1, &lease) == HOISTWAY_NOT_FOUND);
    CHECK(hoistway_experts_ensure_tensors(store, names + 2, 1, &lease) == HOISTWAY_INVALID_ARGUMENT);
    void *address = NULL;
    CHECK(hoistway_experts_tensor_address(store, names[0], &address) == HOISTWAY_NOT_FOUND && !address);
    CHECK(hoistway_experts_set_budget(store, 1) == HOISTWAY_MEMORY);
    CHECK(hoistway_experts_is_resident(store, 0, 1, NULL) == HOISTWAY_INVALID_ARGUMENT);

    /* Leases that hold all room are waited for, and then named. */
    lease = ensure_repeatedly(store, 0, 2, 3);
    other = ensure_repeatedly(store, 1, 2, 3);
    hoistway_lease *third = NULL;
    CHECK(hoistway_experts_ensure(store, 2, experts + 2, 2, &third) == HOISTWAY_REFUSED && !third);
    CHECK(strstr(hoistway_last_error(), "drop leases"));
    check_bytes(lease);
    hoistway_lease_free(other);
    CHECK(hoistway_experts_set_budget(store, 1 << 20) == HOISTWAY_OK);
    third = ensure_repeatedly(store, 2, 2, 3);

    pid_t child = fork();
    if (child == 0) {
        bool refused = hoistway_experts_ensure(store, 0, experts + 2, 1, &other) != HOISTWAY_OK;
        hoistway_lease_free(third);
        hoistway_experts_free(store);
        _exit(refused ? 0 : 1);
    }
    int status = 1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    hoistway_lease_free(third);
    hoistway_lease_free(lease);
    hoistway_experts_free(store);
    hoistway_experts_free(NULL);
    hoistway_lease_free(NULL);
    CHECK(hoistway_lease_count(NULL) == 0 && hoistway_lease_part_count(NULL, 0) == 0);
}

static void check_rows(void) {
    hoistway_rows *table = NULL;
    CHECK(hoistway_rows_open(reader, catalog, "nothing", &table) == HOISTWAY_NOT_FOUND && !table);
    CHECK(hoistway_rows_open(reader, catalog, "token_embd.weight", &table) == HOISTWAY_OK && table);
    uint64_t bytes = hoistway_rows_row_bytes(table);
    CHECK(hoistway_rows_count(table) == ROWS && bytes == 16 * sizeof(float));
    hoistway_tensor tensor = {.size = sizeof tensor};
    CHECK(hoistway_catalog_find(catalog, "token_embd.weight", &tensor) == HOISTWAY_OK);
    uint64_t numbers[] = {49, 0, 7, 8, 49};
    unsigned char *gathered = malloc(5 * bytes);
    CHECK(hoistway_rows_gather(table, numbers, 5, gathered, 5 * bytes) == HOISTWAY_OK);
    for (int row = 0; row < 5; row++) {
        CHECK(memcmp(gathered + row * bytes, file + tensor.offset + numbers[row] * bytes, bytes) == 0);
    }
    CHECK(hoistway_rows_gather(table, numbers, 5, gathered, 4 * bytes) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(hoistway_rows_gather(table, NULL, 0, NULL, 0) == HOISTWAY_OK);
    numbers[2] = ROWS;
    CHECK(hoistway_rows_gather(table, numbers, 5, gathered, 5 * bytes) == HOISTWAY_NOT_FOUND);
    CHECK(strstr(hoistway_last_error(), "there is no row 50"));
    free(gathered);
    hoistway_rows_free(table);
    hoistway_rows_free(NULL);
}

static void check_layers(void) {
    hoistway_layers_options options = {.size = sizeof options, .budget_bytes = 1000};
    hoistway_layers *layers = NULL;
    CHECK(hoistway_layers_open(reader, catalog, &options, &layers) == HOISTWAY_MEMORY && !layers);
    CHECK(hoistway_layers_open(reader, catalog, NULL, &layers) == HOISTWAY_OK && layers);
    uint64_t tensors = 0;
    for (int turn = 0; turn < 2 * LAYERS; turn++) {
        hoistway_layer *layer = NULL;
        CHECK(hoistway_layers_next(layers, &layer) == HOISTWAY_OK && layer);
        char name[16];
        snprintf(name, sizeof name, "blk.%d", turn % LAYERS);
        CHECK(strcmp(hoistway_layer_name(layer), name) == 0);
        for (uint64_t index = 0; index < hoistway_layer_tensor_count(layer); index++) {
            hoistway_layer_part part = {.size = sizeof part};
            hoistway_tensor stored = {.size = sizeof stored};
            CHECK(hoistway_layer_tensor(layer, index, &part) == HOISTWAY_OK);
            CHECK(hoistway_catalog_find(catalog, part.name, &stored) == HOISTWAY_OK);
            CHECK(part.bytes == stored.bytes && part.dimensions == stored.dimensions);
            CHECK(strcmp(part.dtype, stored.dtype) == 0 && part.ggml_type == stored.ggml_type);
            CHECK(memcmp(part.address, file + stored.offset, part.bytes) == 0);
            tensors++;
        }
        hoistway_layer_part past = {.size = sizeof past};
        CHECK(hoistway_layer_tensor(layer, hoistway_layer_tensor_count(layer), &past) == HOISTWAY_NOT_FOUND);
        CHECK(hoistway_layer_used_behind(layer, NULL) == HOISTWAY_INVALID_ARGUMENT);
        CHECK(strstr(hoistway_last_error(), "host memory"));
        hoistway_layer_free(layer);
    }
    char *words = NULL;
    CHECK(hoistway_layers_stats(layers, &words) == HOISTWAY_OK && strstr(words, "\"served\":6"));
    hoistway_string_free(words);
    CHECK(tensors == 2 * LAYERS * 5);
    hoistway_layers_free(layers);
    hoistway_layers_free(NULL);

    /* Layers that the caller names, and one of which it holds for too long. */
    const char *names[] = {"blk.0.attn_q.weight", "blk.2.attn_q.weight"};
    hoistway_layer_spec specs[] = {{"first", names, 1}, {"second", names + 1, 1}};
    options = (hoistway_layers_options){.size = sizeof options, .budget_bytes = 3 * 4096, .timeout_ms = 50};
    options.layers = specs;
    options.layer_count = 2;
    CHECK(hoistway_layers_open(reader, catalog, &options, &layers) == HOISTWAY_OK);
    hoistway_layer *layer = NULL;
    CHECK(hoistway_layers_next(layers, &layer) == HOISTWAY_OK && strcmp(hoistway_layer_name(layer), "first") == 0);
    hoistway_layer *none = NULL;
    CHECK(hoistway_layers_next(layers, &none) == HOISTWAY_REFUSED && !none);
    hoistway_layer_free(layer);
    CHECK(hoistway_layers_next(layers, &layer) == HOISTWAY_OK && strcmp(hoistway_layer_name(layer), "second") == 0);
    hoistway_layer_free(layer);
    hoistway_layers_free(layers);
    options.timeout_ms = UINT64_MAX;
    CHECK(hoistway_layers_open(reader, catalog, &options, &layers) == HOISTWAY_OK);
    CHECK(hoistway_layers_next(layers, &layer) == HOISTWAY_OK);
    CHECK(hoistway_layers_stop(layers) == HOISTWAY_OK);
    CHECK(hoistway_layers_next(layers, &none) == HOISTWAY_CANCELLED && !none);
    hoistway_layer_free(layer);
    hoistway_layers_free(layers);
    layers = NULL;
    options.device = 1;
    CHECK(hoistway_layers_open(reader, catalog, &options, &layers) == HOISTWAY_INVALID_ARGUMENT && !layers);
    CHECK(strstr(hoistway_last_error(), "device 1"));
    options.device = 0;
    specs[1].name = NULL;
    CHECK(hoistway_layers_open(reader, catalog, &options, &layers) == HOISTWAY_INVALID_ARGUMENT && !layers);
    specs[1] = (hoistway_layer_spec){"third", NULL, 0};
    CHECK(hoistway_layers_open(reader, catalog, &options, &layers) == HOISTWAY_INVALID_ARGUMENT);
}

/* A file that is cut short under the store fails the requests that notice, and leases nothing. */
static void check_cut(void) {
    hoistway_experts_options options = options_of(NULL, 1 << 20);
    hoistway_experts *store = open_store(&options);
    hoistway_lease *lease = ensure(store, 0, 0, 1);
    CHECK(truncate(path, 10000) == 0);
    check_bytes(lease);
    uint32_t expert = 5;
    hoistway_lease *none = NULL;
    hoistway_status status = hoistway_experts_ensure(store, 2, &expert, 1, &none);
    CHECK((status == HOISTWAY_CHANGED || status == HOISTWAY_TRUNCATED) && !none);
    CHECK(strstr(hoistway_last_error(), "expert 5 of layer 2") && strstr(hoistway_last_error(), path));
    hoistway_lease_free(lease);
    hoistway_experts_free(store);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    path = arguments[1];
    file = read_file();
    CHECK(hoistway_catalog_open(&path, 1, NULL, &catalog) == HOISTWAY_OK);
    CHECK(hoistway_reader_create(NULL, &reader) == HOISTWAY_OK);
    check_leases();
    check_sparse();
    check_device();
    check_errors();
    check_rows();
    check_layers();
    check_cut();
    hoistway_reader_free(reader);
    hoistway_catalog_free(catalog);
    free(file);
    puts("ok");
    return 0;
}
