/* Reads a checkpoint from an object store, and compares it with its file. Usage: objects FILE, in a directory whose file
 * "endpoint" has the URL of a server that holds the file as s3://models/llama/model.safetensors. */
#define _GNU_SOURCE
#include "check.h"

#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *const folder = "s3://models/llama/";

static hoistway_catalog *opened(const hoistway_catalog_options *options) {
    hoistway_catalog *catalog = NULL;
    CHECK(hoistway_catalog_open(&folder, 1, options, &catalog) == HOISTWAY_OK);
    return catalog;
}

/* Reads all tensors by the catalog or by their URL, and compares them with the file. */
static void compare(const hoistway_catalog *catalog, int by_url, const char *path) {
    uint64_t count = hoistway_catalog_tensor_count(catalog);
    CHECK(count >= 3);
    hoistway_reader *reader = NULL;
    CHECK(hoistway_reader_create(NULL, &reader) == HOISTWAY_OK);
    FILE *file = fopen(path, "rb");
    CHECK(file);
    for (uint64_t index = 0; index < count; index++) {
        hoistway_tensor tensor = {.size = sizeof tensor};
        CHECK(hoistway_catalog_tensor(catalog, index, &tensor) == HOISTWAY_OK);
        CHECK(strcmp(tensor.path, "s3://models/llama/model.safetensors") == 0);
        unsigned char *bytes = malloc(tensor.bytes + 1), *expected = malloc(tensor.bytes + 1);
        hoistway_read read = {.size = sizeof read, .target = HOISTWAY_TARGET_HOST, .fd = -1};
        if (by_url) {
            read.path = tensor.path;
        } else {
            read.catalog = catalog;
            read.file = tensor.file;
        }
        read.offset = tensor.offset;
        read.length = tensor.bytes;
        read.destination = bytes;
        hoistway_batch *batch = NULL;
        CHECK(hoistway_batch_submit(reader, &read, 1, HOISTWAY_DEMAND, &batch) == HOISTWAY_OK);
        CHECK(hoistway_batch_wait(batch, UINT64_MAX, NULL, NULL) == HOISTWAY_OK);
        hoistway_batch_free(batch);
        CHECK(fseek(file, (long)tensor.offset, SEEK_SET) == 0);
        CHECK(fread(expected, 1, tensor.bytes, file) == tensor.bytes);
        CHECK(memcmp(bytes, expected, tensor.bytes) == 0);
        free(bytes);
        free(expected);
    }
    fclose(file);
    hoistway_reader_free(reader);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    char endpoint[256] = "";
    FILE *file = fopen("endpoint", "r");
    CHECK(file && fgets(endpoint, sizeof endpoint, file));
    fclose(file);

    /* Without options the environment says where the store is, also for reads by URL. A process of its own has it, from before
       there are threads. */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        setenv("AWS_ENDPOINT_URL", endpoint, 1);
        setenv("AWS_ACCESS_KEY_ID", "of-the-environment", 1);
        setenv("AWS_SECRET_ACCESS_KEY", "canary", 1);
        hoistway_catalog *catalog = opened(NULL);
        compare(catalog, 1, arguments[1]);
        hoistway_catalog_free(catalog);
        return 0;
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);

    hoistway_store_option store[] = {
        {"endpoint", endpoint},
        {"access_key_id", "of-the-options"},
        {"secret_access_key", "canary"},
    };
    hoistway_catalog_options options = {.size = sizeof options, .store = store, .store_count = 3};
    hoistway_catalog *catalog = opened(&options);
    compare(catalog, 0, arguments[1]);
    hoistway_catalog_free(catalog);

    /* What fails says the object, and no secret. */
    const char *missing = "s3://models/llama/none.safetensors";
    CHECK(hoistway_catalog_open(&missing, 1, &options, &catalog) == HOISTWAY_NOT_FOUND && catalog == NULL);
    CHECK(strstr(hoistway_last_error(), missing) && !strstr(hoistway_last_error(), "canary"));
    store[2] = (hoistway_store_option){"colour", "canary"};
    CHECK(hoistway_catalog_open(&folder, 1, &options, &catalog) == HOISTWAY_INVALID_ARGUMENT);
    CHECK(strstr(hoistway_last_error(), "colour") && !strstr(hoistway_last_error(), "canary"));
    options.store = NULL;
    CHECK(hoistway_catalog_open(&folder, 1, &options, &catalog) == HOISTWAY_INVALID_ARGUMENT);
    puts("ok");
    return 0;
}
