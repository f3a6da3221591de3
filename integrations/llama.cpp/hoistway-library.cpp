// Ollama compiles this folder into mtmd too, which does not use it.
#ifndef OLLAMA_COMPAT_MTMD_BUILD

#include "hoistway-library.h"

#include <cstdlib>
#include <stdexcept>

#ifdef _WIN32
#    define WIN32_LEAN_AND_MEAN
#    ifndef NOMINMAX
#        define NOMINMAX
#    endif
#    include <windows.h>
#else
#    include <dlfcn.h>
#endif

hoistway_shared_library::hoistway_shared_library(const char * name) {
#ifdef _WIN32
    handle = (void *) LoadLibraryA(name);
    if (!handle) {
        error = "LoadLibrary failed with error " + std::to_string(GetLastError());
    }
#else
    handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char * message = dlerror();
        error = message ? message : "dlopen failed";
    }
#endif
}

void * hoistway_shared_library::address_of(const char * name) const {
#ifdef _WIN32
    return (void *) GetProcAddress((HMODULE) handle, name);
#else
    return dlsym(handle, name);
#endif
}

const char * hoistway_library_name() {
    const char * name = std::getenv("LLAMA_WEIGHT_SOURCE");
    return name && *name ? name : nullptr;
}

namespace {

// What hoistway.hpp calls for a catalog and a store of experts.
struct experts_functions {
    decltype(&::hoistway_abi_version)            abi_version            = nullptr;
    decltype(&::hoistway_last_error)             last_error             = nullptr;
    decltype(&::hoistway_string_free)            string_free            = nullptr;
    decltype(&::hoistway_catalog_open)           catalog_open           = nullptr;
    decltype(&::hoistway_catalog_free)           catalog_free           = nullptr;
    decltype(&::hoistway_catalog_tensor_count)   catalog_tensor_count   = nullptr;
    decltype(&::hoistway_catalog_tensor)         catalog_tensor         = nullptr;
    decltype(&::hoistway_experts_open)           experts_open           = nullptr;
    decltype(&::hoistway_experts_free)           experts_free           = nullptr;
    decltype(&::hoistway_experts_describe)       experts_describe       = nullptr;
    decltype(&::hoistway_experts_layer)          experts_layer          = nullptr;
    decltype(&::hoistway_experts_part)           experts_part           = nullptr;
    decltype(&::hoistway_experts_tensor_address) experts_tensor_address = nullptr;
    decltype(&::hoistway_experts_observe)        experts_observe        = nullptr;
    decltype(&::hoistway_experts_ensure)         experts_ensure         = nullptr;
    decltype(&::hoistway_experts_stats)          experts_stats          = nullptr;
    decltype(&::hoistway_lease_free)             lease_free             = nullptr;

    std::string error;

    experts_functions() {
        const char * name = hoistway_library_name();
        if (!name) {
            error = "LLAMA_WEIGHT_SOURCE does not name hoistway's library";
            return;
        }
        hoistway_shared_library file(name);
        file.find("hoistway_abi_version",            abi_version);
        file.find("hoistway_last_error",             last_error);
        file.find("hoistway_string_free",            string_free);
        file.find("hoistway_catalog_open",           catalog_open);
        file.find("hoistway_catalog_free",           catalog_free);
        file.find("hoistway_catalog_tensor_count",   catalog_tensor_count);
        file.find("hoistway_catalog_tensor",         catalog_tensor);
        file.find("hoistway_experts_open",           experts_open);
        file.find("hoistway_experts_free",           experts_free);
        file.find("hoistway_experts_describe",       experts_describe);
        file.find("hoistway_experts_layer",          experts_layer);
        file.find("hoistway_experts_part",           experts_part);
        file.find("hoistway_experts_tensor_address", experts_tensor_address);
        file.find("hoistway_experts_observe",        experts_observe);
        file.find("hoistway_experts_ensure",         experts_ensure);
        file.find("hoistway_experts_stats",          experts_stats);
        file.find("hoistway_lease_free",             lease_free);
        if (file.error.empty() && abi_version() != HOISTWAY_ABI_VERSION) {
            file.error = "its interface has version " + std::to_string(abi_version()) + ", not " +
                         std::to_string(HOISTWAY_ABI_VERSION);
        }
        if (!file.error.empty()) {
            error = std::string("LLAMA_WEIGHT_SOURCE=") + name + " cannot be used: " + file.error;
        }
    }
};

const experts_functions & library() {
    static const experts_functions functions;
    return functions;
}

} // namespace

