// hoistway's library for llama.cpp: found at run time by LLAMA_WEIGHT_SOURCE, so that nothing depends on its presence.
#pragma once

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

// hoistway's functions are defined in hoistway-library.cpp, as calls into the library. Others do not see them, nor what is made
// of hoistway.hpp here: a program may be linked with the library itself.
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
