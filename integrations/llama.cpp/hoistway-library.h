// hoistway's library for llama.cpp: found at run time by LLAMA_WEIGHT_SOURCE, so that nothing depends on its presence.
#pragma once

// hoistway's functions are defined in hoistway-library.cpp, as calls into the library, and what is made of hoistway.hpp here calls
// those: by names of their own, as a program may be linked with the library itself, and with llama.cpp statically.
#define hoistway_abi_version            hoistway_llama_abi_version
#define hoistway_last_error             hoistway_llama_last_error
#define hoistway_string_free            hoistway_llama_string_free
#define hoistway_catalog_open           hoistway_llama_catalog_open
#define hoistway_catalog_free           hoistway_llama_catalog_free
#define hoistway_catalog_tensor_count   hoistway_llama_catalog_tensor_count
#define hoistway_catalog_tensor         hoistway_llama_catalog_tensor
#define hoistway_experts_open           hoistway_llama_experts_open
#define hoistway_experts_free           hoistway_llama_experts_free
#define hoistway_experts_describe       hoistway_llama_experts_describe
#define hoistway_experts_layer          hoistway_llama_experts_layer
#define hoistway_experts_part           hoistway_llama_experts_part
#define hoistway_experts_tensor_address hoistway_llama_experts_tensor_address
#define hoistway_experts_observe        hoistway_llama_experts_observe
#define hoistway_experts_ensure         hoistway_llama_experts_ensure
#define hoistway_experts_stats          hoistway_llama_experts_stats
#define hoistway_lease_free             hoistway_llama_lease_free
#define hoistway                        hoistway_llama
#define hoistway_streaming              hoistway_llama_streaming

#include "hoistway.h"

// What hoistway.hpp includes, before all that follows is hidden.
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Others do not see them.
#if defined(__GNUC__) && !defined(_WIN32)
#    define HOISTWAY_HIDDEN __attribute__((visibility("hidden")))
#    pragma GCC visibility push(hidden)
#    include "hoistway.hpp"
#    pragma GCC visibility pop
#else
#    define HOISTWAY_HIDDEN
#    include "hoistway.hpp"
#endif

// A shared library, which stays loaded: it may have threads.
class hoistway_shared_library {
public:
    explicit hoistway_shared_library(const char * name);

    // Of several functions, the first that is missing makes the error.
    template <typename function> void find(const char * name, function & pointer) {
        if (handle) {
            pointer = (function) address_of(name);
            if (!pointer && error.empty()) {
                error = std::string("it has no function ") + name;
            }
        }
    }

    std::string error;

private:
    void * address_of(const char * name) const;

    void * handle = nullptr;
};

// The value of LLAMA_WEIGHT_SOURCE, or nullptr if it is unset or empty.
const char * hoistway_library_name();

// Loads the functions that a store of experts needs, once. Throws std::runtime_error with the reason if they cannot be used.
void hoistway_load_experts_functions();