void hoistway_load_experts_functions() {
    if (!library().error.empty()) {
        throw std::runtime_error("HOISTWAY_EXPERTS_BUDGET is set, and " + library().error);
    }
}

extern "C" {

HOISTWAY_HIDDEN
const char * hoistway_last_error(void) {
    return library().last_error();
}

HOISTWAY_HIDDEN
void hoistway_string_free(char * string) {
    library().string_free(string);
}

HOISTWAY_HIDDEN
hoistway_status hoistway_catalog_open(const char * const * paths, uint64_t count, const hoistway_catalog_options * options,
                                      hoistway_catalog ** catalog) {
    return library().catalog_open(paths, count, options, catalog);
}

HOISTWAY_HIDDEN
void hoistway_catalog_free(hoistway_catalog * catalog) {
    library().catalog_free(catalog);
}

HOISTWAY_HIDDEN
uint64_t hoistway_catalog_tensor_count(const hoistway_catalog * catalog) {
    return library().catalog_tensor_count(catalog);
}

HOISTWAY_HIDDEN
hoistway_status hoistway_catalog_tensor(const hoistway_catalog * catalog, uint64_t index, hoistway_tensor * tensor) {
    return library().catalog_tensor(catalog, index, tensor);
}

HOISTWAY_HIDDEN
hoistway_status hoistway_experts_open(const hoistway_catalog * catalog, const hoistway_experts_options * options,
                                      hoistway_experts ** store) {
    return library().experts_open(catalog, options, store);
}

HOISTWAY_HIDDEN
void hoistway_experts_free(hoistway_experts * store) {
    library().experts_free(store);
}

HOISTWAY_HIDDEN
hoistway_status hoistway_experts_describe(const hoistway_experts * store, hoistway_experts_model * model) {
    return library().experts_describe(store, model);
}

HOISTWAY_HIDDEN
hoistway_status hoistway_experts_layer(const hoistway_experts * store, uint64_t index, hoistway_experts_layer_info * layer) {
    return library().experts_layer(store, index, layer);
}

HOISTWAY_HIDDEN
hoistway_status hoistway_experts_part(const hoistway_experts * store, uint32_t layer, uint32_t expert, uint64_t index,
                                      hoistway_part * part) {
    return library().experts_part(store, layer, expert, index, part);
}

HOISTWAY_HIDDEN
hoistway_status hoistway_experts_tensor_address(const hoistway_experts * store, const char * name, void ** address) {
    return library().experts_tensor_address(store, name, address);
}

HOISTWAY_HIDDEN
hoistway_status hoistway_experts_observe(const hoistway_experts * store, uint32_t layer, const uint32_t * experts,
                                         const float * weights, uint64_t count) {
    return library().experts_observe(store, layer, experts, weights, count);
}

HOISTWAY_HIDDEN
hoistway_status hoistway_experts_ensure(const hoistway_experts * store, uint32_t layer, const uint32_t * experts,
                                        uint64_t count, hoistway_lease ** lease) {
    return library().experts_ensure(store, layer, experts, count, lease);
}

HOISTWAY_HIDDEN
hoistway_status hoistway_experts_stats(const hoistway_experts * store, char ** json) {
    return library().experts_stats(store, json);
}

HOISTWAY_HIDDEN
void hoistway_lease_free(hoistway_lease * lease) {
    library().lease_free(lease);
}

} // extern "C"

#endif
